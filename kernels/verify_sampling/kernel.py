"""Kernels of speculative sampling: accept draft tokens, then race for the token that follows them.

`row_kernel.row_stats` has left statistics of each row, `cut_kernel.row_cut` those of what top-k and top-p keep.

The largest weight / exponential is a sample by weight. Each tile of the row behind the accepted tokens writes its
winners of two such races, by the residual (p - q)+ and by p; `finish` takes the best, by p only where rounding left
nothing of the residual.

Shapes: B requests, K draft steps, Q = K + 1 queries, V target vocabulary, U draft vocabulary, S tiles, N draft tokens
of one request.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from drafthead.kernels.backend import CompileCase
from drafthead.kernels.philox_device import accept_uniform, token_exponential
from drafthead.kernels.verify_sampling.cut_kernel import row_cut
from drafthead.kernels.verify_sampling.row_kernel import (
    NO_TOKEN,
    Stats,
    Target,
    clean,
    load_request,
    row_law,
    row_stats,
    target_chance,
)

ONE_HOT = tl.constexpr(0)
DENSE = tl.constexpr(1)
SPARSE = tl.constexpr(2)

STATS_BLOCK = 8192
CUT_BLOCK = 4096
RACE_BLOCK = 4096
NUM_WARPS = 8
KEY_SHIFT = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
"""How many low bits of an fp32 number that came from this type are always the same."""


class Draft(NamedTuple):
    """Draft tokens [B, K] and their probabilities [B, K, U]; `ids_ptr` [V] holds each token's place in U, or -1."""

    token_ptr: Any
    probs_ptr: Any
    stride_b: Any
    stride_k: Any
    stride_u: Any
    ids_ptr: Any


@triton.jit
def draft_chance(draft, index, step, token, ids, real, KIND: tl.constexpr):
    """Draft probability at a step of target ids where real, else 0; a NaN counts as 0."""
    if KIND == ONE_HOT:
        chance = tl.where(real & (ids == token), 1.0, 0.0)
    else:
        if KIND == SPARSE:
            ids = tl.load(draft.ids_ptr + ids, mask=real, other=-1)
            real = real & (ids >= 0)
        place = index * draft.stride_b + step * draft.stride_k + ids.to(tl.int64) * draft.stride_u
        chance = tl.load(draft.probs_ptr + place, mask=real, other=0.0).to(tl.float32)
        chance = tl.where(chance > 0.0, chance, 0.0)
    return chance


@triton.jit
def token_chances(
    target, stats, draft, request, STEPS: tl.constexpr, TILES: tl.constexpr, KIND: tl.constexpr, FILTERED: tl.constexpr
):
    """Target and draft probability of a request's draft tokens [N]; 0 behind the last and outside the vocabulary."""
    step = tl.arange(0, STEPS).to(tl.int64)
    mask = step < request.num_draft
    token = tl.load(draft.token_ptr + request.index * (target.queries - 1) + step, mask=mask, other=-1)
    real = mask & (token >= 0) & (token < target.vocab)
    law = row_law(stats, request.index * target.queries + step, real, request.temperature, TILES, FILTERED)
    place = request.index * target.stride_b + step * target.stride_q + token * target.stride_v
    logit = clean(tl.load(target.ptr + place, mask=real, other=-float("inf")))
    p = tl.where(real, target_chance(law, logit, token, request.temperature), 0.0)
    return p, draft_chance(draft, request.index, step, token, token, real, KIND)


@triton.jit
def tile_chances(
    target, stats, draft, request, step, ids, TILES: tl.constexpr, KIND: tl.constexpr, FILTERED: tl.constexpr
):
    """Target and draft probability of token ids at one step; the draft's are 0 behind the last draft token."""
    one = tl.arange(0, 1)
    row = request.index * target.queries + step + one
    law = row_law(stats, row, one == 0, request.temperature, TILES, FILTERED)
    place = request.index * target.stride_b + step * target.stride_q + ids.to(tl.int64) * target.stride_v
    logit = clean(tl.load(target.ptr + place, mask=ids < target.vocab, other=-float("inf")))
    p = tl.where(ids < target.vocab, target_chance(law, logit, ids, request.temperature), 0.0)
    token_ptr = draft.token_ptr + request.index * (target.queries - 1) + step
    token = tl.load(token_ptr, mask=step < request.num_draft, other=-1)
    end = tl.where(step < request.num_draft, target.vocab, 0)
    return p, draft_chance(draft, request.index, step, token, ids, ids < end, KIND)


@triton.jit
def race(
    target,
    stats,
    draft,
    request,
    accepted,
    factor,
    score_ptr,
    winner_ptr,
    tiles,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    KIND: tl.constexpr,
    FILTERED: tl.constexpr,
):
    """This tile's winners by max(factor p - q, 0) and by p in the row behind the accepted tokens, as [B, 2, S]."""
    tile = tl.program_id(0) % tiles
    start = tile * BLOCK
    ids = start + tl.arange(0, BLOCK)
    accepted = accepted.to(tl.int64)
    p, q = tile_chances(target, stats, draft, request, accepted, ids, TILES, KIND, FILTERED)
    # behind the last draft token nothing is taken off, so that the factor does not matter
    residual = tl.maximum(factor * p - q, 0.0)
    noise = token_exponential(request.seed, request.position, accepted, start, BLOCK)
    place = request.index * 2 * tiles + tile
    _store_winner(residual / noise, ids, score_ptr + place, winner_ptr + place)
    _store_winner(p / noise, ids, score_ptr + place + tiles, winner_ptr + place + tiles)


@triton.jit
def _store_winner(score, ids, score_ptr, winner_ptr):
    best = tl.max(score)
    tl.store(score_ptr, best)
    tl.store(winner_ptr, tl.min(tl.where(score == best, ids, NO_TOKEN)))


@triton.jit
def sample(
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
    cut_ptr,
    last_ptr,
    token_ptr,
    probs_ptr,
    stride_pb,
    stride_pk,
    stride_pu,
    ids_ptr,
    seed_ptr,
    position_ptr,
    accepted_ptr,
    score_ptr,
    winner_ptr,
    race_tiles,
    STEPS: tl.constexpr,
    TILES: tl.constexpr,
    KIND: tl.constexpr,
    FILTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Accept by the ratio rule (each tile of a request anew: that costs less than a launch), then race."""
    tile = tl.program_id(0) % race_tiles
    index = (tl.program_id(0) // race_tiles).to(tl.int64)
    target = Target(logits_ptr, stride_b, stride_q, stride_v, queries, vocab)
    stats = Stats(top_ptr, total_ptr, first_ptr, tiles, cut_ptr, last_ptr)
    draft = Draft(token_ptr, probs_ptr, stride_pb, stride_pk, stride_pu, ids_ptr)
    request = load_request(num_draft_ptr, temperature_ptr, seed_ptr, position_ptr, index, queries)
    p, q = token_chances(target, stats, draft, request, STEPS, TILES, KIND, FILTERED)
    step = tl.arange(0, STEPS)
    taken = accept_uniform(request.seed, request.position, step) * q < p
    accepted = tl.min(tl.where(taken, request.num_draft, tl.minimum(step, request.num_draft)))
    if tile == 0:
        tl.store(accepted_ptr + index, accepted)
    race(target, stats, draft, request, accepted, 1.0, score_ptr, winner_ptr, race_tiles, BLOCK, TILES, KIND, FILTERED)


@triton.jit
def finish(
    token_ptr,
    accepted_ptr,
    score_ptr,
    winner_ptr,
    output_ptr,
    mask_ptr,
    queries,
    race_tiles,
    QUERIES: tl.constexpr,
    TILES: tl.constexpr,
):
    """One request: the best of its tiles, by the residual if there is any; its output [Q] and accepted mask [K]."""
    index = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    place = index * 2 * race_tiles + tile
    inside = tile < race_tiles
    by_residual = tl.load(score_ptr + place, mask=inside, other=-1.0)
    start = tl.where(tl.max(by_residual) > 0.0, 0, race_tiles)
    score = tl.load(score_ptr + place + start, mask=inside, other=-1.0)
    winner = tl.load(winner_ptr + place + start, mask=inside, other=NO_TOKEN)
    own = tl.min(tl.where(score == tl.max(score), winner, NO_TOKEN)).to(tl.int64)
    accepted = tl.load(accepted_ptr + index)
    query = tl.arange(0, QUERIES)
    drafts = tl.load(token_ptr + index * (queries - 1) + query, mask=query < accepted, other=-1)
    output = tl.where(query == accepted, own, drafts)
    tl.store(output_ptr + index * queries + query, output, mask=query < queries)
    mask = (query < accepted).to(tl.int8)
    tl.store(mask_ptr + index * (queries - 1) + query, mask, mask=query < queries - 1)


POINTERS = {
    "num_draft_ptr": "*i64",
    "temperature_ptr": "*fp32",
    "top_k_ptr": "*i64",
    "top_p_ptr": "*fp32",
    "top_ptr": "*fp32",
    "total_ptr": "*fp32",
    "first_ptr": "*i32",
    "cut_ptr": "*fp32",
    "last_ptr": "*i32",
    "token_ptr": "*i64",
    "probs_ptr": "*fp32",
    "ids_ptr": "*i32",
    "seed_ptr": "*i64",
    "position_ptr": "*i64",
    "joint_ptr": "*fp32",
    "left_ptr": "*fp32",
    "accepted_ptr": "*i64",
    "score_ptr": "*fp32",
    "winner_ptr": "*i32",
    "output_ptr": "*i64",
    "mask_ptr": "*i1",
}
SIZES = dict.fromkeys(("queries", "vocab", "tiles", "race_tiles", "left_tiles"), "i32")
STRIDES = dict.fromkeys(("stride_b", "stride_q", "stride_v", "stride_pb", "stride_pk", "stride_pu"), "i32")
KINDS = {"one-hot": ONE_HOT, "dense": DENSE, "sparse": SPARSE}


def case(function: Any, what: str, num_warps: int = NUM_WARPS, logits: str = "bf16", **constants: int) -> CompileCase:
    """A kernel for contiguous logits of this type, 8 draft steps, 151936 tokens, draft probabilities in fp32."""
    types = POINTERS | SIZES | STRIDES | {"logits_ptr": f"*{logits}"}
    fixed = {"stride_v": 1, "stride_pu": 1, "STEPS": 8, "QUERIES": 16, "TILES": 32} | constants
    names = function.arg_names
    return CompileCase(
        name=f"{function.__name__} {what}",
        function=function,
        signature={name: types[name] for name in names if name not in fixed},
        constants={name: value for name, value in fixed.items() if name in names},
        num_warps=num_warps,
        aligned=tuple(
            name for name in names if name.endswith("_ptr") or name == "vocab" or name in STRIDES.keys() - fixed
        ),
    )


def compile_cases() -> list[CompileCase]:
    """Every kernel at its largest blocks."""
    cases = []
    for dtype, shift in KEY_SHIFT.items():
        logits = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
        cases.append(case(row_stats, logits, logits=logits, BLOCK=STATS_BLOCK))
        cases.append(case(row_cut, logits, logits=logits, BLOCK=CUT_BLOCK, SHIFT=shift))
    for name, kind in KINDS.items():
        cases.append(case(sample, name, KIND=kind.value, FILTERED=False, BLOCK=RACE_BLOCK))
        cases.append(case(sample, f"{name} cut", KIND=kind.value, FILTERED=True, BLOCK=RACE_BLOCK))
    cases.append(case(finish, "", num_warps=1, TILES=64))
    return cases
