"""Speculative sampling, the definition (Leviathan et al. 2023, Chen et al. 2023): the output is distributed as p.

Everything is computed in float64, with the random numbers that the kernel draws.

Shapes: B requests, K draft steps, Q = K + 1 queries, V target vocabulary, U draft vocabulary.
"""

import torch
from drafthead.kernels import philox
from drafthead.kernels.verify_sampling.inputs import GREEDY_BELOW, Sampling
from torch import Tensor


def verify_sampling(
    logits_BQV: Tensor,
    draft_BK: Tensor,
    num_draft_B: Tensor,
    sampling: Sampling,
    draft_BKU: Tensor | None = None,
    target_ids_U: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept draft token x with probability min(1, p(x) / q(x)); at the first rejection sample from (p - q)+.

    See `op.verify_sampling`.
    """
    p_BQV = target_probs(logits_BQV, sampling)
    q_BKV = draft_probs(draft_BK, p_BQV.shape[-1], draft_BKU, target_ids_U)
    p_BK, q_BK = of_tokens(p_BQV[:, :-1], draft_BK), of_tokens(q_BKV, draft_BK)
    taken_BK = (accept_uniform(sampling, draft_BK.shape[1]) * q_BK < p_BK) & inside(draft_BK, num_draft_B)
    accepted_B = taken_BK.long().cumprod(-1).sum(-1)
    token_B = sample_residual(p_BQV, q_BKV, torch.ones_like(p_BQV[:, 0, 0]), accepted_B, num_draft_B, sampling)
    return compose(draft_BK, accepted_B, token_B)


def target_probs(logits_BQV: Tensor, sampling: Sampling) -> Tensor:
    """What the server samples from: temperature, then top-k, then top-p (vLLM's v1/sample), float64.

    A NaN counts as -inf, +inf as the largest fp32 number; a row where nothing is possible gives token 0. Greedy
    requests give the argmax alone, NaN above all, as `verify_greedy`.
    """
    given_BQV = logits_BQV.double()
    logits_BQV = given_BQV.nan_to_num(-torch.inf, torch.inf, -torch.inf).clamp_max(torch.finfo(torch.float32).max)
    top_BQ1 = logits_BQV.max(-1, keepdim=True).values
    temperature_B11 = sampling.temperature_B[:, None, None]
    greedy_B11 = temperature_B11 < GREEDY_BELOW
    only_BQ1 = given_BQV.argmax(-1, keepdim=True).where(greedy_B11, 0)
    only_BQV = torch.zeros_like(logits_BQV).scatter_(-1, only_BQ1, 1.0)
    scaled_BQV = (logits_BQV - top_BQ1) / temperature_B11.double().clamp_min(GREEDY_BELOW)
    kept_BQV = kept_by_top_k(logits_BQV, sampling.top_k_B)
    kept_BQV = kept_by_top_p(scaled_BQV.masked_fill(~kept_BQV, -torch.inf), sampling.top_p_B) & kept_BQV
    p_BQV = scaled_BQV.masked_fill(~kept_BQV, -torch.inf).softmax(-1)
    return torch.where(greedy_B11 | (top_BQ1 == -torch.inf), only_BQV, p_BQV)


def kept_by_top_k(logits_BQV: Tensor, top_k_B: Tensor | None) -> Tensor:
    """Which logits are at least the k-th largest."""
    if top_k_B is None:
        return torch.ones_like(logits_BQV, dtype=torch.bool)
    vocab = logits_BQV.shape[-1]
    count_B = torch.where(top_k_B < 1, vocab, top_k_B).clamp_max(vocab).long()
    sorted_BQV = logits_BQV.sort(-1, descending=True).values
    smallest_BQ1 = sorted_BQV.gather(-1, (count_B - 1)[:, None, None].expand(-1, logits_BQV.shape[1], 1))
    return logits_BQV >= smallest_BQ1


def kept_by_top_p(logits_BQV: Tensor, top_p_B: Tensor | None) -> Tensor:
    """Which tokens remain when the least likely are dropped while their sum is at most 1 - p; one always remains."""
    if top_p_B is None:
        return torch.ones_like(logits_BQV, dtype=torch.bool)
    # of equal logits the lower ids come first, so that the higher ones are dropped before them
    sorted_BQV, ids_BQV = logits_BQV.sort(stable=True, dim=-1, descending=True)
    from_here_BQV = sorted_BQV.softmax(-1).flip(-1).cumsum(-1).flip(-1)
    top_p_B11 = top_p_B.double()[:, None, None]
    kept_BQV = (from_here_BQV > 1 - top_p_B11) | (top_p_B11 >= 1)
    kept_BQV[..., 0] = True
    return torch.zeros_like(kept_BQV).scatter_(-1, ids_BQV, kept_BQV)


def draft_probs(draft_BK: Tensor, vocab: int, draft_BKU: Tensor | None, target_ids_U: Tensor | None) -> Tensor:
    """What the draft tokens were sampled from, over the target vocabulary, float64; one-hot for greedy drafts.

    What is negative or NaN counts as 0.
    """
    if draft_BKU is None:
        return (draft_BK[..., None] == torch.arange(vocab, device=draft_BK.device)).double()
    q_BKU = draft_BKU.double().nan_to_num(0.0).clamp_min(0)
    if target_ids_U is None:
        return q_BKU
    return q_BKU.new_zeros(*draft_BK.shape, vocab).index_copy_(-1, target_ids_U.long(), q_BKU)


def of_tokens(probs_BKV: Tensor, draft_BK: Tensor) -> Tensor:
    """Probabilities of the draft tokens; 0 for ids outside the vocabulary."""
    vocab = probs_BKV.shape[-1]
    probs_BK = probs_BKV.gather(-1, draft_BK.long().clamp(0, vocab - 1)[..., None])[..., 0]
    return probs_BK.where((draft_BK >= 0) & (draft_BK < vocab), 0)


def accept_uniform(sampling: Sampling, steps: int) -> Tensor:
    """The uniform number of each draft token, float64 [B, K]."""
    step_K = torch.arange(steps, device=sampling.seed_B.device)
    seed_B1, position_B1 = sampling.seed_B.long()[:, None], sampling.position_B.long()[:, None]
    return philox.uniform(seed_B1, position_B1, step_K, philox.ACCEPT)[..., 0].double()


def inside(draft_BK: Tensor, num_draft_B: Tensor) -> Tensor:
    return torch.arange(draft_BK.shape[1], device=draft_BK.device) < num_draft_B[:, None]


def sample_residual(
    p_BQV: Tensor, q_BKV: Tensor, factor_B: Tensor, accepted_B: Tensor, num_draft_B: Tensor, sampling: Sampling
) -> Tensor:
    """The token after the accepted ones: the largest weight / exponential is a sample by weight."""
    weight_BV = residual(p_BQV, q_BKV, factor_B, accepted_B, num_draft_B)
    step_B, vocab = accepted_B, weight_BV.shape[-1]
    return (weight_BV / philox.exponential(sampling.seed_B.long(), sampling.position_B.long(), step_B, vocab)).argmax(
        -1
    )


def residual(p_BQV: Tensor, q_BKV: Tensor, factor_B: Tensor, accepted_B: Tensor, num_draft_B: Tensor) -> Tensor:
    """Weights [B, V] of the token after the accepted ones: max(factor p - q, 0) after a rejection, else p.

    They are p too where rounding leaves nothing of the difference.
    """
    row_B = torch.arange(len(p_BQV), device=p_BQV.device)
    p_BV = p_BQV[row_B, accepted_B]
    q_BV = torch.nn.functional.pad(q_BKV, (0, 0, 0, 1))[row_B, accepted_B]
    left_BV = (factor_B[:, None] * p_BV - q_BV).clamp_min(0)
    rejected_B1 = (accepted_B < num_draft_B.clamp_max(q_BKV.shape[1]))[:, None] & (left_BV > 0).any(-1, keepdim=True)
    return torch.where(rejected_B1, left_BV, p_BV)


def compose(draft_BK: Tensor, accepted_B: Tensor, token_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Accepted drafts, then the sampled token, then -1; the three results of an op."""
    index_Q = torch.arange(draft_BK.shape[1] + 1, device=draft_BK.device)
    count_B1 = accepted_B[:, None]
    output_BQ = torch.nn.functional.pad(draft_BK.long(), (0, 1)).where(index_Q < count_B1, -1)
    return accepted_B, torch.where(index_Q == count_B1, token_B[:, None], output_BQ), index_Q[:-1] < count_B1
