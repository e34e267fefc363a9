"""Fused projection and distillation loss with a hand-written backward pass.

Autograd would keep five [R, U] tensors; here one is kept (the gradient of the logits), in the dtype of the
projection. The arithmetic of the loss is fp32 whatever the projection's dtype (bf16 divergences lose up to a third
of the gradient once the head is good).
"""

from typing import Any

import torch
from drafthead.kernels.linear_soft_ce.reference import LK_DECAY, LOSSES
from torch import Tensor


def linear_soft_ce(
    hidden_RD: Tensor, weight_UD: Tensor, target_RU: Tensor, weight_R: Tensor, loss: str
) -> tuple[Tensor, Tensor]:
    """Weighted sum of the row losses of `hidden @ weight.T`, and the draft's argmax of each row.

    Args:
        hidden_RD: Normalised hidden states of the head; their dtype is the projection's.
        weight_UD: The draft lm_head (any float dtype).
        target_RU: Target probabilities over the draft vocabulary, fp32; each row sums to 1.
        weight_R: Weight of each row, fp32.
        loss: One of `reference.LOSSES`.

    Returns:
        The sum (a scalar, fp32) and the argmax [R] (int64, no gradient; the lowest id wins a tie).

    Raises:
        ValueError: Shapes do not fit together, or an unknown loss.
    """
    if loss not in LOSSES:
        raise ValueError(f"loss={loss!r}: one of {', '.join(LOSSES)}")
    rows, vocab = target_RU.shape
    size = hidden_RD.shape[-1]
    if hidden_RD.shape != (rows, size) or weight_UD.shape != (vocab, size) or weight_R.shape != (rows,):
        raise ValueError(
            f"shapes do not fit: hidden {tuple(hidden_RD.shape)}, weight {tuple(weight_UD.shape)}, "
            f"target {tuple(target_RU.shape)}, row weights {tuple(weight_R.shape)}"
        )
    total, argmax = _LinearSoftCE.apply(hidden_RD, weight_UD, target_RU, weight_R, loss)
    return total, argmax


class _LinearSoftCE(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_RD: Tensor, weight_UD: Tensor, target_RU: Tensor, weight_R: Tensor, loss: str
    ) -> tuple[Tensor, Tensor]:
        projection_UD = weight_UD.to(hidden_RD.dtype)
        logits_RU = (hidden_RD @ projection_UD.T).float()
        argmax_R = logits_RU.argmax(-1)
        log_sum_R = logits_RU.logsumexp(-1)
        cross_R = log_sum_R - torch.einsum("ru,ru->r", target_RU, logits_RU)
        draft_RU = logits_RU.sub_(log_sum_R[:, None]).exp_()
        losses_R, gradient_RU = _loss_and_gradient(draft_RU, target_RU, cross_R, loss)
        gradient_RU.mul_(weight_R[:, None])
        ctx.save_for_backward(hidden_RD, projection_UD, gradient_RU.to(hidden_RD.dtype))
        ctx.weight_dtype = weight_UD.dtype
        ctx.mark_non_differentiable(argmax_R)
        return (losses_R * weight_R).sum(), argmax_R

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_RD, projection_UD, gradient_RU = ctx.saved_tensors
        scaled_RU = gradient_RU * upstream.to(gradient_RU.dtype)
        hidden_gradient = scaled_RU @ projection_UD if ctx.needs_input_grad[0] else None
        weight_gradient = None
        if ctx.needs_input_grad[1]:
            weight_gradient = (scaled_RU.T @ hidden_RD).to(ctx.weight_dtype)
        return hidden_gradient, weight_gradient, None, None, None


def _loss_and_gradient(draft_RU: Tensor, target_RU: Tensor, cross_R: Tensor, loss: str) -> tuple[Tensor, Tensor]:
    """Row losses and their gradients with respect to the logits; may reuse the memory of `draft_RU`."""
    if loss == "soft_ce":
        return cross_R, draft_RU.sub_(target_RU)
    kl_R = cross_R + torch.xlogy(target_RU, target_RU).sum(-1)
    if loss == "kl":
        return kl_R, draft_RU.sub_(target_RU)
    overlap_R = torch.minimum(target_RU, draft_RU).sum(-1)
    below_RU = draft_RU * (draft_RU < target_RU)  # where q < p, min(p, q) moves with q
    lk_gradient_RU = draft_RU * below_RU.sum(-1, keepdim=True) - below_RU
    if loss == "lk":
        return 1 - overlap_R, lk_gradient_RU
    mix_R = torch.exp(-LK_DECAY * overlap_R)
    gradient_RU = mix_R[:, None] * (draft_RU - target_RU) + (1 - mix_R)[:, None] * lk_gradient_RU
    return mix_R * kl_R + (1 - mix_R) * (1 - overlap_R), gradient_RU
