"""How exact a number measured over prompts is: bootstrap over prompts.

Rounds of one answer depend on each other, prompts do not: whole prompts are drawn with replacement, N of N, and the
number is computed anew from each drawing. Two contestants measured on the same prompts are drawn together, so that what
the prompts add to both cancels in their difference (paired).

The spread of the drawings gives the standard error, Student's t with N - 1 degrees of freedom the width: percentiles of
the drawings, the usual choice, are too narrow where prompts are few (docs/log.md), as a domain's are.

Shapes: N prompts, S drawings.
"""

import functools
import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

Interval = tuple[float, float]
LEVEL = 0.95
DRAWINGS = 4000
METHOD = "bootstrap over prompts, Student's t"


@dataclass(frozen=True, kw_only=True)
class Quotient:
    """A sum over prompts divided by another; a prompt that adds nothing to the second has no say."""

    top_N: Tensor
    bottom_N: Tensor

    @classmethod
    def of(cls, parts: list[tuple[float, float]]) -> "Quotient":
        """From what each prompt adds to the two sums."""
        top_N, bottom_N = torch.tensor(parts, dtype=torch.float64).reshape(-1, 2).unbind(1)
        return cls(top_N=top_N, bottom_N=bottom_N)

    @property
    def value(self) -> float | None:
        return float(self.top_N.sum() / self.bottom_N.sum()) if self.count else None

    @property
    def count(self) -> int:
        """Prompts that have a say."""
        return int((self.bottom_N > 0).sum())

    def redrawn(self, times_SN: Tensor) -> Tensor:
        """The number from each drawing [S], NaN where it has no prompt that has a say."""
        return (times_SN @ self.top_N) / (times_SN @ self.bottom_N)


def interval(one: Quotient, *, level: float = LEVEL, seed: int = 0) -> Interval | None:
    """Confidence interval of a number; None where fewer than two prompts have a say."""
    if one.value is None or one.count < 2:
        return None
    return _around(one.value, _error(one.redrawn(_draw(len(one.top_N), seed)), one.count), one.count, level)


def difference_interval(
    one: Quotient, other: Quotient, *, level: float = LEVEL, seed: int = 0, paired: bool = True
) -> Interval | None:
    """Confidence interval of `one` - `other`, measured on the same prompts in the same order.

    Args:
        one: A number.
        other: The one it is compared with.
        level: Share of such intervals that hold the true difference.
        seed: Of the drawings.
        paired: False draws the prompts of each for itself, as if they were not the same.

    Returns:
        Its ends; None where fewer than two prompts have a say in either.
    """
    error = difference_error(one, other, seed=seed, paired=paired)
    if error is None or one.value is None or other.value is None:
        return None
    return _around(one.value - other.value, error, min(one.count, other.count), level)


def difference_error(one: Quotient, other: Quotient, *, seed: int = 0, paired: bool = True) -> float | None:
    """Standard error of `one` - `other`, as in `difference_interval`."""
    count = min(one.count, other.count)
    if count < 2:
        return None
    times_SN = _draw(len(one.top_N), seed)
    other_times_SN = times_SN if paired else _draw(len(other.top_N), seed + 1)
    return _error(one.redrawn(times_SN) - other.redrawn(other_times_SN), count)


def ratio_interval(one: Quotient, other: Quotient, *, level: float = LEVEL, seed: int = 0) -> Interval | None:
    """Confidence interval of `one` / `other`, paired; arguments and the None as `difference_interval`'s."""
    count = min(one.count, other.count)
    if count < 2 or not one.value or not other.value:
        return None
    times_SN = _draw(len(one.top_N), seed)
    error = _error(one.redrawn(times_SN) / other.redrawn(times_SN), count)
    return _around(one.value / other.value, error, count, level)


def listed(found: Interval | None) -> list[float] | None:
    """As JSON gives it back."""
    return None if found is None else list(found)


def excludes_zero(found: Interval | None) -> bool:
    return found is not None and (found[0] > 0 or found[1] < 0)


@functools.lru_cache(maxsize=4)
def _draw(count: int, seed: int) -> Tensor:
    """How often each prompt is in each drawing [S, N]."""
    generator = torch.Generator().manual_seed(seed)
    drawn_SN = torch.randint(count, (DRAWINGS, count), generator=generator)
    times_SN = torch.zeros(DRAWINGS, count, dtype=torch.float64)
    return times_SN.scatter_add_(1, drawn_SN, torch.ones_like(times_SN))


def _error(redrawn_S: Tensor, count: int) -> float:
    # drawings vary by (N - 1) / N of the variance that the number has
    return float(redrawn_S[redrawn_S.isfinite()].std(correction=0)) * math.sqrt(count / (count - 1))


def _around(value: float, error: float, count: int, level: float) -> Interval:
    half = student_quantile(level, count - 1) * error
    return value - half, value + half


@functools.cache
def student_quantile(level: float, degrees: int) -> float:
    """The t within which Student's distribution lies, on both sides, with probability `level`."""
    low, high = 0.0, NormalDist().inv_cdf((1 + level) / 2)
    while _within(high, degrees) < level:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < level else (low, middle)
    return high


def _within(t: float, degrees: int) -> float:
    """Probability of [-t, t] (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(degrees))
    is_odd = degrees % 2 == 1
    term = math.cos(angle) if is_odd else 1.0
    total = 0.0 if degrees == 1 else term
    for place in range(2 + is_odd, degrees - 1, 2):
        term *= (place - 1) / place * math.cos(angle) ** 2
        total += term
    inside = math.sin(angle) * total
    return 2 / math.pi * (angle + inside) if is_odd else inside
