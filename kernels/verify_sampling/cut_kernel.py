"""Which logits of a row top-k and top-p keep, without sorting (Triton): the smallest is searched by its bits.

Logits are ordered as integers (`key_of`). Both rules drop the smallest as long as what is below does not exceed a
bound: for top-k the number of logits below (V - k), for top-p their part of the sum (1 - p). So the smallest one kept
is the largest key with no more than the bound below it, found two bits a pass. Of the logits equal to it top-k keeps
all and top-p as many as it needs, lowest ids first.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from drafthead.kernels.verify_sampling.row_kernel import GREEDY_BELOW, LOG2_E, NO_TOKEN, Stats, clean, drafted, row_law

SMALLEST_KEY = tl.constexpr(-2147483648)


class Row(NamedTuple):
    """The logits of one query, and what turns them into weights exp2((logit - top) * scale)."""

    ptr: Any
    stride: Any
    vocab: Any
    top: Any
    scale: Any


class Kept(NamedTuple):
    """What a cut leaves of a row: sum of weights above it, weight of one equal to it, number of those, sum below."""

    cut: Any
    above: Any
    weight: Any
    equals: Any
    below: Any


@triton.jit
def key_of(logit, SHIFT: tl.constexpr):
    """An int32 that orders fp32 numbers without NaN; the lowest SHIFT bits say nothing more than the type's."""
    # 0 and -0 are equal
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def load_tile(row, start, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Logits, keys, ids and which of them exist."""
    ids = start + tl.arange(0, BLOCK)
    mask = ids < row.vocab
    logit = clean(tl.load(row.ptr + ids.to(tl.int64) * row.stride, mask=mask, other=-float("inf")))
    return logit, key_of(logit, SHIFT), ids, mask


@triton.jit
def largest_key(row, lowest, bound, BY_WEIGHT: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key such that what lies below, from `lowest` on, counts or weighs no more than the bound."""
    PASSES: tl.constexpr = (33 - SHIFT) // 2
    key = tl.full([1], SMALLEST_KEY >> (32 - 2 * PASSES), tl.int32)
    for index in range(PASSES):
        step = tl.full([1], 1, tl.int32) << (2 * (PASSES - 1 - index))
        first = key + step
        second = first + step
        third = second + step
        below_first = tl.full([BLOCK], 0, tl.float32)
        below_second = tl.full([BLOCK], 0, tl.float32)
        below_third = tl.full([BLOCK], 0, tl.float32)
        for start in range(0, row.vocab, BLOCK):
            logit, own, _, mask = load_tile(row, start, SHIFT, BLOCK)
            weight = tl.full([BLOCK], 1.0, tl.float32)
            if BY_WEIGHT:
                weight = tl.exp2((logit - row.top) * row.scale)
            weight = tl.where(mask & (own >= lowest), weight, 0.0)
            below_first += tl.where(own < first, weight, 0.0)
            below_second += tl.where(own < second, weight, 0.0)
            below_third += tl.where(own < third, weight, 0.0)
        key = tl.where(tl.sum(below_first) <= bound, first, key)
        key = tl.where(tl.sum(below_second) <= bound, second, key)
        key = tl.where(tl.sum(below_third) <= bound, third, key)
    return key


@triton.jit
def kept_from(row, lowest, key, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """What the cut at a key leaves, `lowest` being the smallest key that counts at all."""
    smallest = tl.full([BLOCK], float("inf"), tl.float32)
    above = tl.full([BLOCK], 0, tl.float32)
    below = tl.full([BLOCK], 0, tl.float32)
    equals = tl.full([BLOCK], 0, tl.int32)
    for start in range(0, row.vocab, BLOCK):
        logit, own, _, mask = load_tile(row, start, SHIFT, BLOCK)
        weight = tl.where(mask & (own >= lowest), tl.exp2((logit - row.top) * row.scale), 0.0)
        smallest = tl.minimum(smallest, tl.where(mask & (own >= key), logit, float("inf")))
        above += tl.where(own > key, weight, 0.0)
        below += tl.where(own < key, weight, 0.0)
        equals += (mask & (own == key)).to(tl.int32)
    cut = tl.min(smallest)
    return Kept(cut, tl.sum(above), tl.exp2((cut - row.top) * row.scale), tl.sum(equals), tl.sum(below))


@triton.jit
def id_of_equal(row, key, number, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Token id of the number-th logit (from 1) that has the key."""
    found = tl.full([1], NO_TOKEN, tl.int32)
    before = tl.full([1], 0, tl.int32)
    for start in range(0, row.vocab, BLOCK):
        _, own, ids, mask = load_tile(row, start, SHIFT, BLOCK)
        equal = (mask & (own == key)).to(tl.int32)
        place = before + tl.cumsum(equal, 0)
        found = tl.minimum(found, tl.min(tl.where((equal == 1) & (place == number), ids, NO_TOKEN)))
        before += tl.sum(equal)
    return found


@triton.jit
def find_cut(row, total, top_k, top_p, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest logit kept, the last id kept among its equals, and the sum of the weights kept."""
    lowest = tl.full([1], SMALLEST_KEY, tl.int32)
    if (top_k >= 1) & (top_k < row.vocab):
        lowest = largest_key(row, lowest, (row.vocab - top_k).to(tl.float32), False, SHIFT, BLOCK)
        by_count = kept_from(row, lowest, lowest, SHIFT, BLOCK)
        total = by_count.above + by_count.equals * by_count.weight
    key = lowest
    bound = (1.0 - top_p) * total
    if top_p < 1.0:
        # the largest logit stays however small top-p is
        key = tl.minimum(largest_key(row, lowest, bound, True, SHIFT, BLOCK), key_of(row.top, SHIFT))
    kept = kept_from(row, lowest, key, SHIFT, BLOCK)
    stay = kept.equals + tl.full([1], 0, tl.int32)
    last = tl.full([1], NO_TOKEN, tl.int32)
    if top_p < 1.0:
        drop = tl.maximum((bound - kept.below) / kept.weight, 0.0)
        stay -= tl.minimum(drop, kept.equals - 1.0).to(tl.int32)
        if tl.max(stay) < kept.equals:
            last = id_of_equal(row, key, stay, SHIFT, BLOCK)
    return kept.cut, last, kept.above + stay * kept.weight


@triton.jit
def row_cut(
    logits_ptr,
    stride_b,
    stride_q,
    stride_v,
    num_draft_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    top_ptr,
    total_ptr,
    first_ptr,
    cut_ptr,
    last_ptr,
    queries,
    vocab,
    tiles,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    """The cut of one row; where there is one, the row's statistics become those of the kept tokens."""
    row_id = tl.program_id(0).to(tl.int64)
    index, query = row_id // queries, row_id % queries
    if query > drafted(num_draft_ptr, index, queries):
        return
    temperature = tl.load(temperature_ptr + index)
    top_k = tl.load(top_k_ptr + index)
    top_p = tl.load(top_p_ptr + index)
    one = tl.arange(0, 1)
    cut = tl.full([1], -float("inf"), tl.float32)
    last = tl.full([1], NO_TOKEN, tl.int32)
    if (temperature >= GREEDY_BELOW) & (((top_k >= 1) & (top_k < vocab)) | (top_p < 1.0)):
        stats = Stats(top_ptr, total_ptr, first_ptr, tiles, cut_ptr, last_ptr)
        law = row_law(stats, row_id + one, one == 0, temperature, TILES, False)
        if tl.max(law.only) < 0:
            place = index * stride_b + query * stride_q
            row = Row(logits_ptr + place, stride_v, vocab, law.top, LOG2_E / temperature)
            smallest, last, total = find_cut(row, law.total, top_k, top_p, SHIFT, BLOCK)
            cut = tl.where(one == 0, smallest, 0.0)
            tile = tl.arange(0, TILES)
            mask = tile < tiles
            # every warp has read the statistics before one writes them
            tl.debug_barrier()
            tl.store(top_ptr + row_id * tiles + tile, tl.where(mask, law.top, 0.0), mask=mask)
            tl.store(total_ptr + row_id * tiles + tile, tl.where(tile == 0, total, 0.0), mask=mask)
    tl.store(cut_ptr + row_id + one, cut)
    tl.store(last_ptr + row_id + one, last)
