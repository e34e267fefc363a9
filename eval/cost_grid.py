"""What a plain step, a verification and drafting take by batch size and k: real rounds on the machine at hand.

Every batch size begins with contexts of one length and goes on writing; repetitions take a plain step and every k in
turn, the first of them uncounted, so that what slows the machine for a while slows all alike. The drafter sees all that
is written, as in decoding. A pass includes the choice of its tokens. Passes run eagerly, on CUDA too.

Shapes: B requests, Q new tokens of a pass, K draft tokens.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from drafthead.eval.cost import timed
from drafthead.eval.cost_fit import Fit, MeasuredRound, fit_costs
from drafthead.eval.protocols import Drafter, TargetModel, TargetPass
from drafthead.kernels.verify_greedy.op import verify_greedy
from torch import Tensor

OnRound = Callable[[], None]
"""Called after every round."""


@dataclass(frozen=True, kw_only=True)
class BatchTimes:
    """Medians of one batch size, in seconds."""

    batch: int
    plain_s: float
    """A pass over one token of each request, and the choice of the next."""
    target_s: dict[int, float]
    """By k: a pass over k + 1 tokens of each request, and which of them are kept."""
    draft_s: dict[int, float]
    """By k: proposing k tokens, and taking in what was verified."""
    plain_spread: float
    """How far apart the middle half of the plain steps are, over their median: large on a busy machine."""

    def rounds(self) -> list[MeasuredRound]:
        return [
            MeasuredRound(k=k, target=target_s / self.plain_s, draft=self.draft_s[k] / self.plain_s)
            for k, target_s in self.target_s.items()
        ]

    def fit(self) -> Fit:
        return fit_costs(self.rounds())


@dataclass
class Writing:
    """A batch of requests in the middle of their answers, and how long its latest round took."""

    target: TargetModel
    drafter: Drafter
    token_B: Tensor
    """The newest token of each, which the target has not run yet."""
    known_B: Tensor
    """Tokens before that one."""
    target_s: list[float] = field(default_factory=list)
    draft_s: list[float] = field(default_factory=list)

    @classmethod
    def begin(cls, target: TargetModel, drafter: Drafter, contexts: Sequence[list[int]], room: int) -> "Writing":
        """Run contexts of one length, with `room` for so many tokens behind them."""
        prompts, length = list(contexts), len(contexts[0])
        assert all(len(ids) == length for ids in prompts)
        first = target.start(prompts, length + room)
        token_B = first.logits_BQV[:, 0].argmax(-1)
        known_B = torch.full_like(token_B, length)
        next_BQ = torch.cat([torch.tensor(prompts, device=token_B.device)[:, 1:], token_B[:, None]], 1)
        position_BQ = torch.arange(length, device=token_B.device).expand_as(next_BQ)
        drafter.start(prompts, length + room)
        drafter.observe(next_BQ, first, position_BQ, known_B)
        return cls(target=target, drafter=drafter, token_B=token_B, known_B=known_B)

    def go_on(self, k: int) -> None:
        """One round; without drafts for k = 0.

        The pass is over k + 1 tokens of each request even where the drafter had fewer to propose.
        """
        self.target_s, self.draft_s = [], []
        draft_BK = self.token_B.new_zeros(len(self.token_B), k)
        num_draft_B = torch.zeros_like(self.token_B)
        if k:
            found_BK = timed(self.draft_s, lambda: self.drafter.draft(k))
            draft_BK[:, : found_BK.shape[1]] = found_BK.clamp_min(0)
            num_draft_B = (found_BK >= 0).sum(1)
        position_BQ = self.known_B[:, None] + torch.arange(k + 1, device=self.token_B.device)

        def verify() -> tuple[TargetPass, Tensor, Tensor]:
            states = self.target.step(torch.cat([self.token_B[:, None], draft_BK], 1), position_BQ)
            accepted_B, new_BQ, _ = verify_greedy(states.logits_BQV, draft_BK, num_draft_B)
            return states, accepted_B, new_BQ

        states, accepted_B, new_BQ = timed(self.target_s, verify)
        seen_BQ = new_BQ.clamp_min(0)
        timed(self.draft_s, lambda: self.drafter.observe(seen_BQ, states, position_BQ, accepted_B + 1))
        self.token_B = new_BQ.gather(1, accepted_B[:, None])[:, 0]
        self.known_B = self.known_B + accepted_B + 1


def measure_batch(
    target: TargetModel,
    drafter: Drafter,
    contexts: Sequence[list[int]],
    ks: Sequence[int],
    repeats: int,
    on_round: OnRound = lambda: None,
) -> BatchTimes:
    """Time rounds over contexts of one length, as many as the batch has requests.

    Args:
        target: Its cache is started anew.
        drafter: Any; it is started anew.
        contexts: Token ids, all of one length.
        ks: Draft tokens per round, each from 1 on.
        repeats: Counted repetitions of a plain step and of every k.
        on_round: Told after every round, (repeats + 1) (1 + number of ks) times.
    """
    turn = (0, *ks)
    writing = Writing.begin(target, drafter, contexts, room_for(ks, repeats))
    target_s: dict[int, list[float]] = {k: [] for k in turn}
    draft_s: dict[int, list[float]] = {k: [] for k in turn}
    for repeat in range(repeats + 1):
        for k in turn:
            writing.go_on(k)
            on_round()
            if repeat:  # the first is warm-up
                target_s[k].append(sum(writing.target_s))
                draft_s[k].append(sum(writing.draft_s))
    return BatchTimes(
        batch=len(contexts),
        plain_s=statistics.median(target_s[0]),
        target_s={k: statistics.median(target_s[k]) for k in ks},
        draft_s={k: statistics.median(draft_s[k]) for k in ks},
        plain_spread=spread(target_s[0]),
    )


def spread(values: Sequence[float]) -> float:
    """From the first to the third quartile, over the median."""
    ordered = sorted(values)
    return (ordered[3 * len(ordered) // 4] - ordered[len(ordered) // 4]) / statistics.median(ordered)


def room_for(ks: Sequence[int], repeats: int) -> int:
    """Tokens behind the contexts that the rounds can come to write, the last round's drafts included."""
    return (repeats + 1) * sum(k + 1 for k in (0, *ks)) + 1


def describe_batch(times: BatchTimes) -> dict[str, Any]:
    """For `cost.json`: what was measured, the fitted model, and both side by side for every k.

    Returns:
        `batch`, `plain_ms` and `plain_spread` (of the repetitions: `spread`), `draft_cost` and `row_cost` (plain steps
        a draft token), `largest_error` (fitted / measured - 1, of the greatest size); `rounds`, of every k:
        `target_ms`, `draft_ms`, `cost` (plain steps), `fitted_cost`, `error`.
    """
    fit = times.fit()
    return {
        "batch": times.batch,
        "plain_ms": 1e3 * times.plain_s,
        "plain_spread": times.plain_spread,
        "draft_cost": fit.cost.draft,
        "row_cost": fit.cost.row,
        "largest_error": fit.largest_error,
        "rounds": [
            {
                "k": one.k,
                "target_ms": 1e3 * times.target_s[one.k],
                "draft_ms": 1e3 * times.draft_s[one.k],
                "cost": one.cost,
                "fitted_cost": fit.cost(one.k),
                "error": fit.error(one),
            }
            for one in fit.rounds
        ],
    }
