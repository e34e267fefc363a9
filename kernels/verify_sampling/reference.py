"""Speculative sampling, the definition (Leviathan et al. 2023, Chen et al. 2023): the output is distributed as p."""

import torch
from torch import Tensor


def verify_sampling(
    target_BQV: Tensor,
    draft_BK: Tensor,
    draft_BKV: Tensor | None,
    num_draft_B: Tensor,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Accept draft token x with probability min(1, p(x) / q(x)); at the first rejection sample from (p - q)+.

    Args:
        target_BQV: Target probabilities after the last known token and after each draft token; Q = K + 1.
        draft_BK: Draft token ids; entries from `num_draft_B` on are ignored.
        draft_BKV: Draft probabilities that the tokens were sampled from; None for greedy drafts (one-hot q).
        num_draft_B: How many draft tokens each request has (0 to K).
        generator: Source of the uniform numbers.

    Returns:
        accepted_B: Number of accepted draft tokens.
        output_BQ: The tokens that this round yields; -1 after them.
    """
    batch, steps = draft_BK.shape
    device = target_BQV.device
    output_BQ = torch.full((batch, steps + 1), -1, dtype=torch.long, device=device)
    accepted_B = torch.zeros(batch, dtype=torch.long, device=device)
    uniform_BK = torch.rand((batch, max(steps, 1)), generator=generator, device=device, dtype=torch.float64)
    for row in range(batch):
        count = int(num_draft_B[row])
        for step in range(count):
            token = int(draft_BK[row, step])
            p_V = target_BQV[row, step].double()
            q_V = torch.zeros_like(p_V)
            if draft_BKV is None:
                q_V[token] = 1.0
            else:
                q_V = draft_BKV[row, step].double()
            if uniform_BK[row, step] * q_V[token] < p_V[token]:
                output_BQ[row, step] = token
                accepted_B[row] += 1
                continue
            residual_V = (p_V - q_V).clamp_min(0)
            output_BQ[row, step] = torch.multinomial(residual_V, 1, generator=generator)[0]
            break
        else:
            output_BQ[row, count] = torch.multinomial(target_BQV[row, count].double(), 1, generator=generator)[0]
    return accepted_B, output_BQ
