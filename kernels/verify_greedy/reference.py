"""Greedy verification, the definition: accept draft tokens while they equal the target's argmax."""

import torch
from torch import Tensor


def verify_greedy(logits_BQV: Tensor, draft_BK: Tensor, num_draft_B: Tensor) -> tuple[Tensor, Tensor]:
    """Accept the longest prefix of each draft that the target would have written itself.

    Args:
        logits_BQV: Target logits after the last known token and after each draft token; Q = K + 1.
        draft_BK: Draft token ids; entries from `num_draft_B` on are ignored.
        num_draft_B: How many draft tokens each request has (0 to K).

    Returns:
        accepted_B: Number of accepted draft tokens.
        output_BQ: The tokens that this round yields: accepted ones, then the target's own; -1 after that.
    """
    steps = draft_BK.shape[1]
    own_BQ = logits_BQV.argmax(-1)
    inside_BK = torch.arange(steps, device=draft_BK.device) < num_draft_B[:, None]
    hit_BK = (own_BQ[:, :steps] == draft_BK) & inside_BK
    accepted_B = hit_BK.long().cumprod(-1).sum(-1)
    index_Q = torch.arange(steps + 1, device=draft_BK.device)
    output_BQ = torch.where(index_Q <= accepted_B[:, None], own_BQ, torch.full_like(own_BQ, -1))
    return accepted_B, output_BQ
