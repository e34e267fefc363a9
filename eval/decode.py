"""The speculative loop: draft, verify in one target pass, keep what is right, roll both caches back.

Batched over requests of different lengths. Rounds are counted as vLLM 0.32 counts them: accepted drafts before the
answer is trimmed at its end (v1/core/sched/scheduler.py), and no round for the token that the prefill gives.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from drafthead.eval.protocols import Drafter, TargetModel
from drafthead.kernels.verify_greedy.op import verify_greedy
from drafthead.kernels.verify_sampling.inputs import Sampling
from drafthead.kernels.verify_sampling.op import verify_sampling
from torch import Tensor

OnProgress = Callable[[int], None]
"""Called with the number of requests that finished."""


@dataclass(kw_only=True)
class Answer:
    """What was generated for one prompt."""

    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    """Draft tokens kept in each round, before trimming."""
    finish_reason: str = "length"


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """How answers are generated; temperature 0 is greedy."""

    max_new_tokens: int
    end_ids: list[int]
    temperature: float = 0.0
    seed: int = 0
    """Request number i samples with seed + i; the same numbers whatever else is decoded with it."""


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
        drafter: Proposes k tokens a round, or None for plain decoding.
        prompts: Token ids of each request.
        k: Draft tokens per round.
        options: Length, end-of-turn ids, temperature.
        on_progress: Told how many requests finished, as they do.
    """
    k = k if drafter is not None else 0
    answers = [Answer() for _ in prompts]
    max_length = max(len(ids) for ids in prompts) + options.max_new_tokens + k + 1
    first = target.start(prompts, max_length)
    device = first.logits_BQV.device
    active = list(range(len(prompts)))
    seed_B = options.seed + torch.arange(len(prompts), device=device)
    known_B = torch.tensor([len(ids) for ids in prompts], device=device)  # tokens before the one just sampled
    no_draft_BK = torch.empty(len(prompts), 0, dtype=torch.long, device=device)
    _, new_BQ = _verify(first.logits_BQV, no_draft_BK, options, seed_B, known_B)
    if drafter is not None:
        drafter.start(len(prompts), max_length)
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
        draft_BK = drafter.draft(k) if drafter is not None else token_B.new_empty(len(active), 0)
        position_BQ = known_B[:, None] + torch.arange(k + 1, device=device)
        result = target.step(torch.cat([token_B[:, None], draft_BK], 1), position_BQ)
        accepted_B, new_BQ = _verify(result.logits_BQV, draft_BK, options, seed_B, known_B + 1)
        if drafter is not None:
            for request, count in zip(active, accepted_B.tolist(), strict=True):
                answers[request].accepted.append(count)
            drafter.observe(new_BQ.clamp_min(0), result, position_BQ, accepted_B + 1)
        token_B = new_BQ.gather(1, accepted_B[:, None])[:, 0]
        known_B = known_B + accepted_B + 1
        keep = _extend(answers, active, new_BQ, options)


def _verify(
    logits_BQV: Tensor, draft_BK: Tensor, options: DecodeOptions, seed_B: Tensor, position_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Accepted draft tokens and new tokens (-1 behind them) of a round whose first new token has index `position_B`."""
    num_draft_B = torch.full((len(draft_BK),), draft_BK.shape[1], device=draft_BK.device)
    if options.temperature == 0:
        accepted_B, new_BQ, _ = verify_greedy(logits_BQV, draft_BK, num_draft_B)
    else:
        temperature_B = torch.full((len(draft_BK),), options.temperature, device=draft_BK.device)
        sampling = Sampling(temperature_B=temperature_B, seed_B=seed_B, position_B=position_B)
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
