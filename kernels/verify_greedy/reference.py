"""Greedy verification, the definition: accept draft tokens while they equal the target's argmax.

Shapes: B requests, K draft steps, Q = K + 1 queries, V target vocabulary.
"""

import torch
from torch import Tensor


def verify_greedy(logits_BQV: Tensor, draft_BK: Tensor, num_draft_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Accept the longest prefix of each draft that the target would have written itself.

    The target's own token is the largest logit: the lowest id where several are equal, and NaN above all.

    Args:
        logits_BQV: Target logits after the last known token and after each draft token.
        draft_BK: Draft token ids; entries from `num_draft_B` on are ignored.
        num_draft_B: How many draft tokens each request has, 0 to K.

    Returns:
        accepted_B: Number of accepted draft tokens, int64.
        output_BQ: The tokens that this round yields, int64: accepted ones, then the target's own; -1 after that.
        accepted_BK: Which draft tokens were accepted, bool.
    """
    steps = draft_BK.shape[1]
    own_BQ = logits_BQV.argmax(-1)
    index_Q = torch.arange(steps + 1, device=draft_BK.device)
    hit_BK = (own_BQ[:, :steps] == draft_BK) & (index_Q[:steps] < num_draft_B[:, None])
    accepted_BK = hit_BK.long().cumprod(-1).bool()
    accepted_B = accepted_BK.sum(-1)
    output_BQ = own_BQ.masked_fill(index_Q > accepted_B[:, None], -1)
    return accepted_B, output_BQ, accepted_BK
