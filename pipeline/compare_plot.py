"""The plot of `drafthead compare`: one self-contained SVG, acceptance by position beside accept length by domain.

Lines through bars and dots are the intervals.
"""

import math
from typing import Any
from xml.sax.saxutils import escape, quoteattr

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Told apart by colour-blind readers as well (Okabe and Ito)."""
GREY, LIGHT = "#555555", "#dddddd"
WIDTH, BOTTOM = 960, 40
LEFT, BARS, GAP, DOTS = 56, 380, 170, 310
"""Widths: margin, left panel, room for the domains' names, right panel."""
ROW, SMALLEST = 24, 220
ENTRY, ENTRIES = 300, 3
"""Width of an entry of the legend, and how many stand side by side."""


def render_svg(report: dict[str, Any]) -> str:
    """Draw an object of `compare.compare`."""
    runs = report["runs"]
    domains = list(runs[0]["by_domain"])
    top, height = 76 + 18 * math.ceil(len(runs) / ENTRIES), max(SMALLEST, ROW * (1 + len(domains)))
    how = f"temperature {report['temperature']:g}" if report["temperature"] else "greedy"
    title = f"Accepted draft tokens: {report['prompts']} prompts, k={report['k']}, {how}, {report['dtype']}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + height + BOTTOM}" role="img" '
        f'aria-label={quoteattr(title)} font-family="sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        '<rect width="100%" height="100%" fill="white"/>',
        text(LEFT, 24, title, size=15),
        *legend(runs),
        *position_bars(runs, report["k"], top, height),
        *domain_dots(runs, domains, top, height),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def legend(runs: list[dict[str, Any]]) -> list[str]:
    """Name, head and accept length of each run."""
    parts = []
    for place, run in enumerate(runs):
        x, y = LEFT + ENTRY * (place % ENTRIES), 40 + 18 * (place // ENTRIES)
        name = run["name"] if len(run["name"]) <= 20 else f"…{run['name'][-19:]}"
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour(place)}"/>')
        kind = "" if run["head"] is None else f" ({run['head']})"
        label = f"{name}{kind}: accept length {show(run['mean_acceptance_length'])}"
        parts.append(text(x + 18, y + 10, label))
    return parts


def position_bars(runs: list[dict[str, Any]], k: int, top: float, height: float) -> list[str]:
    """Share of all rounds that kept the first i draft tokens: a group of bars for each i."""
    parts = [text(LEFT, top - 14, "accepted per position, of all rounds", fill=GREY)]
    for tick in range(6):
        y = top + height * (1 - tick / 5)
        parts += [line(LEFT, y, LEFT + BARS, y), text(LEFT - 8, y + 4, f"{tick / 5:.1f}", anchor="end", fill=GREY)]
    group = BARS / k
    width = 0.8 * group / len(runs)
    for position in range(k):
        start = LEFT + group * (position + 0.1)
        for place, run in enumerate(runs):
            rate = run["per_position"][position] or 0.0
            x, size = start + place * width, height * rate
            hint = f"<title>{escape(run['name'])}, position {position + 1}: {rate:.3f}</title>"
            parts.append(
                f'<rect x="{x:.1f}" y="{top + height - size:.1f}" width="{width - 2:.1f}" height="{size:.1f}" '
                f'fill="{colour(place)}">{hint}</rect>'
            )
            if ends := run["per_position_interval"][position]:
                middle, (low, high) = x + (width - 2) / 2, (top + height * (1 - end) for end in ends)
                parts.append(line(middle, low, middle, high, stroke="black"))
        middle = LEFT + group * (position + 0.5)
        parts.append(text(middle, top + height + 18, f"position {position + 1}", anchor="middle", fill=GREY))
    return parts


def domain_dots(runs: list[dict[str, Any]], domains: list[str], top: float, height: float) -> list[str]:
    """Accept length of each run in each domain, on one axis from 1 on; with drafters, tokens per pass."""
    left = LEFT + BARS + GAP
    is_ragged = any(run["kind"] == "drafter" for run in runs)
    name = "tokens_per_pass" if is_ragged else "mean_acceptance_length"
    lengths = [run["by_domain"][domain][name] for run in runs for domain in domains]
    end = axis_end([length for length in lengths if length is not None])
    scale = DOTS / (end - 1)
    parts = [
        text(left, top - 14, f"{'tokens per pass' if is_ragged else 'accept length'} by domain, pooled", fill=GREY)
    ]
    ticks = round((end - 1) / 0.5)
    for tick in range(ticks + 1):
        x = left + scale * 0.5 * tick
        label = text(x, top + height + 18, f"{1 + 0.5 * tick:g}", anchor="middle", fill=GREY)
        parts += [line(x, top, x, top + height), label]
    step = height / max(1, len(domains))
    for row, domain in enumerate(domains):
        middle = top + step * (row + 0.5)
        parts.append(text(left - 12, middle + 4, domain if len(domain) < 24 else f"{domain[:22]}…", anchor="end"))
        for place, run in enumerate(runs):
            length, ends = run["by_domain"][domain][name], run["by_domain"][domain][f"{name}_interval"]
            y = middle + 4 * (place - (len(runs) - 1) / 2)  # equal lengths stay visible
            if ends:
                low, high = (left + scale * (min(one, end) - 1) for one in ends)
                parts.append(line(low, y, high, y, stroke=colour(place)))
            if length is not None:
                parts.append(
                    f'<circle cx="{left + scale * (length - 1):.1f}" cy="{y:.1f}" r="5" fill="{colour(place)}" '
                    f'fill-opacity="0.85"><title>{escape(run["name"])}, {escape(domain)}: {length:.3f}</title></circle>'
                )
    return parts


def axis_end(lengths: list[float]) -> float:
    """The next half above all lengths, at least 1.5."""
    return max(1.5, math.ceil(2 * max(lengths, default=1.0)) / 2)


def colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def show(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def text(x: float, y: float, content: str, *, anchor: str = "start", fill: str = "black", size: int = 12) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}" font-size="{size}"'
    return f"<text {place}>{escape(content)}</text>"


def line(x1: float, y1: float, x2: float, y2: float, stroke: str = LIGHT) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}"/>'
