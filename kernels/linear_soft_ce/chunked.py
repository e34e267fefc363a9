"""The loss in plain torch, a few rows at a time: the path of a CPU, and of any device without Triton.

A chunk's logits live only as long as the chunk, so nothing of size [R, U] is kept, and on a CPU they stay in its
cache. Gradients are made in the forward pass, while the logits are there; the backward pass only scales them. The
arithmetic of the loss is fp32 whatever the projections' dtype (bf16 divergences lose up to a third of the gradient
once the head is good).
"""

from dataclasses import dataclass
from typing import Any

import torch
from drafthead.kernels.linear_soft_ce.reference import LK_DECAY, TargetLogits, TargetStates
from torch import Tensor

CHUNK_ELEMENTS = 2**20
"""Logits of a chunk: 4 MiB in fp32; smaller ones starve the matrix units, larger ones leave the cache."""
ROW_MULTIPLE = 32


def chunk_rows(rows: int, vocab: int) -> int:
    """Rows of a chunk, a multiple of `ROW_MULTIPLE`: oneDNN compiles a kernel for every new number of rows."""
    fitting = CHUNK_ELEMENTS // vocab // ROW_MULTIPLE * ROW_MULTIPLE
    return max(ROW_MULTIPLE, min(fitting, rows))


class ChunkedLoss(torch.autograd.Function):
    """(total, argmax [R], overlap [R]) of `op.linear_soft_ce`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: Tensor,
        weight_UD: Tensor,
        target: TargetStates | TargetLogits,
        weight_R: Tensor,
        label_R: Tensor,
        loss: str,
        log_sum_R: Tensor | None,
        wants_gradient: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, vocab = len(hidden_RD), len(weight_UD)
        projection_UD = weight_UD.to(hidden_RD.dtype)
        total = torch.zeros((), dtype=torch.float32, device=hidden_RD.device)
        argmax_R = torch.full((rows,), -1, dtype=torch.long, device=hidden_RD.device)
        overlap_R = torch.zeros(rows, dtype=torch.float32, device=hidden_RD.device)
        hidden_gradient = torch.zeros_like(hidden_RD) if wants_gradient and ctx.needs_input_grad[0] else None
        weight_gradient = None
        if wants_gradient and ctx.needs_input_grad[1]:
            weight_gradient = torch.zeros(weight_UD.shape, dtype=torch.float32, device=weight_UD.device)
        size = chunk_rows(rows, vocab)
        for start in range(0, rows, size):
            part = slice(start, start + size)
            share_r = weight_R[part].float()
            # a skipped row may hold anything, even NaN; as zeros it takes no part
            wanted_r1 = (share_r != 0)[:, None]
            hidden_rD = torch.where(wanted_r1, hidden_RD[part], 0.0)
            p_rU, mass_r = _probabilities(target, part, log_sum_R, wanted_r1)
            draft = _Draft.of(hidden_rD @ projection_UD.T)
            argmax_R[part] = draft.argmax_r
            losses_r, overlap_R[part], gradient_rU = _loss_and_gradient(draft, p_rU, mass_r, label_R[part], loss)
            total += (losses_r * share_r).sum()
            if hidden_gradient is None and weight_gradient is None:
                continue
            narrow_rU = gradient_rU.mul_(share_r[:, None]).to(hidden_RD.dtype)
            if hidden_gradient is not None:
                hidden_gradient[part] = narrow_rU @ projection_UD
            if weight_gradient is not None:
                weight_gradient += narrow_rU.T @ hidden_rD
        skipped_R = weight_R == 0
        argmax_R.masked_fill_(skipped_R, -1)
        overlap_R.masked_fill_(skipped_R, 0.0)
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        ctx.weight_dtype = weight_UD.dtype
        ctx.mark_non_differentiable(argmax_R, overlap_R)
        return total, argmax_R, overlap_R

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        hidden_gradient, weight_gradient = ctx.saved_tensors
        if hidden_gradient is not None:
            hidden_gradient = hidden_gradient * upstream.to(hidden_gradient.dtype)
        if weight_gradient is not None:
            weight_gradient = (weight_gradient * upstream).to(ctx.weight_dtype)
        return hidden_gradient, weight_gradient, None, None, None, None, None, None


@dataclass(frozen=True, kw_only=True)
class _Draft:
    """The draft's distribution in a chunk, fp32."""

    logits_rU: Tensor
    q_rU: Tensor
    argmax_r: Tensor
    log_sum_r: Tensor

    @classmethod
    def of(cls, logits_rU: Tensor) -> "_Draft":
        q_rU = logits_rU.softmax(-1, dtype=torch.float32)
        wide_rU = logits_rU.float()
        argmax_r = first_argmax(wide_rU)
        best = argmax_r[:, None]
        # one look-up instead of another pass: q = exp(logit - log_sum)
        log_sum_r = (wide_rU.gather(-1, best) - q_rU.gather(-1, best).log())[:, 0]
        return cls(logits_rU=wide_rU, q_rU=q_rU, argmax_r=argmax_r, log_sum_r=log_sum_r)


BLOCK = 128


def first_argmax(x_rU: Tensor) -> Tensor:
    """`argmax(-1)`, the lowest id of equals; block by block, since torch's own is seven times slower on a CPU."""
    rows, vocab = x_rU.shape
    if x_rU.device.type != "cpu" or vocab % BLOCK:
        return x_rU.argmax(-1)
    blocks_rbw = x_rU.view(rows, -1, BLOCK)
    block_r = blocks_rbw.amax(-1).argmax(-1)
    inside_rw = blocks_rbw[torch.arange(rows), block_r]
    return block_r * BLOCK + inside_rw.argmax(-1)


def _sum_of_sizes(x_rU: Tensor) -> Tensor:
    """Sum of |x| of each row, block by block: a norm adds up one by one and loses digits over a large vocabulary."""
    if x_rU.shape[1] % BLOCK:
        return x_rU.abs().sum(-1)
    sums_rb: Tensor = torch.linalg.vector_norm(x_rU.view(len(x_rU), -1, BLOCK), 1, dim=-1)
    return sums_rb.sum(-1)


def _probabilities(
    target: TargetStates | TargetLogits, part: slice, log_sum_R: Tensor | None, wanted_r1: Tensor
) -> tuple[Tensor, Tensor | float]:
    """p of a chunk [r, U], fp32, and what it sums to."""
    if isinstance(target, TargetStates):
        state_rE = torch.where(wanted_r1, target.state_RE[part], 0.0)
        logits_rU = state_rE @ target.lm_head_UE.to(state_rE.dtype).T
    else:
        logits_rU = torch.where(wanted_r1, target.logits_RU[part], 0.0)
    if log_sum_R is None:
        return logits_rU.softmax(-1, dtype=torch.float32), 1.0
    log_sum_r1 = torch.where(wanted_r1, log_sum_R[part, None], float("inf"))
    p_rU = logits_rU.float().sub(log_sum_r1).exp_()
    return p_rU, p_rU.sum(-1)


def _loss_and_gradient(
    draft: _Draft, p_rU: Tensor, mass_r: Tensor | float, label_r: Tensor, loss: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses and overlaps of rows, and the gradient with respect to their logits; reuses the memory of q."""
    q_rU, log_sum_r = draft.q_rU, draft.log_sum_r
    if loss == "hard_ce":
        overlap_r = torch.minimum(p_rU, q_rU).sum(-1)
        known_r, index = label_r >= 0, label_r.clamp_min(0)[:, None]
        chosen_r = draft.logits_rU.gather(-1, index)[:, 0]
        gradient_rU = q_rU.scatter_add_(-1, index, -torch.ones_like(q_rU[:, :1]))
        gradient_rU.masked_fill_(~known_r[:, None], 0.0)
        return torch.where(known_r, log_sum_r - chosen_r, 0.0), overlap_r, gradient_rU
    cross_r = log_sum_r * mass_r - torch.linalg.vecdot(p_rU, draft.logits_rU)
    if loss in ("lk", "lk_hybrid"):
        below_rU = q_rU * (q_rU < p_rU)  # where q < p, min(p, q) moves with q
        lk_gradient_rU = q_rU * below_rU.sum(-1, keepdim=True) - below_rU
    difference_rU = q_rU.sub_(p_rU)
    # min(a, b) = (a + b - |a - b|) / 2
    overlap_r = (1 + mass_r - _sum_of_sizes(difference_rU)) / 2
    if loss == "lk":
        return 1 - overlap_r, overlap_r, lk_gradient_rU
    if isinstance(mass_r, Tensor):  # the gradient of -sum p log q is mass q - p
        difference_rU = difference_rU.mul_(mass_r[:, None]).sub_(p_rU * (1 - mass_r)[:, None])
    if loss == "soft_ce":
        return cross_r, overlap_r, difference_rU
    kl_r = cross_r + torch.xlogy(p_rU, p_rU).sum(-1)
    if loss == "kl":
        return kl_r, overlap_r, difference_rU
    mix_r = torch.exp(-LK_DECAY * overlap_r)
    gradient_rU = mix_r[:, None] * difference_rU + (1 - mix_r)[:, None] * lk_gradient_rU
    return mix_r * kl_r + (1 - mix_r) * (1 - overlap_r), overlap_r, gradient_rU
