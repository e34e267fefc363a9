"""What a round of speculation yields and costs, and how many draft tokens pay: the arithmetic of one batch size.

The unit of cost is one plain step of the target, which yields one token. A round over k draft tokens yields

    E[tokens] = 1 + a1 + a1 a2 + ... + a1 ... ak

with a_i the measured conditional rate of position i. A single rate a for all positions gives the geometric formula
(1 - a^(k+1)) / (1 - a) of Leviathan et al. (2023); measured rates fall with the position, so it is shown beside the
product and decides nothing.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from drafthead.data.errors import InputError

RoundCost = Callable[[int], float]
"""Plain target steps that a round over k draft tokens takes; 1 for k = 0."""
ROUNDING = 1e-9
"""Speed-ups that are no further apart are equal: 0.1 + 0.7 costs less than the 0.8 that it is."""


def geometric_tokens(alpha: float, k: float) -> float:
    """Expected tokens of a round if every position were accepted with probability `alpha`; `k` may be infinite."""
    return k + 1 if alpha == 1 else (1 - alpha ** (k + 1)) / (1 - alpha)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Conditional acceptance by position: given that all earlier draft tokens of the round were kept.

    Raises:
        InputError: There is none, or one lies outside 0 to 1.
    """

    conditional: tuple[float, ...]
    field: str = "conditional"
    """What the user knows them by, for errors."""

    def __post_init__(self) -> None:
        if not self.conditional:
            raise InputError(f"{self.field}: no rates; give one for each draft position, for instance 0.8,0.6,0.5")
        for position, rate in enumerate(self.conditional, 1):
            if not 0 <= rate <= 1:
                raise InputError(f"{self.field}: position {position} is {rate:g}; a rate lies between 0 and 1")

    @property
    def num_measured(self) -> int:
        return len(self.conditional)

    def survival(self, k: int) -> list[float]:
        """Probability that the first i draft tokens are all kept, i = 1 ... k; the last rate is held where none is."""
        held = [*self.conditional[:k], *[self.conditional[-1]] * (k - self.num_measured)]
        return list(accumulate(held, mul))

    def tokens(self, k: int) -> float:
        return 1 + sum(self.survival(k))

    @property
    def alpha(self) -> float:
        """The one rate that explains the measured ones best: draft tokens kept over draft tokens judged."""
        kept = self.survival(self.num_measured)
        return sum(kept) / (1 + sum(kept[:-1]))


@dataclass(frozen=True, kw_only=True)
class LinearCost:
    """A round of 1 + k (draft + row) plain steps.

    Raises:
        InputError: A cost is negative or not a number.
    """

    draft: float
    """Of proposing one token."""
    row: float
    """Of one more token in the target's pass: about 0 while the device waits for memory, towards 1 once it computes."""

    def __post_init__(self) -> None:
        for name, value in (("draft-cost", self.draft), ("row-cost", self.row)):
            check_cost(name, value)

    def __call__(self, k: int) -> float:
        return 1 + k * (self.draft + self.row)


def check_cost(field: str, value: float) -> None:
    """Raises InputError unless `value` is a finite number from 0 on."""
    if not (math.isfinite(value) and value >= 0):
        raise InputError(f"{field}: {value:g}; a cost is a number from 0 on, in units of one plain target step")


@dataclass(frozen=True, kw_only=True)
class KRow:
    """What one k gives."""

    k: int
    survival: float | None
    """Share of rounds that keep all k draft tokens; None for k = 0."""
    expected_tokens: float
    geometric_tokens: float
    """The same by `Rates.alpha` alone."""
    cost: float
    speedup: float
    extrapolated: bool
    """Whether it rests on positions that were not measured."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The best k, 0 where no k gains, with the table it was chosen from."""

    k: int
    speedup: float
    table: list[KRow]


def k_table(rates: Rates, cost: RoundCost, max_k: int) -> list[KRow]:
    """Every k from 0 to `max_k`."""
    survival, alpha = rates.survival(max_k), rates.alpha
    rows = []
    for k, tokens in enumerate(accumulate(survival, initial=1.0)):
        price = cost(k)
        rows.append(
            KRow(
                k=k,
                survival=survival[k - 1] if k else None,
                expected_tokens=tokens,
                geometric_tokens=geometric_tokens(alpha, k),
                cost=price,
                speedup=tokens / price,
                extrapolated=k > rates.num_measured,
            )
        )
    return rows


def choose_k(rates: Rates, cost: RoundCost, max_k: int) -> Choice:
    """The k of the greatest speed-up; the smaller of equal ones, so that k = 0 stays where nothing is gained."""
    table = k_table(rates, cost, max_k)
    best = table[best_k([row.speedup for row in table])]
    return Choice(k=best.k, speedup=best.speedup, table=table)


def choose_k_geometric(alpha: float, cost: RoundCost, max_k: int) -> tuple[int, float]:
    """The k and the speed-up that the geometric formula would promise."""
    speedups = [geometric_tokens(alpha, k) / cost(k) for k in range(max_k + 1)]
    best = best_k(speedups)
    return best, speedups[best]


def best_k(speedups: Sequence[float]) -> int:
    """The smallest k whose speed-up no other exceeds; that of each k from 0 on is given."""
    most = max(speedups)
    return next(k for k, speedup in enumerate(speedups) if speedup >= most - ROUNDING)
