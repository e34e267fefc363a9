"""What `drafthead compare` prints: acceptance, lengths and cost with a row per contestant, by domain and prompt length
with a row each, and who wins."""

from collections.abc import Callable, Mapping
from typing import Any

from drafthead.pipeline.summary import number

Columns = Mapping[str, Callable[[dict[str, Any]], str]]
LEGEND = (
    "pos i: share of all rounds that kept the first i drafts (unconditional)",
    "cond i: share of the rounds that kept the i - 1 drafts before (conditional)",
    "rounds: passes of the target with a draft, as vLLM counts them; passes: with those that had none",
    "accept length: 1 + accepted / rounds, pooled; mean of requests: mean of each request's tokens / rounds",
    "tokens per pass: tokens of the answers over all passes of the target, what drafting is worth",
    "draft cost: seconds of a round's drafting over those of its verification by the target (medians, batch 1)",
    "times are those of our own loop in transformers, not of a server; mean speedup: plain mean ms/token over drafted",
)


def render_comparison(report: dict[str, Any]) -> str:
    """Write an object of `compare.compare` as text."""
    intervals = report["intervals"]
    how = f"k={report['k']}, {report['dtype']}, at most {report['max_new_tokens']} new tokens"
    lines = [
        f"{report['prompts']} prompts, {how}",
        f"[...] holds the number with {100 * intervals['level']:g} % ({intervals['method']})",
    ]
    for section in report["temperatures"]:
        lines += ["", *render_section(section, report["k"])]
    return "\n".join([*lines, "", *LEGEND, *(f"plot: {section['plot']}" for section in report["temperatures"])])


def render_section(section: dict[str, Any], k: int) -> list[str]:
    """The tables of one temperature."""
    runs, temperature, timed = section["runs"], section["temperature"], section["timed_prompts"]
    sampled = f"temperature {temperature:g}: texts are sampled, the verifier keeps their distribution"
    return [
        sampled if temperature else "temperature 0: greedy",
        f"plain decoding: mean ms/token {exact(section, 'mean_plain_ms_per_token', 1)} at batch 1 ({timed} prompts)",
        "",
        *_run_table(runs, acceptance_columns(k)),
        "",
        *_run_table(runs, LENGTH_COLUMNS),
        "",
        *_run_table(runs, COST_COLUMNS),
        "",
        *_group_tables(runs),
        *(winner["text"] for winner in section["winners"].values()),
    ]


def acceptance_columns(k: int) -> Columns:
    def rate(kind: str, position: int) -> Callable[[dict[str, Any]], str]:
        return lambda one: number(one[kind][position], 3)

    return {
        "head": lambda one: one["head"] or "-",
        **{f"pos {position + 1}": rate("per_position", position) for position in range(k)},
        **{f"cond {position + 1}": rate("conditional", position) for position in range(k)},
        "rounds": lambda one: str(one["drafts"]),
        "passes": lambda one: str(one["passes"]),
        "equal to plain": lambda one: one["identical_to_plain"] or "-",
    }


LENGTH_COLUMNS: Columns = {
    "accept length": lambda one: exact(one, "mean_acceptance_length", 3),
    "mean of requests": lambda one: exact(one, "mean_of_requests_acceptance_length", 3),
    "tokens per pass": lambda one: exact(one, "tokens_per_pass", 3),
}
COST_COLUMNS: Columns = {
    "draft ms": lambda one: _milliseconds(one["draft_s"]),
    "verify ms": lambda one: _milliseconds(one["verify_s"]),
    "draft cost": lambda one: number(one["draft_cost"], 3),
    "mean ms/token": lambda one: exact(one, "mean_ms_per_token", 1),
    "mean speedup": lambda one: exact(one, "mean_speedup", 2),
    "trained parameters": lambda one: _count(one["trained_parameters"]),
    "draft vocabulary": lambda one: _count(one["draft_vocab_size"]),
    "trained tokens": lambda one: _count(one["trained_tokens"]),
}


def domains_of(one: dict[str, Any]) -> dict[str, dict[str, Any]]:
    groups: dict[str, dict[str, Any]] = one["by_domain"]
    return groups


def contexts_of(one: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {f"{bucket['from']}-{bucket['to']}": bucket for bucket in one["by_context_length"]}


def _group_tables(runs: list[dict[str, Any]]) -> list[str]:
    """Accept length by domain and by prompt length; tokens per pass as well, where some passes have no draft."""
    lines = []
    for title, name in (("accept length", "mean_acceptance_length"), ("tokens per pass", "tokens_per_pass")):
        if name == "tokens_per_pass" and all(one["kind"] == "run" for one in runs):
            continue
        lines += [f"{title} by domain", *_group_table(runs, domains_of, "domain", name), ""]
        lines += [f"{title} by tokens of the prompt", *_group_table(runs, contexts_of, "tokens", name), ""]
    return lines


def _group_table(
    runs: list[dict[str, Any]], groups_of: Callable[[dict[str, Any]], dict[str, dict[str, Any]]], what: str, name: str
) -> list[str]:
    """A row per group of prompts: how many prompts, and each contestant's number and rounds."""
    groups = [groups_of(one) for one in runs]
    rows = [
        [
            group,
            str(first["prompts"]),
            *(f"{exact(numbers[group], name, 2)} {numbers[group]['drafts']:>5}" for numbers in groups),
        ]
        for group, first in groups[0].items()
    ]
    return _table([what, "prompts", *(f"{one['name']}, rounds" for one in runs)], rows)


def exact(numbers: dict[str, Any], name: str, digits: int) -> str:
    """A number with its interval."""
    ends = numbers[f"{name}_interval"]
    shown = "" if ends is None else f" [{number(ends[0], digits)}, {number(ends[1], digits)}]"
    return f"{number(numbers[name], digits)}{shown}"


def _run_table(runs: list[dict[str, Any]], columns: Columns) -> list[str]:
    return _table(["run", *columns], [[one["name"], *(cell(one) for cell in columns.values())] for one in runs])


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Columns as wide as their longest cell: the first to the left, the others to the right."""
    widths = [max(len(row[place]) for row in [header, *rows]) for place in range(len(header))]
    return [
        "  ".join(cell.rjust(width) if place else cell.ljust(width) for place, (cell, width) in enumerate(cells))
        for cells in (list(zip(row, widths, strict=True)) for row in [header, *rows])
    ]


def _milliseconds(seconds: float | None) -> str:
    return number(None if seconds is None else 1e3 * seconds, 1)


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
