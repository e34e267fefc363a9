"""Triton kernels of the distillation loss: from a chunk of draft and target logits to losses, metrics and gradients.

`loss_rows`, a program for each row, reads both rows twice: once for the normalisers and the argmax, once for loss,
overlap and gradient, which takes the place of the draft logits. The lk losses, whose gradient needs the overlap, read
once more. Everything between load and store is fp32.

Shapes: U draft vocabulary; L lanes of a block.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from drafthead.kernels.backend import CompileCase
from drafthead.kernels.linear_soft_ce.reference import LK_DECAY

MAX_BLOCK = 4096
"""With 16 warps 16 bytes of bf16 logits a thread; 256 rows of such programs already fill an H200."""
SCALE_BLOCK = 4096
DECAY = tl.constexpr(LK_DECAY)
NO_ID = tl.constexpr(2147483647)


class Law(NamedTuple):
    """A distribution over the vocabulary: exp(logit - shift) * factor."""

    shift: Any
    factor: Any
    log_factor: Any


def settings(vocab: int) -> dict[str, int]:
    """Block and warps of `loss_rows`."""
    block = min(MAX_BLOCK, max(128, triton.next_power_of_2(vocab)))
    return {"BLOCK": block, "num_warps": max(1, min(16, block // 256))}


@triton.jit
def loss_rows(
    draft_ptr,
    target_ptr,
    weight_ptr,
    label_ptr,
    log_sum_ptr,
    loss_ptr,
    argmax_ptr,
    overlap_ptr,
    vocab,
    draft_stride_r,
    target_stride_r,
    target_stride_u,
    LOSS: tl.constexpr,
    HAS_LOG_SUM: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Weighted loss, argmax and overlap of each row; with GRADIENT, the weighted gradient replaces the draft logits."""
    row = tl.program_id(0).to(tl.int64)
    draft_ptr += row * draft_stride_r
    target_ptr += row * target_stride_r
    weight = tl.load(weight_ptr + row)
    if weight == 0.0:
        if GRADIENT:
            _clear(draft_ptr, vocab, BLOCK)
        tl.store(loss_ptr + row, 0.0)
        tl.store(argmax_ptr + row, -1)
        tl.store(overlap_ptr + row, 0.0)
        return
    log_sum = 0.0
    if HAS_LOG_SUM:
        log_sum = tl.load(log_sum_ptr + row)
    argmax, q_law, p_law, mass = _normalise(draft_ptr, target_ptr, target_stride_u, log_sum, vocab, HAS_LOG_SUM, BLOCK)
    label = tl.load(label_ptr + row)
    if LOSS == "hard_ce":
        mass = tl.where(label >= 0, 1.0, 0.0)
    IS_LK: tl.constexpr = LOSS == "lk" or LOSS == "lk_hybrid"
    overlap_L = tl.zeros((BLOCK,), tl.float32)
    below_L = tl.zeros((BLOCK,), tl.float32)
    divergence_L = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        draft, target = _load_pair(draft_ptr, target_ptr, target_stride_u, ids, vocab)
        q, p = _shares(q_law, p_law, draft, target)
        overlap_L += tl.minimum(p, q, propagate_nan=tl.PropagateNan.ALL)
        if IS_LK:
            below_L += tl.where(q < p, q, 0.0)
        # the distribution that the loss draws q to
        wanted = p
        if LOSS == "hard_ce":
            wanted = tl.where(ids == label, 1.0, 0.0)
        if LOSS != "lk":
            surprise = q_law.shift - draft - q_law.log_factor
            if LOSS == "kl" or LOSS == "lk_hybrid":
                surprise += target - p_law.shift + p_law.log_factor
            # 0 log 0 is 0; what is NaN stays
            divergence_L += tl.where(wanted == 0.0, 0.0, wanted * surprise)
        if GRADIENT and not IS_LK:
            _store_gradient(draft_ptr, ids, vocab, weight * (mass * q - wanted))
    overlap = tl.sum(overlap_L, 0)
    divergence = tl.sum(divergence_L, 0)
    # taken as a constant by the gradient
    mix = 1.0
    if LOSS == "lk":
        mix = 0.0
    if LOSS == "lk_hybrid":
        mix = tl.exp(overlap * -DECAY)
    if IS_LK and GRADIENT:
        below = tl.sum(below_L, 0)
        for start in range(0, vocab, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            draft, target = _load_pair(draft_ptr, target_ptr, target_stride_u, ids, vocab)
            q, p = _shares(q_law, p_law, draft, target)
            # where q < p, min(p, q) moves with q
            gradient = (1.0 - mix) * (q * below - tl.where(q < p, q, 0.0))
            if LOSS == "lk_hybrid":
                gradient += mix * (mass * q - p)
            _store_gradient(draft_ptr, ids, vocab, weight * gradient)
    loss = divergence
    if IS_LK:
        loss = mix * divergence + (1.0 - mix) * (1.0 - overlap)
    tl.store(loss_ptr + row, weight * loss)
    tl.store(argmax_ptr + row, argmax)
    tl.store(overlap_ptr + row, overlap)


@triton.jit
def _normalise(draft_ptr, target_ptr, target_stride_u, log_sum, vocab, HAS_LOG_SUM: tl.constexpr, BLOCK: tl.constexpr):
    """Argmax of the draft's row, the laws of both rows and what p sums to."""
    argmax = 0
    q_top = tl.full((), float("-inf"), tl.float32)
    p_top = tl.full((), float("-inf"), tl.float32)
    q_total_L = tl.zeros((BLOCK,), tl.float32)
    p_total_L = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        draft, target = _load_pair(draft_ptr, target_ptr, target_stride_u, ids, vocab)
        top = tl.max(draft, 0)
        if top > q_top:
            argmax = tl.min(tl.where(draft == top, ids, NO_ID), 0)
        q_top, q_total_L = _add_exponentials(q_top, q_total_L, draft, top)
        if HAS_LOG_SUM:
            p_total_L += tl.exp(target - log_sum)
        else:
            p_top, p_total_L = _add_exponentials(p_top, p_total_L, target, tl.max(target, 0))
    q_law = _law(q_top, tl.sum(q_total_L, 0))
    if q_law.factor != q_law.factor:
        argmax = _first_nan(draft_ptr, vocab, argmax, BLOCK)
    p_total = tl.sum(p_total_L, 0)
    if HAS_LOG_SUM:
        return argmax, q_law, Law(log_sum, 1.0, 0.0), p_total
    else:
        return argmax, q_law, _law(p_top, p_total), 1.0


@triton.jit
def _load_pair(draft_ptr, target_ptr, target_stride_u, ids, vocab):
    """Draft and target logits in fp32; -inf behind the vocabulary."""
    draft = tl.load(draft_ptr + ids, mask=ids < vocab, other=float("-inf"))
    target = tl.load(target_ptr + ids.to(tl.int64) * target_stride_u, mask=ids < vocab, other=float("-inf"))
    return draft.to(tl.float32), target.to(tl.float32)


@triton.jit
def _add_exponentials(top, total_L, logit_L, block_top):
    """Running maximum, and the sums of exponentials under it."""
    larger = tl.maximum(top, block_top)
    # -inf - (-inf) would be NaN
    shift = tl.where(larger == float("-inf"), 0.0, larger)
    return larger, total_L * tl.exp(top - shift) + tl.exp(logit_L - shift)


@triton.jit
def _law(top, total):
    return Law(tl.where(top == float("-inf"), 0.0, top), 1.0 / total, -tl.log(total))


@triton.jit
def _first_nan(draft_ptr, vocab, otherwise, BLOCK: tl.constexpr):
    """Where torch finds the maximum of a row with a NaN. Its sums are NaN, but so are those of a row with inf."""
    first = NO_ID
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        draft = tl.load(draft_ptr + ids, mask=ids < vocab, other=0.0).to(tl.float32)
        first = tl.minimum(first, tl.min(tl.where(draft != draft, ids, NO_ID), 0))
    return tl.where(first == NO_ID, otherwise, first)


@triton.jit
def _shares(q_law, p_law, draft, target):
    """q and p."""
    return tl.exp(draft - q_law.shift) * q_law.factor, tl.exp(target - p_law.shift) * p_law.factor


@triton.jit
def _store_gradient(draft_ptr, ids, vocab, gradient):
    tl.store(draft_ptr + ids, gradient.to(draft_ptr.dtype.element_ty), mask=ids < vocab)


@triton.jit
def _clear(draft_ptr, vocab, BLOCK: tl.constexpr):
    for start in range(0, vocab, BLOCK):
        _store_gradient(draft_ptr, start + tl.arange(0, BLOCK), vocab, tl.zeros((BLOCK,), tl.float32))


@triton.jit
def scale(value_ptr, factor_ptr, count, BLOCK: tl.constexpr):
    """Multiply in place by one fp32 number; torch would round it to the values' dtype first."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(value_ptr + place, mask=place < count, other=0.0).to(tl.float32) * tl.load(factor_ptr)
    tl.store(value_ptr + place, value.to(value_ptr.dtype.element_ty), mask=place < count)


def compile_cases() -> list[CompileCase]:
    """`loss_rows` for a vocabulary of 151,936 and `scale`."""
    variants = [("bf16", loss, False, True) for loss in ("soft_ce", "kl", "lk", "lk_hybrid", "hard_ce")]
    variants += [("bf16", "lk_hybrid", False, False), ("bf16", "lk_hybrid", True, True)]
    variants += [("fp16", "lk_hybrid", False, True), ("fp32", "lk_hybrid", False, True)]
    scales = [
        CompileCase(
            name=f"scale {dtype}",
            function=scale,
            signature={"value_ptr": f"*{dtype}", "factor_ptr": "*fp32", "count": "i64"},
            constants={"BLOCK": SCALE_BLOCK},
            aligned=("value_ptr", "factor_ptr"),
            num_warps=8,
        )
        for dtype in ("bf16", "fp16", "fp32")
    ]
    return [_loss_case(*variant) for variant in variants] + scales


def _loss_case(dtype: str, loss: str, has_log_sum: bool, gradient: bool) -> CompileCase:
    constants: dict[str, Any] = dict(settings(151936))
    num_warps = constants.pop("num_warps")
    sums = ("weight_ptr", "log_sum_ptr", "loss_ptr", "overlap_ptr")
    ids = ("label_ptr", "argmax_ptr")
    logits = ("draft_ptr", "target_ptr")
    sizes = ("vocab", "draft_stride_r", "target_stride_r")
    what = f"{dtype} {loss}{' log_sum' if has_log_sum else ''}{'' if gradient else ' no grad'}"
    return CompileCase(
        name=f"loss_rows {what}",
        function=loss_rows,
        signature={
            **dict.fromkeys(logits, f"*{dtype}"),
            **dict.fromkeys(sums, "*fp32"),
            **dict.fromkeys(ids, "*i64"),
            **dict.fromkeys(sizes, "i32"),
        },
        constants={
            "target_stride_u": 1,
            "LOSS": loss,
            "HAS_LOG_SUM": has_log_sum,
            "GRADIENT": gradient,
            **constants,
        },
        aligned=(*logits, *sums, *ids, *sizes),
        num_warps=num_warps,
    )
