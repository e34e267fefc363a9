"""The definition of the distillation loss, in plain torch and differentiable by autograd.

Shapes: R rows (supervised slots), D hidden of the draft, E hidden of the target, U draft vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

LOSSES = ("soft_ce", "kl", "lk", "lk_hybrid", "hard_ce")
LK_DECAY = 3.0


@dataclass(frozen=True, kw_only=True)
class TargetStates:
    """Target logits as a product that is never written down whole.

    Attributes:
        state_RE: Hidden states of the target, behind its final norm.
        lm_head_UE: Rows of the target's lm_head that the draft vocabulary keeps.
    """

    state_RE: Tensor
    lm_head_UE: Tensor

    def rows(self, index_X: Tensor) -> "TargetStates":
        return TargetStates(state_RE=self.state_RE[index_X], lm_head_UE=self.lm_head_UE)

    def written_out(self) -> "TargetLogits":
        """The product, in the dtype of the states."""
        return TargetLogits(logits_RU=self.state_RE @ self.lm_head_UE.to(self.state_RE.dtype).T)


@dataclass(frozen=True, kw_only=True)
class TargetLogits:
    """Target logits over the draft vocabulary, [R, U]."""

    logits_RU: Tensor

    def rows(self, index_X: Tensor) -> "TargetLogits":
        return TargetLogits(logits_RU=self.logits_RU[index_X])


@dataclass(frozen=True, kw_only=True)
class LossRows:
    """What the loss gives back; only `total` carries a gradient.

    A row of weight 0 is skipped: its argmax is -1, its hit False, its overlap 0.

    Attributes:
        total: Sum of the row losses, each times its weight; fp32 (fp64 from fp64 inputs). Nothing is averaged: divide
            by the number of supervised positions of the global batch.
        argmax_R: The draft's most likely token, as a draft id (int64; the lowest id wins a tie).
        hit_R: Whether it is the row's label. A label that the draft vocabulary lacks (-1) is a miss, so this is a hit
            over the FULL vocabulary.
        overlap_R: sum min(p, q), what speculative sampling accepts of this row (Leviathan et al. 2023).
    """

    total: Tensor
    argmax_R: Tensor
    hit_R: Tensor
    overlap_R: Tensor


def row_losses(logits_RU: Tensor, p_RU: Tensor, label_R: Tensor, loss: str) -> Tensor:
    """Loss of each row, fp32 or wider.

    With q = softmax(logits):

    - ``soft_ce``: -sum p log q
    - ``kl``: sum p (log p - log q); the gradient is that of ``soft_ce``
    - ``lk``: 1 - sum min(p, q), the expected rejection of speculative sampling
    - ``lk_hybrid``: lambda kl + (1 - lambda) lk with lambda = exp(-3 sum min(p, q)), taken as a constant:
      KL while the head is poor, expected rejection once it is good
    - ``hard_ce``: -log q[label]; 0 where the label is -1

    Args:
        logits_RU: Draft logits.
        p_RU: Target probabilities over the draft vocabulary; they sum to 1, or to the share that it holds.
        label_R: Draft ids of the tokens that the target chose; -1 where the draft vocabulary lacks it.
        loss: One of `LOSSES`.
    """
    log_q = torch.log_softmax(logits_RU, dim=-1)
    if loss == "hard_ce":
        chosen_R = log_q.gather(-1, label_R.clamp_min(0)[:, None])[:, 0]
        return torch.where(label_R >= 0, -chosen_R, 0.0)
    if loss == "soft_ce":
        return -(p_RU * log_q).sum(-1)
    kl = (torch.xlogy(p_RU, p_RU) - p_RU * log_q).sum(-1)
    if loss == "kl":
        return kl
    overlap = torch.minimum(p_RU, log_q.exp()).sum(-1)
    if loss == "lk":
        return 1 - overlap
    mix = torch.exp(-LK_DECAY * overlap.detach())
    return mix * kl + (1 - mix) * (1 - overlap)


def linear_soft_ce(
    hidden_RD: Tensor,
    weight_UD: Tensor,
    target: TargetStates | TargetLogits,
    weight_R: Tensor,
    label_R: Tensor,
    loss: str,
    log_sum_R: Tensor | None = None,
) -> LossRows:
    """See `op.linear_soft_ce`; materialises everything."""
    logits_RU = (hidden_RD @ weight_UD.T).to(weight_R.dtype)
    written = target.written_out() if isinstance(target, TargetStates) else target
    target_RU = written.logits_RU.to(weight_R.dtype)
    log_sum_R = target_RU.logsumexp(-1) if log_sum_R is None else log_sum_R
    p_RU = (target_RU - log_sum_R[:, None]).exp()
    wanted_R = weight_R != 0
    losses_R = torch.where(wanted_R, row_losses(logits_RU, p_RU, label_R, loss), 0.0)
    argmax_R = torch.where(wanted_R, logits_RU.argmax(-1), -1)
    overlap_R = torch.minimum(p_RU, logits_RU.detach().softmax(-1)).sum(-1)
    return LossRows(
        total=(losses_R * weight_R).sum(),
        argmax_R=argmax_R,
        hit_R=(argmax_R == label_R) & wanted_R,
        overlap_R=torch.where(wanted_R, overlap_R, 0.0),
    )
