"""The two-parameter cost of a round fitted to measured rounds, and how far it is from each of them.

A round over k draft tokens is modelled as 1 + k (draft + row) plain steps. Both parameters minimise the sum over the
measured k of (fitted / measured - 1)^2 of the whole round: the share that is drafting and the share that is the
target's pass are fitted with the same weights, so that their sum is the best for the round.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from drafthead.eval.economics import LinearCost

POOR_FIT = 0.15
"""Relative error of a round's cost from which on the model is said not to fit."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRound:
    """A round over k draft tokens, in plain steps of the same batch size."""

    k: int
    target: float
    """The target's pass over k + 1 tokens of each request; all of the round where its parts were not told apart."""
    draft: float = 0.0
    """Proposing k tokens, and taking in what was verified."""

    @property
    def cost(self) -> float:
        return self.target + self.draft


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The model beside what it was fitted to."""

    cost: LinearCost
    rounds: Sequence[MeasuredRound]

    def error(self, one: MeasuredRound) -> float:
        """Fitted over measured cost, less 1."""
        return self.cost(one.k) / one.cost - 1

    @property
    def largest_error(self) -> float:
        """Of the greatest size, with its sign."""
        return max(map(self.error, self.rounds), key=abs)


def fit_costs(rounds: Sequence[MeasuredRound]) -> Fit:
    """Least squares on relative errors; neither parameter is below 0.

    Args:
        rounds: Of one batch size, each with another k from 1 on.
    """
    weight = {one.k: one.k / one.cost**2 for one in rounds}
    total = sum(one.k * weight[one.k] for one in rounds)
    both = sum(weight[one.k] * (one.cost - 1) for one in rounds) / total
    draft = sum(weight[one.k] * one.draft for one in rounds) / total
    both = max(0.0, both)
    draft = min(draft, both)  # a pass over more tokens that took no longer than one gives rows no cost below 0
    return Fit(cost=LinearCost(draft=draft, row=both - draft), rounds=rounds)
