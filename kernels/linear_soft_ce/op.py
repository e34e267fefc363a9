"""Fused projection and distillation loss: hidden states times the draft lm_head against the target's distribution.

Shapes: R rows (supervised slots), D hidden of the draft, E hidden of the target, U draft vocabulary.
"""

import torch
from drafthead.kernels.backend import runs_triton
from drafthead.kernels.linear_soft_ce.chunked import ChunkedLoss
from drafthead.kernels.linear_soft_ce.reference import LOSSES, LossRows, TargetLogits, TargetStates
from torch import Tensor

FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INTEGERS = (torch.int32, torch.int64)
LARGEST_VOCAB = 2**30


def linear_soft_ce(
    hidden_RD: Tensor,
    weight_UD: Tensor,
    target: TargetStates | TargetLogits,
    weight_R: Tensor,
    label_R: Tensor,
    loss: str,
    *,
    log_sum_R: Tensor | None = None,
    impl: str = "auto",
) -> LossRows:
    """Weighted sum of the row losses of `hidden @ weight.T`; `reference.row_losses` defines them.

    Neither logits nor probabilities of all rows are kept, forward or backward. Gradients exist by the end of the
    forward pass, so one backward pass can follow on the Triton path.

    Args:
        hidden_RD: Normalised hidden states of the head; their dtype is the projection's.
        weight_UD: The draft lm_head (any float dtype).
        target: Where p comes from; takes no gradient.
        weight_R: Weight of each row, fp32; rows of weight 0 are skipped and may hold anything.
        label_R: The target's own token as a draft id (int64), -1 where the draft vocabulary lacks it.
        loss: One of `reference.LOSSES`.
        log_sum_R: logsumexp of the target's logits over the FULL vocabulary, fp32. With it p is the target's own
            distribution; without it p is renormalised over the draft vocabulary.
        impl: See `backend.runs_triton`; `reference` is plain torch, a few rows at a time (`chunked`).

    Raises:
        ValueError: Shapes, dtypes or devices do not fit together, or an unknown loss.
    """
    _check(hidden_RD, weight_UD, target, weight_R, label_R, loss, log_sum_R)
    function: type[torch.autograd.Function] = ChunkedLoss
    if runs_triton(impl, hidden_RD):
        function = _fused(hidden_RD, target)
    total, argmax_R, overlap_R = function.apply(
        hidden_RD, weight_UD, target, weight_R, label_R, loss, log_sum_R, torch.is_grad_enabled()
    )
    hit_R = (argmax_R == label_R) & (argmax_R >= 0)
    return LossRows(total=total, argmax_R=argmax_R, hit_R=hit_R, overlap_R=overlap_R)


def _fused(hidden_RD: Tensor, target: TargetStates | TargetLogits) -> type[torch.autograd.Function]:
    """The Triton path; Triton takes half a second to import and does not exist everywhere."""
    from drafthead.kernels.linear_soft_ce.fused import FusedLoss

    for name, tensor in (("hidden", hidden_RD), ("target", _source(target))):
        if tensor.dtype not in FUSED_DTYPES:
            raise ValueError(f"{name} of {tensor.dtype}: the kernel takes bf16, fp16 or fp32")
    return FusedLoss


def _source(target: TargetStates | TargetLogits) -> Tensor:
    return target.state_RE if isinstance(target, TargetStates) else target.logits_RU


def _check(
    hidden_RD: Tensor,
    weight_UD: Tensor,
    target: TargetStates | TargetLogits,
    weight_R: Tensor,
    label_R: Tensor,
    loss: str,
    log_sum_R: Tensor | None,
) -> None:
    if loss not in LOSSES:
        raise ValueError(f"loss={loss!r}: one of {', '.join(LOSSES)}")
    if hidden_RD.dim() != 2:
        raise ValueError(f"shapes do not fit: hidden is {tuple(hidden_RD.shape)}, wanted [R, D]")
    rows, size = hidden_RD.shape
    vocab = len(weight_UD)
    if not 0 < vocab <= LARGEST_VOCAB:
        raise ValueError(f"vocabulary of {vocab}: wanted 1 to 2^30")
    found = {
        "weight": (weight_UD, (vocab, size)),
        "row weights": (weight_R, (rows,)),
        "labels": (label_R, (rows,)),
    }
    if isinstance(target, TargetStates):
        found["target states"] = (target.state_RE, (rows, target.lm_head_UE.shape[-1]))
        found["target lm_head"] = (target.lm_head_UE, (vocab, target.state_RE.shape[-1]))
    else:
        found["target logits"] = (target.logits_RU, (rows, vocab))
    if log_sum_R is not None:
        found["log sums"] = (log_sum_R, (rows,))
    for name, (tensor, wanted) in found.items():
        if tensor.shape != wanted:
            raise ValueError(
                f"shapes do not fit: hidden is {tuple(hidden_RD.shape)}, so {name} should be {wanted}, "
                f"not {tuple(tensor.shape)}"
            )
        if tensor.device != hidden_RD.device:
            raise ValueError(f"{name} on {tensor.device}, hidden on {hidden_RD.device}")
        if name != "labels" and not tensor.is_floating_point():
            raise ValueError(f"{name} of {tensor.dtype}: wanted floating point")
    if label_R.dtype not in INTEGERS:
        raise ValueError(f"labels of {label_R.dtype}: wanted int32 or int64")
