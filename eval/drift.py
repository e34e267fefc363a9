"""Whether the acceptance at each draft position is still what was measured before.

For two shares with their numbers of rounds Newcombe's interval of the difference (Statistics in Medicine 17, 1998,
method 10) is put together from the Wilson interval of each. All positions together keep one `alpha` (Bonferroni).

The intervals take rounds for independent. Rounds of one answer are not quite, and other prompts have other rates, so
a difference counts as drift only where it is also larger than a tolerance.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

from drafthead.eval.vllm_metrics import DraftCounts

Verdict = Literal["as expected", "drift", "too few rounds to tell"]


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Rates that were measured before."""

    source: str
    """Where they were found, for people."""
    drafts: int
    per_position: list[float]


def find_drift(expected: Expected, counts: DraftCounts, *, tolerance: float, alpha: float = 0.05) -> dict[str, Any]:
    """Hold the counts of a server against rates measured before; both have the same k and at least one draft.

    Returns:
        `ok`; `positions`, for each `expected`, `found`, `difference` (found - expected), its `interval` and
        `verdict`: "drift" where the interval leaves out zero and the difference is beyond the tolerance, "as expected"
        where the interval lies within the tolerance on both sides, else "too few rounds to tell"; `tolerance`, `alpha`,
        `expected_from` and the number of `expected_drafts`.
    """
    z = NormalDist().inv_cdf(1 - alpha / counts.k / 2)
    positions = []
    for number, (rate, count) in enumerate(zip(expected.per_position, counts.per_position, strict=True)):
        found = count.value / counts.drafts.value
        # what the log's rounding leaves open widens the interval
        low = wilson(count.low / counts.drafts.high, counts.drafts.low, z)[0]
        high = wilson(min(count.high / counts.drafts.low, 1.0), counts.drafts.low, z)[1]
        interval = newcombe((found, low, high), (rate, *wilson(rate, expected.drafts, z)))
        difference = found - rate
        positions.append(
            {
                "position": number,
                "expected": rate,
                "found": found,
                "difference": difference,
                "interval": list(interval),
                "verdict": judge(difference, interval, tolerance),
            }
        )
    return {
        "ok": all(one["verdict"] != "drift" for one in positions),
        "expected_from": expected.source,
        "expected_drafts": expected.drafts,
        "tolerance": tolerance,
        "alpha": alpha,
        "positions": positions,
    }


def judge(difference: float, interval: Sequence[float], tolerance: float) -> Verdict:
    low, high = interval
    if (low > 0 or high < 0) and abs(difference) > tolerance:
        return "drift"
    if -tolerance <= low and high <= tolerance:
        return "as expected"
    return "too few rounds to tell"


def newcombe(one: tuple[float, float, float], other: tuple[float, float, float]) -> tuple[float, float]:
    """Interval of the difference of two shares, each given with its own interval: (share, low, high)."""
    share, low, high = one
    other_share, other_low, other_high = other
    difference = share - other_share
    return (
        difference - math.hypot(share - low, other_high - other_share),
        difference + math.hypot(high - share, other_share - other_low),
    )


def wilson(share: float, rounds: int, z: float) -> tuple[float, float]:
    """Wilson's score interval of a share: (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)."""
    shrink = 1 + z * z / rounds
    middle = share + z * z / (2 * rounds)
    half = z * math.sqrt(share * (1 - share) / rounds + z * z / (4 * rounds * rounds))
    return max(0.0, (middle - half) / shrink), min(1.0, (middle + half) / shrink)
