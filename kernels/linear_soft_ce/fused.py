"""The loss on a GPU: logits of some rows by cuBLAS into scratch memory, then one Triton kernel over them.

Four products a row, the least without keeping logits (draft logits, target logits, both gradients), all by cuBLAS: a
kernel that makes logits tile by tile for itself needs the normalisers before any gradient, so it computes both kinds
twice. The scratch is what that costs. Its size decides the speed, because each chunk of rows reads both lm_heads and
reads and writes the whole gradient of one: at r rows a bf16 product does r operations for each byte of an lm_head, and
an H200 needs about 200. The gradient overwrites the draft logits, so there is no third buffer.

The weight's gradient is summed over the chunks where it will stay, in the weight's own dtype (fp32 for fp32 weights;
bf16 ones are rounded once a chunk), because at [151936, 4096] a second copy is the peak of the whole step.

Shapes: R rows, r rows of a chunk, D hidden of the draft, E hidden of the target, U draft vocabulary.
"""

from typing import Any

import torch
import triton
from drafthead.kernels.linear_soft_ce import kernel
from drafthead.kernels.linear_soft_ce.reference import TargetLogits, TargetStates
from torch import Tensor
from torch.autograd.function import once_differentiable

SCRATCH_BYTES = 2**26
MIN_ROWS = 256
ROW_MULTIPLE = 128
COLUMN_MULTIPLE = 64
"""Rows of scratch begin at multiples of 128 bytes: odd vocabularies would lose the fast loads and products."""


def chunk_rows(rows: int, row_bytes: int, trained_size: int) -> int:
    """Rows of a chunk: what `SCRATCH_BYTES` hold, and no fewer than the products need.

    Args:
        rows: All rows.
        row_bytes: Scratch of one row.
        trained_size: D if the weight is trained, else 0. Then more rows pay, and D / 4 of them (two bf16 logits each)
            take half of the memory of the gradient.
    """
    wanted = max(MIN_ROWS, SCRATCH_BYTES // row_bytes, trained_size // 4)
    return max(1, min(rows, wanted // ROW_MULTIPLE * ROW_MULTIPLE))


class FusedLoss(torch.autograd.Function):
    """(total, argmax [R], overlap [R]) of `op.linear_soft_ce`; same arguments as `chunked.ChunkedLoss`."""

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
        wanted = [wants_gradient and needed for needed in ctx.needs_input_grad[:2]]
        with torch.cuda.device_of(hidden_RD):
            rows = _Rows(hidden_RD, weight_UD, target, weight_R, label_R, log_sum_R, wanted)
            rows.run(loss)
        ctx.gradients = (rows.hidden_gradient_RD, rows.weight_gradient_UD)
        ctx.weight_dtype = weight_UD.dtype
        ctx.mark_non_differentiable(rows.argmax_R, rows.overlap_R)
        return rows.loss_R.sum(), rows.argmax_R, rows.overlap_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("linear_soft_ce: a second backward pass, but the first has used up its gradients")
        hidden_gradient_RD, weight_gradient_UD = ctx.gradients
        ctx.gradients = None
        for gradient in (hidden_gradient_RD, weight_gradient_UD):
            if gradient is not None:
                _scale(gradient, upstream)
        if weight_gradient_UD is not None:
            weight_gradient_UD = weight_gradient_UD.to(ctx.weight_dtype)
        return hidden_gradient_RD, weight_gradient_UD, None, None, None, None, None, None


class _Rows:
    """Inputs, scratch and results of one forward pass."""

    def __init__(
        self,
        hidden_RD: Tensor,
        weight_UD: Tensor,
        target: TargetStates | TargetLogits,
        weight_R: Tensor,
        label_R: Tensor,
        log_sum_R: Tensor | None,
        wanted: list[bool],
    ):
        self.hidden_RD, self.target = hidden_RD, target
        self.weight_R, self.label_R = weight_R.float().contiguous(), label_R.contiguous()
        self.log_sum_R = None if log_sum_R is None else log_sum_R.float().contiguous()
        self.projection_UD = weight_UD.to(hidden_RD.dtype)
        rows, device = len(hidden_RD), hidden_RD.device
        self.loss_R, self.overlap_R = torch.empty(2, rows, dtype=torch.float32, device=device)
        self.argmax_R = torch.empty(rows, dtype=torch.long, device=device)
        self.hidden_gradient_RD = (
            torch.empty(hidden_RD.shape, dtype=hidden_RD.dtype, device=device) if wanted[0] else None
        )
        self.weight_gradient_UD = None
        if wanted[1]:
            dtype = weight_UD.dtype if weight_UD.dtype == hidden_RD.dtype else torch.float32
            self.weight_gradient_UD = torch.zeros(weight_UD.shape, dtype=dtype, device=device)

    def run(self, loss: str) -> None:
        rows, size = self.hidden_RD.shape
        vocab = len(self.projection_UD)
        dtypes = [self.hidden_RD.dtype]
        if isinstance(self.target, TargetStates):
            lm_head_UE = self.target.lm_head_UE.to(self.target.state_RE.dtype)
            dtypes.append(lm_head_UE.dtype)
        width = triton.cdiv(vocab, COLUMN_MULTIPLE) * COLUMN_MULTIPLE
        row_bytes = width * sum(dtype.itemsize for dtype in dtypes)
        step = chunk_rows(rows, row_bytes, 0 if self.weight_gradient_UD is None else size)
        scratch = [_scratch(step, vocab, width, dtype, self.hidden_RD.device) for dtype in dtypes]
        for start in range(0, rows, step):
            part = slice(start, min(start + step, rows))
            draft_rU = scratch[0][: part.stop - start]
            torch.mm(self.hidden_RD[part], self.projection_UD.T, out=draft_rU)
            if isinstance(self.target, TargetStates):
                target_rU = scratch[1][: part.stop - start]
                torch.mm(self.target.state_RE[part], lm_head_UE.T, out=target_rU)
            else:
                target_rU = self.target.logits_RU[part]
            self._launch(draft_rU, target_rU, part, loss)
            self._add_gradients(draft_rU, part)

    def _launch(self, draft_rU: Tensor, target_rU: Tensor, part: slice, loss: str) -> None:
        log_sum_R = self.weight_R if self.log_sum_R is None else self.log_sum_R
        kernel.loss_rows[(len(draft_rU),)](
            draft_rU,
            target_rU,
            self.weight_R[part],
            self.label_R[part],
            log_sum_R[part],
            self.loss_R[part],
            self.argmax_R[part],
            self.overlap_R[part],
            draft_rU.shape[1],
            draft_rU.stride(0),
            *target_rU.stride(),
            LOSS=loss,
            HAS_LOG_SUM=self.log_sum_R is not None,
            GRADIENT=self.hidden_gradient_RD is not None or self.weight_gradient_UD is not None,
            **kernel.settings(draft_rU.shape[1]),
        )

    def _add_gradients(self, gradient_rU: Tensor, part: slice) -> None:
        """Both gradients of a chunk from that of its logits."""
        if self.hidden_gradient_RD is not None:
            torch.mm(gradient_rU, self.projection_UD, out=self.hidden_gradient_RD[part])
        if self.weight_gradient_UD is not None:
            # a skipped row may hold anything, and 0 * NaN would reach the sum
            hidden_rD = torch.where((self.weight_R[part] != 0)[:, None], self.hidden_RD[part], 0.0)
            _add_product(self.weight_gradient_UD, gradient_rU.T, hidden_rD)


def _scratch(rows: int, vocab: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Room for logits, with gaps between the rows."""
    wide = torch.empty(rows, width, dtype=dtype, device=device)
    # a product may read what it multiplies by 0, as bf16 ones on a CPU do
    wide[:, vocab:].zero_()
    return wide[:, :vocab]


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, without a copy of the product."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        # the interpreter's case; torch has no such product on a CPU
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def _scale(value: Tensor, factor: Tensor) -> None:
    with torch.cuda.device_of(value):
        kernel.scale[(triton.cdiv(value.numel(), kernel.SCALE_BLOCK),)](
            value, factor.float(), value.numel(), BLOCK=kernel.SCALE_BLOCK, num_warps=8
        )
