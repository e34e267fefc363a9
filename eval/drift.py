"""Whether the acceptance at each draft position is still what was measured before.

For two shares with their numbers of rounds Newcombe's interval of the difference (Statistics in Medicine 17, 1998,
method 10) is put together from the Wilson interval of each. All positions together keep one `alpha` (Bonferroni).

Rounds of one answer are not independent, and prompts differ: a rate over a few dozen answers is less exact than its
number of rounds says. Where the rounds of each answer are known (`design_effects`), both sides count only as many
rounds as are worth independent ones. A difference counts as drift only where it is also larger than a tolerance.

A server that drafts less than k tokens now and then (a schedule by batch size does) accepts less at later positions for
that reason alone. How many drafts came to a position is not counted; what the counters leave open widens the interval.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

from drafthead.eval.bootstrap import student_quantile
from drafthead.eval.vllm_metrics import Count, DraftCounts

Verdict = Literal["as expected", "drift", "too few rounds to tell"]


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Rates that were measured before."""

    source: str
    """Where they were found, for people."""
    drafts: int
    per_position: list[float]
    answers: int | None = None
    """How many the design effects were measured over; None where the rounds of each answer are not known."""
    design_effects: Sequence[float] = ()
    """By position: rounds that are worth one independent round. The last one also stands for those behind."""

    def effect(self, position: int) -> float:
        known = self.design_effects[: position + 1]
        return known[-1] if known else 1.0


def design_effects(answers: Sequence[Sequence[int]], k: int) -> list[float]:
    """How much less exact the rate of each position is than independent rounds would make it (Kish 1965); at least 1.

    The variance of the ratio of two sums over answers, sum_j (kept_j - p rounds_j)^2 / R^2 n / (n - 1), over p (1 - p)
    / R.

    Args:
        answers: Draft tokens that each round of each answer kept; two answers or more with rounds.
        k: Draft tokens of a round.
    """
    rounds, n = sum(map(len, answers)), len(answers)
    found = []
    for position in range(k):
        kept = [sum(count > position for count in one) for one in answers]
        rate = sum(kept) / rounds
        squares = sum((count - rate * len(one)) ** 2 for count, one in zip(kept, answers, strict=True))
        independent = rate * (1 - rate) * rounds
        found.append(max(1.0, squares * n / (n - 1) / independent) if independent else 1.0)
    return found


def find_drift(expected: Expected, counts: DraftCounts, *, tolerance: float, alpha: float = 0.05) -> dict[str, Any]:
    """Hold the counts of a server against rates measured before; both have the same k and at least one draft.

    Returns:
        `ok`; `positions`, for each `expected`, `found`, `difference` (found - expected), its `interval`, `drafts` that
        came to the position (the least and the most), `design_effect` and `verdict`: "drift" where the interval leaves
        out zero and the difference is beyond the tolerance, "as expected" where the interval lies within the tolerance
        on both sides, else "too few rounds to tell"; `short_drafts`, whether some drafts had less than k tokens;
        `tolerance`, `alpha`, `expected_from` and the number of `expected_drafts`.
    """
    level = 1 - alpha / counts.k
    z = NormalDist().inv_cdf((1 + level) / 2)
    # of few answers the spread itself is not known well
    z_expected = z if expected.answers is None else student_quantile(level, expected.answers - 1)
    positions = []
    for number, (rate, count) in enumerate(zip(expected.per_position, counts.per_position, strict=True)):
        effect, came = expected.effect(number), drafts_at(counts, number)
        found, low, high = found_share(count, came, rate, is_short=came != counts.drafts)
        rounds = came.low / effect
        interval = newcombe(
            (found, wilson(low, rounds, z)[0], wilson(high, rounds, z)[1]),
            (rate, *wilson(rate, expected.drafts / effect, z_expected)),
        )
        difference = found - rate
        positions.append(
            {
                "position": number + 1,
                "expected": rate,
                "found": found,
                "difference": difference,
                "interval": list(interval),
                "drafts": [came.low, came.high],
                "design_effect": effect,
                "verdict": judge(difference, interval, tolerance),
            }
        )
    return {
        "ok": all(one["verdict"] != "drift" for one in positions),
        "expected_from": expected.source,
        "expected_drafts": expected.drafts,
        "tolerance": tolerance,
        "alpha": alpha,
        "short_drafts": counts.draft_tokens < counts.k * counts.drafts.low,
        "positions": positions,
    }


def drafts_at(counts: DraftCounts, position: int) -> Count:
    """Drafts that had a token at a position: all at the first, at later ones what the sum of draft tokens allows.

    Of N drafts with D tokens in all, n_i of them with more than i, it is n_i <= N, n_i >= n_i+1 and sum n_i = D. So
    n_i lies between (D - i N) / (k - i) and (D - N) / i.
    """
    drafts, tokens, k = counts.drafts, counts.draft_tokens, counts.k
    if not position or tokens >= k * drafts.high:
        return drafts
    most = min(drafts.high, (tokens - drafts.low) // position)
    least = max(counts.per_position[position].low, -(-(tokens - position * drafts.high) // (k - position)))
    return Count(value=(least + most) // 2, low=min(least, most), high=most)


def found_share(count: Count, drafts: Count, expected: float, *, is_short: bool) -> tuple[float, float, float]:
    """The share that was accepted, and the least and the most that it can be.

    Where only bounds are known of the drafts that came so far, of all it can be the one nearest to what is expected.
    """
    low = count.low / drafts.high if drafts.high else 0.0
    high = min(count.high / drafts.low, 1.0) if drafts.low else 1.0
    found = min(max(expected, low), high) if is_short else count.value / drafts.value
    return found, low, high


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


def wilson(share: float, rounds: float, z: float) -> tuple[float, float]:
    """Wilson's score interval of a share: (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)."""
    if not rounds:
        return 0.0, 1.0
    shrink = 1 + z * z / rounds
    middle = share + z * z / (2 * rounds)
    half = z * math.sqrt(share * (1 - share) / rounds + z * z / (4 * rounds * rounds))
    return max(0.0, (middle - half) / shrink), min(1.0, (middle + half) / shrink)
