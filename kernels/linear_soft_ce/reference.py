"""The definition of the distillation loss, in plain torch and differentiable by autograd.

Shapes: R rows (supervised slots), D hidden, U draft vocabulary.
"""

import torch
from torch import Tensor

LOSSES = ("soft_ce", "kl", "lk", "lk_hybrid")
LK_DECAY = 3.0


def row_losses(logits_RU: Tensor, target_RU: Tensor, loss: str) -> Tensor:
    """Loss of each row, fp32 or wider.

    With q = softmax(logits) and p = `target_RU`:

    - ``soft_ce``: -sum p log q
    - ``kl``: sum p (log p - log q); the gradient is that of ``soft_ce``
    - ``lk``: 1 - sum min(p, q), the expected rejection of speculative sampling (Leviathan et al. 2023)
    - ``lk_hybrid``: lambda kl + (1 - lambda) lk with lambda = exp(-3 sum min(p, q)), taken as a constant:
      KL while the head is poor, expected rejection once it is good

    Args:
        logits_RU: Draft logits.
        target_RU: Target probabilities over the draft vocabulary; each row sums to 1.
        loss: One of `LOSSES`.
    """
    log_q = torch.log_softmax(logits_RU, dim=-1)
    if loss == "soft_ce":
        return -(target_RU * log_q).sum(-1)
    kl = (torch.xlogy(target_RU, target_RU) - target_RU * log_q).sum(-1)
    if loss == "kl":
        return kl
    overlap = torch.minimum(target_RU, log_q.exp()).sum(-1)
    if loss == "lk":
        return 1 - overlap
    mix = torch.exp(-LK_DECAY * overlap.detach())
    return mix * kl + (1 - mix) * (1 - overlap)


def linear_soft_ce(
    hidden_RD: Tensor, weight_UD: Tensor, target_RU: Tensor, weight_R: Tensor, loss: str
) -> tuple[Tensor, Tensor]:
    """Weighted sum of the row losses of `hidden @ weight.T`, and the draft's argmax of each row."""
    logits_RU = hidden_RD @ weight_UD.T
    total = (row_losses(logits_RU, target_RU, loss) * weight_R).sum()
    return total, logits_RU.argmax(-1)
