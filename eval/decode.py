"""The speculative loop: draft, verify in one target pass, keep what is right, roll both caches back.

Batched over requests of different lengths. Rounds are counted as vLLM 0.32 counts them: accepted drafts before the
answer is trimmed at its end (v1/core/sched/scheduler.py), and no round for the token that the prefill gives. What
happens inside a round is that of a chain here, that of a tree in `tree_decode.py`.

Shapes: B requests, Q tokens of a round at most, K draft tokens, V target vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from drafthead.data.errors import InputError
from drafthead.eval.protocols import Drafter, TargetModel, TargetPass
from drafthead.eval.typical import NEEDS_SAMPLING, Typical, accept_typical
from drafthead.kernels.verify_greedy.op import verify_greedy
from drafthead.kernels.verify_sampling.inputs import Sampling
from drafthead.kernels.verify_sampling.op import verify_sampling
from drafthead.kernels.verify_tree.structure import PADDING
from torch import Tensor

OnProgress = Callable[[int], None]
"""Called with the number of requests that finished."""


@dataclass(kw_only=True)
class Answer:
    """What was generated for one prompt."""

    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    """Draft tokens kept in each round, before trimming."""
    drafted: list[int] = field(default_factory=list)
    """Draft tokens proposed in each round; on one path, where they were a tree."""
    finish_reason: str = "length"


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """How answers are generated; temperature 0 is greedy."""

    max_new_tokens: int
    end_ids: list[int]
    temperature: float = 0.0
    seed: int = 0
    """Request number i samples with seed + i; the same numbers whatever else is decoded with it."""
    numbers: tuple[int, ...] | None = None
    """Which requests are decoded, where they are some of more; 0, 1, ... unless given."""
    typical: Typical | None = None
    """Accept by this rule instead of losslessly."""

    def __post_init__(self) -> None:
        if self.typical is not None and self.temperature == 0:
            raise InputError(NEEDS_SAMPLING)

    def of(self, numbers: list[int]) -> "DecodeOptions":
        """The same for these of the requests."""
        return replace(self, numbers=tuple(numbers))

    def seed_of(self, batch_size: int) -> list[int]:
        """Seed of each request."""
        return [self.seed + number for number in (range(batch_size) if self.numbers is None else self.numbers)]

    def sampling(self, seed_B: Tensor, position_B: Tensor) -> Sampling:
        """How each request samples in a round whose first new token has index `position_B`."""
        temperature_B = torch.full((len(seed_B),), self.temperature, device=seed_B.device)
        return Sampling(temperature_B=temperature_B, seed_B=seed_B, position_B=position_B)


@dataclass(frozen=True, kw_only=True)
class Round:
    """What one target pass gave."""

    drafted_B: Tensor
    """Draft tokens proposed; on one path, where they were a tree."""
    accepted_B: Tensor
    new_BQ: Tensor
    """The accepted tokens, then the target's own; -1 behind."""
    states: TargetPass
    """The target's states of the token before the drafts and of the accepted ones, anything behind."""
    position_BQ: Tensor


OneRound = Callable[[Tensor, Tensor, Tensor], Round]
"""Takes of each request [B] its newest token, the number of tokens before that, and its seed."""


def decode(
    target: TargetModel,
    drafter: Drafter | None,
    prompts: list[list[int]],
    k: int,
    options: DecodeOptions,
    on_progress: OnProgress = lambda count: None,
) -> list[Answer]:
    """Generate answers, speculatively with a drafter, plainly without (k = 0).

    Args:
        target: The target; its cache is started anew.
        drafter: Proposes up to k tokens a round, or None for plain decoding.
        prompts: Token ids of each request.
        k: Draft tokens per round at most.
        options: Length, end-of-turn ids, temperature.
        on_progress: Told how many requests finished, as they do.
    """
    k = k if drafter is not None else 0

    def chain_round(token_B: Tensor, known_B: Tensor, seed_B: Tensor) -> Round:
        draft_BK = drafter.draft(k) if drafter is not None else token_B.new_empty(len(token_B), 0)
        drafted_B = (draft_BK >= 0).sum(1)
        draft_BK = draft_BK.clamp_min(0)  # what stands behind a request's drafts is run, and never read
        position_BQ = known_B[:, None] + torch.arange(draft_BK.shape[1] + 1, device=token_B.device)
        result = target.step(torch.cat([token_B[:, None], draft_BK], 1), position_BQ)
        accepted_B, new_BQ = _verify(result.logits_BQV, draft_BK, drafted_B, options, seed_B, known_B + 1)
        return Round(drafted_B=drafted_B, accepted_B=accepted_B, new_BQ=new_BQ, states=result, position_BQ=position_BQ)

    return run_rounds(target, drafter, chain_round, k, prompts, options, on_progress)


def run_rounds(
    target: TargetModel,
    drafter: Drafter | None,
    one_round: OneRound,
    depth: int,
    prompts: list[list[int]],
    options: DecodeOptions,
    on_progress: OnProgress,
) -> list[Answer]:
    """Prefill, then rounds until every answer has ended; a round keeps at most `depth` draft tokens."""
    answers = [Answer() for _ in prompts]
    max_length = max(len(ids) for ids in prompts) + options.max_new_tokens + depth + 1
    first = target.start(prompts, max_length)
    device = first.logits_BQV.device
    active = list(range(len(prompts)))
    seed_B = torch.tensor(options.seed_of(len(prompts)), device=device)
    known_B = torch.tensor([len(ids) for ids in prompts], device=device)  # tokens before the one just sampled
    no_draft_BK = torch.empty(len(prompts), 0, dtype=torch.long, device=device)
    _, new_BQ = _verify(first.logits_BQV, no_draft_BK, torch.zeros_like(known_B), options, seed_B, known_B)
    if drafter is not None:
        drafter.start(prompts, max_length)
        next_BQ = _shifted_prompts(prompts, new_BQ[:, 0])
        position_BQ = torch.arange(next_BQ.shape[1], device=device).expand_as(next_BQ)
        drafter.observe(next_BQ, first, position_BQ, known_B)
    token_B = new_BQ[:, 0]
    keep = _extend(answers, active, new_BQ, options)
    while True:
        if not all(keep):
            rows = torch.tensor([row for row, kept in enumerate(keep) if kept], dtype=torch.long, device=device)
            on_progress(len(active) - len(rows))
            active = [request for request, kept in zip(active, keep, strict=True) if kept]
            if not active:
                return answers
            target.select(rows)
            if drafter is not None:
                drafter.select(rows)
            token_B, known_B, seed_B = token_B[rows], known_B[rows], seed_B[rows]
        done = one_round(token_B, known_B, seed_B)
        if drafter is not None:
            counts = zip(active, done.accepted_B.tolist(), done.drafted_B.tolist(), strict=True)
            for request, accepted, drafted in counts:
                answers[request].accepted.append(accepted)
                answers[request].drafted.append(drafted)
            drafter.observe(done.new_BQ.clamp_min(0), done.states, done.position_BQ, done.accepted_B + 1)
        token_B = done.new_BQ.gather(1, done.accepted_B[:, None])[:, 0]
        known_B = known_B + done.accepted_B + 1
        keep = _extend(answers, active, done.new_BQ, options)


def _verify(
    logits_BQV: Tensor,
    draft_BK: Tensor,
    num_draft_B: Tensor,
    options: DecodeOptions,
    seed_B: Tensor,
    position_B: Tensor,
) -> tuple[Tensor, Tensor]:
    """Accepted draft tokens and new tokens (-1 behind them) of a round whose first new token has index `position_B`."""
    if options.temperature == 0:
        accepted_B, new_BQ, _ = verify_greedy(logits_BQV, draft_BK, num_draft_B)
        return accepted_B, new_BQ
    sampling = options.sampling(seed_B, position_B)
    if options.typical is not None:
        step_K = torch.arange(draft_BK.shape[1], device=draft_BK.device)
        parent_BK = (step_K - 1).where(step_K < num_draft_B[:, None], PADDING)
        accepted_B, new_BQ, _ = accept_typical(logits_BQV, draft_BK, parent_BK, sampling, options.typical)
    else:
        accepted_B, new_BQ, _ = verify_sampling(logits_BQV, draft_BK, num_draft_B, sampling)
    return accepted_B, new_BQ


def _extend(answers: list[Answer], active: list[int], new_BQ: Tensor, options: DecodeOptions) -> list[bool]:
    """Append a round's tokens, trimmed at the end of the answer; says which requests go on."""
    keep = []
    for request, row in zip(active, new_BQ.tolist(), strict=True):
        answer = answers[request]
        going = True
        for token in row:
            if token < 0:
                break
            answer.tokens.append(token)
            if token in options.end_ids:
                answer.finish_reason = "stop"
                going = False
                break
            if len(answer.tokens) == options.max_new_tokens:
                going = False
                break
        keep.append(going)
    return keep


def _shifted_prompts(prompts: list[list[int]], first_B: Tensor) -> Tensor:
    """The token that follows each prompt position, the sampled one last: [B, Q], right-padded."""
    width = max(len(ids) for ids in prompts)
    rows = [
        [*ids[1:], int(first)] + [0] * (width - len(ids)) for ids, first in zip(prompts, first_B.tolist(), strict=True)
    ]
    return torch.tensor(rows, device=first_B.device)
