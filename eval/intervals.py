"""The acceptance numbers with their intervals: `summarize`, and beside each number how exact it is.

Names end in `_interval`: [low, high] of 95 %, null where fewer than two prompts have a say in the number.
"""

from collections.abc import Sequence
from typing import Any

from drafthead.eval.acceptance import RequestRounds, summarize
from drafthead.eval.bootstrap import Interval, Quotient, interval

BRIEF = (
    "prompts",
    "drafts",
    "mean_acceptance_length",
    "mean_acceptance_length_interval",
    "tokens_per_pass",
    "tokens_per_pass_interval",
    "per_position",
)


def summarize_with_intervals(requests: Sequence[RequestRounds], k: int) -> dict[str, Any]:
    """The object of `summarize` for requests that say what was drafted.

    Returns:
        Also, over all requests and in each of `by_domain`: `prompts`, and for `per_position` (a list),
        `mean_acceptance_length`, `mean_of_requests_acceptance_length` and `tokens_per_pass` the number's `_interval`.

    Raises:
        InputError: As `summarize`.
    """
    summary = summarize(requests, k) | intervals(requests, k)
    for domain, numbers in summary["by_domain"].items():
        numbers |= intervals([one for one in requests if one.domain == domain], k)
    return summary


def brief(summary: dict[str, Any]) -> dict[str, Any]:
    """What is said of one part of many."""
    return {name: summary[name] for name in BRIEF}


def intervals(requests: Sequence[RequestRounds], k: int) -> dict[str, Any]:
    most = k + 1
    return {
        "prompts": len(requests),
        "per_position_interval": [bounded(position_rate(requests, place), 0, 1) for place in range(k)],
        "mean_acceptance_length_interval": bounded(pooled_length(requests), 1, most),
        "mean_of_requests_acceptance_length_interval": bounded(mean_of_requests(requests), 1, most),
        "tokens_per_pass_interval": bounded(tokens_per_pass(requests), 1, most),
    }


def bounded(number: Quotient, least: float, most: float) -> list[float] | None:
    """The interval, no wider than the values that the number can have."""
    found: Interval | None = interval(number)
    return None if found is None else [max(least, found[0]), min(most, found[1])]


# ---- the numbers of `acceptance._summarize`, as sums over requests ---------------------------------------


def pooled_length(requests: Sequence[RequestRounds]) -> Quotient:
    """1 + accepted / rounds, pooled."""
    return Quotient.of([(sum(one.accepted) + one.rounds, one.rounds) for one in requests])


def mean_of_requests(requests: Sequence[RequestRounds]) -> Quotient:
    """Mean over requests of tokens / rounds, without the tokens of passes that had no draft."""
    return Quotient.of([(one.tokens_of_rounds / one.rounds, 1) if one.rounds else (0, 0) for one in requests])


def tokens_per_pass(requests: Sequence[RequestRounds]) -> Quotient:
    """Tokens over passes of the target, with a draft or without."""
    return Quotient.of([(one.num_tokens, len(one.accepted)) for one in requests])


def position_rate(requests: Sequence[RequestRounds], place: int) -> Quotient:
    """Share of rounds that kept the first `place` + 1 draft tokens."""
    return Quotient.of([(sum(count > place for count in one.accepted), one.rounds) for one in requests])
