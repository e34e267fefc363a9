"""Triton kernels of tree attention: partial softmax sums over splits of the cache, then their combination.

The M rows of the tree times the J heads of a kv head are R = M J queries; query r is tree row r // J, head r % J. A
program takes some of them through one split of the cache or, as one more split, through the tree itself. A split is
`SPLIT` positions whatever the batch, so that no request's result depends on its neighbours.
"""

import itertools
from typing import Any

import triton
import triton.language as tl
from drafthead.kernels.backend import CompileCase

SPLIT = 1024
COMBINED_ROWS = 16
COMBINE_WARPS = 8


@triton.jit
def split_kernel(
    query,
    keys,
    values,
    length,
    visible,
    partial,
    top,
    total,
    scale_log2,
    num_tree_rows,
    groups,
    heads_per_group,
    head_dim,
    num_slots,
    key_b,
    key_l,
    key_g,
    value_b,
    value_l,
    value_g,
    IN_TREE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_P: tl.constexpr,
    CHUNK_P: tl.constexpr,
):
    """Unnormalised output, largest score and sum of the exponentials of BLOCK_R queries.

    `keys` and `values` are the cache, of which this program walks one split, or those of the tree (IN_TREE).
    """
    rows = num_tree_rows * heads_per_group
    batch, group, r, p = _tile(tl.cdiv(rows, BLOCK_R), groups, BLOCK_R, BLOCK_P)
    tree_row = r // heads_per_group
    num_splits = tl.cdiv(num_slots, SPLIT)
    split = num_splits
    begin = 0
    end = num_tree_rows
    if not IN_TREE:
        split = tl.program_id(1)
        begin = split * SPLIT
        end = tl.minimum(tl.load(length + batch).to(tl.int32), num_slots)
        if begin >= end:
            return
        end = tl.minimum(begin + SPLIT, end)
    inside = (r < rows)[:, None] & (p < head_dim)[None, :]
    head = group * heads_per_group + r % heads_per_group
    q_offset = ((batch * num_tree_rows + tree_row) * (groups * heads_per_group) + head) * head_dim
    query += q_offset[:, None]
    q = tl.load(query + p[None, :], mask=inside, other=0.0)
    keys += batch * key_b + group * key_g
    values += batch * value_b + group * value_g
    visible += batch * num_tree_rows * num_tree_rows
    best = tl.full([BLOCK_R], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_R], tl.float32)
    mixed = tl.zeros([BLOCK_R, BLOCK_P], tl.float32)
    for start in range(begin, end, BLOCK_L):
        ids = start + tl.arange(0, BLOCK_L)
        holds = ids < end
        seen = holds[None, :]
        if IN_TREE:
            # padding rows hold anything, and 0 * NaN would reach the sums
            holds = tl.load(visible + ids * (num_tree_rows + 1), mask=holds, other=0) != 0
            seen = (r < rows)[:, None] & holds[None, :]
            seen = tl.load(visible + tree_row[:, None] * num_tree_rows + ids[None, :], mask=seen, other=0) != 0
        ids = ids.to(tl.int64)
        columns = keys + ids[None, :] * key_l
        if CHUNK_P == BLOCK_P:
            k = tl.load(columns + p[:, None], mask=(p < head_dim)[:, None] & holds[None, :], other=0.0)
            score = tl.dot(q, k)
        else:
            score = tl.zeros([BLOCK_R, BLOCK_L], tl.float32)
            for first in range(0, head_dim, CHUNK_P):
                c = first + tl.arange(0, CHUNK_P)
                part = tl.load(query + c[None, :], mask=(r < rows)[:, None] & (c < head_dim)[None, :], other=0.0)
                k = tl.load(columns + c[:, None], mask=(c < head_dim)[:, None] & holds[None, :], other=0.0)
                score = tl.dot(part, k, score, input_precision="tf32x3")
        score = tl.where(seen, score * scale_log2, float("-inf"))
        larger, shrink = _rescale(best, tl.max(score, 1))
        share = tl.exp2(score - _finite(larger)[:, None])
        weight = weight * shrink + tl.sum(share, 1)
        value_mask = holds[:, None] & (p < head_dim)[None, :]
        v = tl.load(values + ids[:, None] * value_l + p[None, :], mask=value_mask, other=0.0)
        mixed = tl.dot(share.to(v.dtype), v, mixed * shrink[:, None], input_precision="tf32x3")
        best = larger
    slot = ((batch * groups + group) * rows + r) * (num_splits + 1) + split
    tl.store(top + slot, best, mask=r < rows)
    tl.store(total + slot, weight, mask=r < rows)
    tl.store(partial + slot[:, None] * head_dim + p[None, :], mixed, mask=inside)


@triton.jit
def combine_kernel(
    partial,
    top,
    total,
    length,
    visible,
    output,
    num_tree_rows,
    groups,
    heads_per_group,
    head_dim,
    num_slots,
    SPLIT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Merge the splits that a request has; padding rows, which do not see themselves, become 0."""
    rows = num_tree_rows * heads_per_group
    batch, group, r, p = _tile(tl.cdiv(rows, BLOCK_R), groups, BLOCK_R, BLOCK_P)
    inside = (r < rows)[:, None] & (p < head_dim)[None, :]
    num_splits = tl.cdiv(num_slots, SPLIT)
    used = tl.cdiv(tl.minimum(tl.load(length + batch), num_slots), SPLIT)
    first = ((batch * groups + group) * rows + r) * (num_splits + 1)
    best = tl.full([BLOCK_R], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_R], tl.float32)
    mixed = tl.zeros([BLOCK_R, BLOCK_P], tl.float32)
    for index in range(0, used + 1):
        slot = first + tl.where(index < used, index, num_splits)
        other = tl.load(top + slot, mask=r < rows, other=float("-inf"))
        larger, shrink = _rescale(best, other)
        grow = tl.exp2(other - _finite(larger))
        weight = weight * shrink + grow * tl.load(total + slot, mask=r < rows, other=0.0)
        part = tl.load(partial + slot[:, None] * head_dim + p[None, :], mask=inside, other=0.0)
        mixed = mixed * shrink[:, None] + grow[:, None] * part
        best = larger
    tree_row = r // heads_per_group
    head = group * heads_per_group + r % heads_per_group
    live = tl.load(visible + (batch * num_tree_rows + tree_row) * num_tree_rows + tree_row, mask=r < rows, other=0) != 0
    mixed = tl.where(live[:, None], mixed / tl.where(live, weight, 1.0)[:, None], 0.0)
    offset = ((batch * num_tree_rows + tree_row) * (groups * heads_per_group) + head) * head_dim
    tl.store(output + offset[:, None] + p[None, :], mixed.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _tile(num_blocks, groups, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr):
    """Request, kv head, rows and channels of this program."""
    index = tl.program_id(0).to(tl.int64)
    r = (index % num_blocks).to(tl.int32) * BLOCK_R + tl.arange(0, BLOCK_R)
    pair = index // num_blocks
    return pair // groups, pair % groups, r, tl.arange(0, BLOCK_P)


@triton.jit
def _rescale(best, other):
    """The larger maximum and the factor of sums taken under `best`."""
    larger = tl.maximum(best, other)
    return larger, tl.exp2(best - _finite(larger))


@triton.jit
def _finite(maximum):
    """0 where nothing was seen yet, since -inf - (-inf) is NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


def settings(dtype: str, rows: int, head_dim: int) -> dict[str, Any]:
    """Tile, warps and stages of `split_kernel` for this many queries of a kv head; `dtype` in Triton's spelling."""
    channels = max(16, triton.next_power_of_2(head_dim))
    tall = 32 if channels > 128 or dtype == "fp32" else 64
    return {
        "BLOCK_R": min(max(16, triton.next_power_of_2(rows)), tall),
        "BLOCK_L": tall,
        "BLOCK_P": channels,
        # fp32 operands are split in two for the tensor cores, which leaves no registers for all channels at once
        "CHUNK_P": 32 if dtype == "fp32" else channels,
        "num_warps": 8 if channels >= 128 else 4,
        "num_stages": 2,
    }


def compile_cases() -> list[CompileCase]:
    """Both kernels for 64 rows of 4 heads a kv head, at each padded head dim."""
    inputs = ("query", "keys", "values")
    sums = ("partial", "top", "total")
    sizes = dict.fromkeys(("num_tree_rows", "groups", "heads_per_group", "head_dim", "num_slots"), "i32")
    strides = ("key_b", "key_l", "key_g", "value_b", "value_l", "value_g")
    shared = {**dict.fromkeys(sums, "*fp32"), **sizes, "length": "*i64", "visible": "*i1"}
    cases = []
    for dtype, head_dim in itertools.product(("bf16", "fp16", "fp32"), (64, 128, 256)):
        constants = settings(dtype, 256, head_dim)
        launch = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
        cases += [
            CompileCase(
                name=f"tree_attention {'tree' if in_tree else 'split'} {dtype} P={head_dim}",
                function=split_kernel,
                signature={
                    **dict.fromkeys(inputs, f"*{dtype}"),
                    **shared,
                    "scale_log2": "fp32",
                    **dict.fromkeys(strides, "i32"),
                },
                constants={"IN_TREE": in_tree, "SPLIT": SPLIT, **constants},
                aligned=(*inputs, *sums, "length", "visible", "head_dim", *strides),
                **launch,
            )
            for in_tree in (False, True)
        ]
        cases.append(
            CompileCase(
                name=f"tree_attention combine {dtype} P={head_dim}",
                function=combine_kernel,
                signature={**shared, "output": f"*{dtype}"},
                constants={"SPLIT": SPLIT, "BLOCK_R": COMBINED_ROWS, "BLOCK_P": constants["BLOCK_P"]},
                aligned=(*sums, "length", "visible", "output", "head_dim"),
                num_warps=COMBINE_WARPS,
            )
        )
    return cases
