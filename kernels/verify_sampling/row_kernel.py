"""Statistics of the rows of logits, and the probabilities that they make (Triton).

A row is the logits of one query. No row of probabilities is written: a probability is
exp((logit - top) / temperature) / total, with top and total from the statistics that `row_stats` leaves for each tile
of a row.

Shapes: B requests, Q queries, V target vocabulary, R = B Q rows, S tiles of a row, N rows of one request.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

NO_TOKEN = tl.constexpr(2147483647)
LARGEST = tl.constexpr(3.4028234663852886e38)
LOG2_E = tl.constexpr(1.4426950408889634)
GREEDY_BELOW = tl.constexpr(1e-5)


class Target(NamedTuple):
    """Logits [B, Q, V]."""

    ptr: Any
    stride_b: Any
    stride_q: Any
    stride_v: Any
    queries: Any
    vocab: Any


class Stats(NamedTuple):
    """What is known of each row: by tile [R, S] the largest logit, the sum of weights, the first id of the largest."""

    top_ptr: Any
    total_ptr: Any
    first_ptr: Any
    tiles: Any
    cut_ptr: Any
    """[R]: the smallest logit kept."""
    last_ptr: Any
    """[R]: the last id kept among the smallest logits."""


class Request(NamedTuple):
    """One request, in scalars."""

    index: Any
    num_draft: Any
    temperature: Any
    seed: Any
    position: Any


class Law(NamedTuple):
    """What turns logits of rows [N] into probabilities."""

    top: Any
    total: Any
    only: Any
    """The only token that the row can give, or -1."""
    cut: Any
    last: Any


@triton.jit
def clean(logit):
    """Logits in fp32; a NaN counts as -inf, +inf as the largest number."""
    logit = logit.to(tl.float32)
    return tl.minimum(tl.where(logit == logit, logit, -float("inf")), LARGEST)


@triton.jit
def drafted(num_draft_ptr, index, queries):
    """How many draft tokens a request has, within what there is room for."""
    return tl.minimum(tl.maximum(tl.load(num_draft_ptr + index), 0), queries - 1).to(tl.int32)


@triton.jit
def load_request(num_draft_ptr, temperature_ptr, seed_ptr, position_ptr, index, queries):
    return Request(
        index,
        drafted(num_draft_ptr, index, queries),
        tl.load(temperature_ptr + index),
        tl.load(seed_ptr + index),
        tl.load(position_ptr + index),
    )


@triton.jit
def row_stats(
    logits_ptr,
    stride_b,
    stride_q,
    stride_v,
    num_draft_ptr,
    temperature_ptr,
    top_ptr,
    total_ptr,
    first_ptr,
    queries,
    vocab,
    tiles,
    BLOCK: tl.constexpr,
):
    """One tile of one row: the largest logit, and the sum of weights, or for greedy requests the first argmax."""
    tile = tl.program_id(0) % tiles
    row = (tl.program_id(0) // tiles).to(tl.int64)
    index, query = row // queries, row % queries
    if query > drafted(num_draft_ptr, index, queries):
        return
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    place = index * stride_b + query * stride_q + ids.to(tl.int64) * stride_v
    # widened first: Triton's interpreter compares the bits of bf16 numbers, and a NaN's equal themselves
    given = tl.load(logits_ptr + place, mask=ids < vocab, other=-float("inf")).to(tl.float32)
    logit = clean(given)
    temperature = tl.load(temperature_ptr + index)
    place = row * tiles + tile
    if temperature < GREEDY_BELOW:
        # a NaN is above all, as for torch's argmax
        logit = tl.where(given == given, logit, float("inf"))
        top = tl.max(logit)
        tl.store(first_ptr + place, tl.min(tl.where(logit == top, ids, NO_TOKEN)))
    else:
        top = tl.max(logit)
        # -inf - -inf would be NaN
        below = logit - tl.where(top == -float("inf"), 0.0, top)
        tl.store(total_ptr + place, tl.sum(tl.exp2(below * (LOG2_E / temperature))))
    tl.store(top_ptr + place, top)


@triton.jit
def row_law(stats, row, real, temperature, TILES: tl.constexpr, FILTERED: tl.constexpr):
    """The laws of rows [N], from the statistics of their tiles."""
    tile = tl.arange(0, TILES)[None, :]
    place = row[:, None] * stats.tiles + tile
    mask = real[:, None] & (tile < stats.tiles)
    top_NS = tl.load(stats.top_ptr + place, mask=mask, other=-float("inf"))
    highest = tl.max(top_NS, 1)
    top = tl.where(highest == -float("inf"), 0.0, highest)
    total = tl.full(row.shape, 1.0, tl.float32)
    only = tl.where(highest == -float("inf"), 0, -1)
    if temperature < GREEDY_BELOW:
        first_NS = tl.load(stats.first_ptr + place, mask=mask, other=NO_TOKEN)
        only = tl.min(tl.where(top_NS == highest[:, None], first_NS, NO_TOKEN), 1)
    else:
        total_NS = tl.load(stats.total_ptr + place, mask=mask, other=0.0)
        total_N = tl.sum(total_NS * tl.exp2((top_NS - top[:, None]) * (LOG2_E / temperature)), 1)
        total = tl.where(only < 0, total_N, total)
    cut = tl.full(row.shape, -float("inf"), tl.float32)
    last = tl.full(row.shape, NO_TOKEN, tl.int32)
    if FILTERED:
        cut = tl.load(stats.cut_ptr + row, mask=real, other=-float("inf"))
        last = tl.load(stats.last_ptr + row, mask=real, other=NO_TOKEN)
    return Law(top, total, only, cut, last)


@triton.jit
def target_chance(law, logit, ids, temperature):
    """Target probability of tokens, from their clean logits."""
    weight = tl.exp2((logit - law.top) * (LOG2_E / tl.maximum(temperature, GREEDY_BELOW)))
    kept = (logit > law.cut) | ((logit == law.cut) & (ids <= law.last))
    chance = tl.where(kept, weight / law.total, 0.0)
    return tl.where(law.only >= 0, tl.where(ids == law.only, 1.0, 0.0), chance)
