"""What choosing k round by round, from acceptance seen so far, would have given on recorded rounds.

A recorded round says how many of its K draft tokens were kept; with k < K of them, min(kept, k) would have been. The
rounds after it are taken as recorded, although they would have begun a few tokens earlier: the replay is of the kind
of text, not of the text.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from drafthead.data.errors import InputError
from drafthead.eval.economics import Rates, RoundCost, best_k, choose_k


@dataclass
class RunningRates:
    """Conditional rates by position, of about the last `memory` rounds that judged a position.

    A position that was never judged has the rate of the one before it, the first one 1, so that drafting begins deep.
    """

    max_k: int
    memory: float
    kept: list[float] = field(init=False)
    judged: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.kept, self.judged = [0.0] * self.max_k, [0.0] * self.max_k

    def add(self, kept: int, k: int) -> None:
        """A round over k draft tokens kept the first `kept`; the one behind them, if there is one, was refused."""
        fade = 1 - 1 / self.memory
        for position in range(min(kept + 1, k)):
            self.kept[position] = fade * self.kept[position] + (position < kept)
            self.judged[position] = fade * self.judged[position] + 1

    def rates(self) -> Rates:
        found: list[float] = []
        for kept, judged in zip(self.kept, self.judged, strict=True):
            found.append(min(1.0, kept / judged) if judged else found[-1] if found else 1.0)
        return Rates(conditional=tuple(found))


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What one way of choosing k gave."""

    speedup: float
    """Tokens of all rounds over their cost."""
    ks: list[int]
    """Of every round."""

    @property
    def settled_k(self) -> int:
        """The k used most in the second half."""
        return Counter(self.ks[len(self.ks) // 2 :]).most_common(1)[0][0]


def replay_adaptive(
    kept: Sequence[int], cost: RoundCost, max_k: int, memory: float = 500, probe_every: int = 50
) -> Replay:
    """Choose k before every round by the rates so far; every `probe_every` rounds draft `max_k`, or what lies behind
    the present k (all of it where that is 0) would never be seen again.

    Raises:
        InputError: There are no rounds, or one keeps more than `max_k`.
    """
    _check(kept, max_k)
    running = RunningRates(max_k=max_k, memory=memory)
    ks = []
    for number, of_round in enumerate(kept):
        k = max_k if number % probe_every == 0 else choose_k(running.rates(), cost, max_k).k
        running.add(min(of_round, k), k)
        ks.append(k)
    return _replay(kept, cost, ks)


def replay_static(kept: Sequence[int], cost: RoundCost, max_k: int) -> Replay:
    """The best of all k kept throughout, 0 included, known only afterwards.

    Raises:
        InputError: As `replay_adaptive`.
    """
    _check(kept, max_k)
    every = [_replay(kept, cost, [k] * len(kept)) for k in range(max_k + 1)]
    return every[best_k([one.speedup for one in every])]


def rates_of(kept: Sequence[int], max_k: int) -> Rates:
    """Conditional rates of recorded rounds, up to the last position that any round judged.

    Raises:
        InputError: As `replay_adaptive`.
    """
    _check(kept, max_k)
    counts = [sum(of_round >= position for of_round in kept) for position in range(max_k + 1)]
    rates = [after / before for before, after in pairwise(counts) if before]
    return Rates(conditional=tuple(rates), field="trace")


def _replay(kept: Sequence[int], cost: RoundCost, ks: list[int]) -> Replay:
    tokens = sum(1 + min(of_round, k) for of_round, k in zip(kept, ks, strict=True))
    price = {k: cost(k) for k in set(ks)}
    return Replay(speedup=tokens / sum(price[k] for k in ks), ks=ks)


def _check(kept: Sequence[int], max_k: int) -> None:
    if not kept:
        raise InputError("trace: no rounds")
    for number, of_round in enumerate(kept):
        if not 0 <= of_round <= max_k:
            raise InputError(f"trace: round {number} keeps {of_round} draft tokens; 0 to {max_k} were drafted")
