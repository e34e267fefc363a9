"""What `drafthead compare` prints: acceptance and cost with a row per run, accept lengths with a row per domain."""

from collections.abc import Callable, Mapping
from typing import Any

from drafthead.pipeline.summary import number

Columns = Mapping[str, Callable[[dict[str, Any]], str]]
LEGEND = (
    "pos i: share of all rounds that kept the first i drafts (unconditional)",
    "cond i: share of the rounds that kept the i - 1 drafts before (conditional)",
    "accept length: 1 + accepted / rounds, pooled; mean of requests: mean of each request's tokens / rounds",
    "draft cost: seconds of a round's drafting over those of its verification by the target (medians, batch 1)",
    "times are those of our own loop in transformers, not of a server",
)


def render_comparison(report: dict[str, Any]) -> str:
    """Write an object of `compare.compare` as text."""
    runs, k = report["runs"], report["k"]
    lines = [
        f"{report['prompts']} prompts, k={k}, greedy, {report['dtype']}, at most {report['max_new_tokens']} new tokens",
        f"plain decoding: {number(report['plain_ms_per_token'], 1)} ms/token at batch 1",
        "",
        *_run_table(runs, acceptance_columns(k)),
        "",
        *_run_table(runs, COST_COLUMNS),
        "",
        "accept length by domain",
        *domain_table(runs),
        "",
        *LEGEND,
        f"plot: {report['plot']}",
    ]
    return "\n".join(lines)


def acceptance_columns(k: int) -> Columns:
    def rate(kind: str, position: int) -> Callable[[dict[str, Any]], str]:
        return lambda one: number(one[kind][position], 3)

    return {
        "head": lambda one: one["head"],
        **{f"pos {position + 1}": rate("per_position", position) for position in range(k)},
        **{f"cond {position + 1}": rate("conditional", position) for position in range(k)},
        "accept length": lambda one: number(one["mean_acceptance_length"], 3),
        "mean of requests": lambda one: number(one["mean_of_requests_acceptance_length"], 3),
        "rounds": lambda one: str(one["drafts"]),
        "equal to plain": lambda one: one["identical_to_plain"],
    }


COST_COLUMNS: Columns = {
    "draft ms": lambda one: _milliseconds(one["draft_s"]),
    "verify ms": lambda one: _milliseconds(one["verify_s"]),
    "draft cost": lambda one: number(one["draft_cost"], 3),
    "ms/token": lambda one: number(one["speculative_ms_per_token"], 1),
    "speedup": lambda one: number(one["speedup"], 2),
    "trained parameters": lambda one: f"{one['trained_parameters']:,}",
    "draft vocabulary": lambda one: f"{one['draft_vocab_size']:,}",
    "trained tokens": lambda one: f"{one['trained_tokens']:,}",
}


def domain_table(runs: list[dict[str, Any]]) -> list[str]:
    rows = [
        [domain, *(number(one["by_domain"][domain]["mean_acceptance_length"], 3) for one in runs)]
        for domain in runs[0]["by_domain"]
    ]
    return _table(["domain", *(one["name"] for one in runs)], rows)


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
