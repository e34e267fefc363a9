"""Block verification, the definition (Sun et al. 2024): drafts are judged together, the output is distributed as p.

With P_0 = 1, after i draft tokens x_1 .. x_i:

    P_i = min(P_{i-1} p(x_i) / q(x_i), 1)
    R_i = sum over v of max(P_i p(v) - q(v), 0), p and q those of the next token
    h_i = R_i / (R_i + 1 - P_i), at the last draft token h_i = P_i

The accepted length is the last i with u_i < h_i; then a token from max(P_i p - q, 0), or from p behind the last draft.

Shapes: B requests, K draft steps, Q = K + 1 queries, V target vocabulary, U draft vocabulary.
"""

import torch
from drafthead.kernels.verify_sampling.inputs import Sampling
from drafthead.kernels.verify_sampling.reference import (
    accept_uniform,
    compose,
    draft_probs,
    inside,
    of_tokens,
    sample_residual,
    target_probs,
)
from torch import Tensor


def verify_block(
    logits_BQV: Tensor,
    draft_BK: Tensor,
    num_draft_B: Tensor,
    sampling: Sampling,
    draft_BKU: Tensor | None = None,
    target_ids_U: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `op.verify_block`."""
    p_BQV = target_probs(logits_BQV, sampling)
    q_BKV = draft_probs(draft_BK, p_BQV.shape[-1], draft_BKU, target_ids_U)
    joint_BQ = joint_ratio(of_tokens(p_BQV[:, :-1], draft_BK), of_tokens(q_BKV, draft_BK))
    h_BK = accept_chance(p_BQV, q_BKV, joint_BQ, num_draft_B)
    taken_BK = (accept_uniform(sampling, draft_BK.shape[1]) < h_BK) & inside(draft_BK, num_draft_B)
    count_K = torch.arange(1, draft_BK.shape[1] + 1, device=draft_BK.device)
    accepted_B = torch.nn.functional.pad(count_K * taken_BK, (1, 0)).amax(-1)
    factor_B = joint_BQ.gather(1, accepted_B[:, None])[:, 0]
    token_B = sample_residual(p_BQV, q_BKV, factor_B, accepted_B, num_draft_B, sampling)
    return compose(draft_BK, accepted_B, token_B)


def joint_ratio(p_BK: Tensor, q_BK: Tensor) -> Tensor:
    """P_0 .. P_K: the ratio of the tokens' joint probabilities, cut to one at each step."""
    joint_BQ = [p_BK.new_ones(len(p_BK))]
    for step in range(p_BK.shape[1]):
        reached_B = joint_BQ[-1] * p_BK[:, step]
        # a token that q cannot give is certain if p can give it, and impossible otherwise
        at_least_q_B = reached_B >= q_BK[:, step]
        joint_BQ.append(torch.where(at_least_q_B, (reached_B > 0).double(), reached_B / q_BK[:, step]))
    return torch.stack(joint_BQ, 1)


def accept_chance(p_BQV: Tensor, q_BKV: Tensor, joint_BQ: Tensor, num_draft_B: Tensor) -> Tensor:
    """h_1 .. h_K; what lies behind a request's last draft has no meaning."""
    steps = q_BKV.shape[1]
    if steps == 0:
        return joint_BQ[:, 1:]
    left_BK = (joint_BQ[:, 1:-1, None] * p_BQV[:, 1:-1] - q_BKV[:, 1:]).clamp_min(0).sum(-1)
    left_BK = torch.nn.functional.pad(left_BK, (0, 1))
    joint_BK = joint_BQ[:, 1:]
    h_BK = torch.where(joint_BK < 1, left_BK / (left_BK + 1 - joint_BK), 1.0)
    last_BK = torch.arange(1, steps + 1, device=p_BQV.device) == num_draft_B[:, None]
    return torch.where(last_BK, joint_BK, h_BK)
