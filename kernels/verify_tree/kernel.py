"""Walks through a draft tree in Triton: greedily over argmax ids, or by multi-round sampling; then the race at its end.

The statistics of all rows come from kernels of the chain (`verify_greedy.kernel.find_largest`,
`verify_sampling.row_kernel.row_stats`), in one pass over the logits. A walk is one program per request. By sampling it
keeps no probabilities of the row it stands in: after children x_1 .. x_i were refused the target's are, up to a factor,

    w(v) = max(p(v) - shift q(v), 0),    shift = sum over refused j of mass_j / left_j

where mass_j is the sum of w and left_j that of q without the children before j. (A refused x_j has w = 0, so that q
need not lose it in w.) Children that q gives with certainty are zeroed in p one by one; there mass is 1 - sum p(x_j).

Shapes: B requests, N draft nodes, M = N + 1 rows, V target vocabulary, U draft vocabulary, S tiles of a row.
"""

from typing import Any

import triton
import triton.language as tl
from drafthead.kernels.backend import CompileCase
from drafthead.kernels.philox_device import ACCEPT, four_words, to_uniform, token_exponential
from drafthead.kernels.verify_greedy.kernel import LARGEST, SMALLEST
from drafthead.kernels.verify_sampling.kernel import (
    KINDS,
    NUM_WARPS,
    ONE_HOT,
    POINTERS,
    RACE_BLOCK,
    SIZES,
    STRIDES,
    Draft,
    draft_chance,
    tile_chances,
)
from drafthead.kernels.verify_sampling.kernel import _store_winner as store_winner
from drafthead.kernels.verify_sampling.row_kernel import Stats, Target, clean, load_request, row_law, target_chance

WALK_WARPS = 4
MASS_BLOCK = 2048
CHUNK_BLOCK = 32
NO_NODE = tl.constexpr(-2)


@triton.jit
def follow_largest(
    key_ptr,
    id_ptr,
    token_ptr,
    parent_ptr,
    num_draft_ptr,
    accepted_ptr,
    output_ptr,
    path_ptr,
    nodes,
    chunks,
    NODES: tl.constexpr,
    CHUNK_BLOCK: tl.constexpr,
):
    """One request's greedy walk; `key_ptr` and `id_ptr` [B, M, S] hold the largest logit of each chunk of a row."""
    index = tl.program_id(0).to(tl.int64)
    node, token, parent = _tree(token_ptr, parent_ptr, num_draft_ptr, index, nodes, NODES)
    row = tl.full((), 0, tl.int32)
    accepted = tl.full((), 0, tl.int32)
    walking = True
    while walking:
        own = _join_chunks(key_ptr, id_ptr, index * (nodes + 1) + row, chunks, CHUNK_BLOCK)
        tl.store(output_ptr + index * (nodes + 1) + accepted, own.to(tl.int64))
        child = tl.min(tl.where((parent + 1 == row) & (token == own) & (node >= row), node, NODES))
        walking = child < NODES
        if walking:
            tl.store(path_ptr + index * nodes + accepted, child.to(tl.int64))
            accepted += 1
            row = child + 1
    tl.store(accepted_ptr + index, accepted.to(tl.int64))
    tl.store(path_ptr + index * nodes + node, -1, mask=(node >= accepted) & (node < nodes))
    tl.store(output_ptr + index * (nodes + 1) + node + 1, -1, mask=(node >= accepted) & (node < nodes))


@triton.jit
def _tree(token_ptr, parent_ptr, num_draft_ptr, index, nodes, NODES: tl.constexpr):
    """Node ids, draft tokens and parents of one request's tree, padded."""
    node = tl.arange(0, NODES)
    mask = node < tl.load(num_draft_ptr + index)
    token = tl.load(token_ptr + index * nodes + node, mask=mask, other=-1)
    parent = tl.load(parent_ptr + index * nodes + node, mask=mask, other=NO_NODE)
    return node, token, parent


@triton.jit
def _join_chunks(key_ptr, id_ptr, row, chunks, CHUNK_BLOCK: tl.constexpr):
    """The lowest id of the largest logit of a row."""
    best = tl.full((), SMALLEST, tl.int32)
    own = tl.full((), 0, tl.int32)
    for first in range(0, chunks, CHUNK_BLOCK):
        chunk = first + tl.arange(0, CHUNK_BLOCK)
        key = tl.load(key_ptr + row * chunks + chunk, mask=chunk < chunks, other=SMALLEST)
        ids = tl.load(id_ptr + row * chunks + chunk, mask=chunk < chunks, other=LARGEST)
        largest = tl.max(key)
        own = tl.where(largest > best, tl.min(tl.where(key == largest, ids, LARGEST)), own)
        best = tl.maximum(best, largest)
    return own


@triton.jit
def accept_children(
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
    parent_ptr,
    accepted_ptr,
    path_ptr,
    taken_ptr,
    row_ptr,
    shift_ptr,
    STEPS: tl.constexpr,
    TILES: tl.constexpr,
    KIND: tl.constexpr,
    FILTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One request's walk by sampling: accepted nodes and their tokens [N], the row where it ends, the shift there."""
    index = tl.program_id(0).to(tl.int64)
    target = Target(logits_ptr, stride_b, stride_q, stride_v, queries, vocab)
    stats = Stats(top_ptr, total_ptr, first_ptr, tiles, cut_ptr, last_ptr)
    draft = Draft(token_ptr, probs_ptr, stride_pb, stride_pk, stride_pu, ids_ptr)
    request = load_request(num_draft_ptr, temperature_ptr, seed_ptr, position_ptr, index, queries)
    nodes = queries - 1
    node, token, parent = _tree(token_ptr, parent_ptr, num_draft_ptr, index, nodes, STEPS)
    p, q = _node_chances(target, stats, draft, request, token, parent, TILES, KIND, FILTERED)
    row = tl.full((), 0, tl.int64)
    accepted = tl.full((), 0, tl.int32)
    tried = tl.full((), 0, tl.int32)
    shift, mass, left = 0.0, 1.0, 1.0
    gone = tl.full((), 0.0, tl.float64)
    for child in range(0, request.num_draft):
        if tl.load(parent_ptr + index * nodes + child) + 1 == row:
            own = tl.load(token_ptr + index * nodes + child)
            again = tl.max(((parent + 1 == row) & (token == own) & (node < child)).to(tl.int32))
            p_of_own = tl.sum(tl.where((node == child) & (again == 0), p, 0.0))
            q_of_own = tl.sum(tl.where((node == child) & (again == 0), q, 0.0))
            if KIND != ONE_HOT:  # noqa: SIM102  # decided when compiled
                if gone > 0.0:
                    mass, left = _masses(
                        target, stats, draft, request, row, shift, gone, q_of_own, TILES, KIND, FILTERED, BLOCK
                    )
            weight = tl.maximum(p_of_own - shift * q_of_own, 0.0)
            if _sibling_uniform(request, accepted, tried) * mass * q_of_own < weight * left:
                tl.store(path_ptr + index * nodes + accepted, child)
                tl.store(taken_ptr + index * nodes + accepted, own)
                row = tl.cast(child, tl.int64) + 1
                accepted += 1
                tried = tl.full((), 0, tl.int32)
                shift, mass, left = 0.0, 1.0, 1.0
                gone = tl.full((), 0.0, tl.float64)
            else:
                tried += 1
                if KIND == ONE_HOT:
                    mass -= weight
                else:
                    shift += tl.where(q_of_own > 0.0, mass / left, 0.0)
                    gone += q_of_own.to(tl.float64)
    tl.store(accepted_ptr + index, accepted.to(tl.int64))
    tl.store(row_ptr + index, row)
    tl.store(shift_ptr + index, shift)
    tl.store(path_ptr + index * nodes + node, -1, mask=(node >= accepted) & (node < nodes))


@triton.jit
def _node_chances(
    target, stats, draft, request, token, parent, TILES: tl.constexpr, KIND: tl.constexpr, FILTERED: tl.constexpr
):
    """Target and draft probability of each node's token after its parent; 0 for padding and outside the vocabulary."""
    real = (parent > NO_NODE) & (token >= 0) & (token < target.vocab)
    row = tl.where(real, parent + 1, 0)
    law = row_law(stats, request.index * target.queries + row, real, request.temperature, TILES, FILTERED)
    place = request.index * target.stride_b + row * target.stride_q + token * target.stride_v
    logit = clean(tl.load(target.ptr + place, mask=real, other=-float("inf")))
    p = tl.where(real, target_chance(law, logit, token, request.temperature), 0.0)
    return p, draft_chance(draft, request.index, row, token, token, real, KIND)


@triton.jit
def _masses(
    target,
    stats,
    draft,
    request,
    row,
    shift,
    gone,
    at_least,
    TILES: tl.constexpr,
    KIND: tl.constexpr,
    FILTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum of w, and sum of q without the children that are gone."""
    mass = 0.0
    # what is left of q may be a tiny part of it
    whole = tl.full((), 0.0, tl.float64)
    for start in range(0, target.vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        p, q = tile_chances(target, stats, draft, request, row, ids, TILES, KIND, FILTERED)
        mass += tl.sum(tl.maximum(p - shift * q, 0.0))
        whole += tl.sum(q.to(tl.float64))
    return mass, tl.maximum((whole - gone).to(tl.float32), at_least)


@triton.jit
def _sibling_uniform(request, step, tried):
    """The number that the next child is accepted with: for the first child that of a chain."""
    a, b, c, d = four_words(request.seed, request.position, step.to(tl.int64), ACCEPT, tried // 4)
    word = tl.where(tried % 4 < 2, tl.where(tried % 4 == 0, a, b), tl.where(tried % 4 == 2, c, d))
    return to_uniform(word)


@triton.jit
def race_for_rest(
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
    parent_ptr,
    accepted_ptr,
    row_ptr,
    shift_ptr,
    score_ptr,
    winner_ptr,
    race_tiles,
    STEPS: tl.constexpr,
    TILES: tl.constexpr,
    KIND: tl.constexpr,
    FILTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """This tile's winners by w and by p in the row where the walk ended, laid out as by `verify_sampling`'s race."""
    tile = tl.program_id(0) % race_tiles
    index = (tl.program_id(0) // race_tiles).to(tl.int64)
    target = Target(logits_ptr, stride_b, stride_q, stride_v, queries, vocab)
    stats = Stats(top_ptr, total_ptr, first_ptr, tiles, cut_ptr, last_ptr)
    draft = Draft(token_ptr, probs_ptr, stride_pb, stride_pk, stride_pu, ids_ptr)
    request = load_request(num_draft_ptr, temperature_ptr, seed_ptr, position_ptr, index, queries)
    row = tl.load(row_ptr + index)
    start = tile * BLOCK
    ids = start + tl.arange(0, BLOCK)
    p, q = tile_chances(target, stats, draft, request, row, ids, TILES, KIND, FILTERED)
    rest = tl.maximum(p - tl.load(shift_ptr + index) * q, 0.0)
    tree = index * (queries - 1)
    for child in range(row, request.num_draft):
        if tl.load(parent_ptr + tree + child) + 1 == row:
            rest = tl.where(ids == tl.load(token_ptr + tree + child), 0.0, rest)
    noise = token_exponential(request.seed, request.position, tl.load(accepted_ptr + index), start, BLOCK)
    place = index * 2 * race_tiles + tile
    store_winner(rest / noise, ids, score_ptr + place, winner_ptr + place)
    store_winner(p / noise, ids, score_ptr + place + race_tiles, winner_ptr + place + race_tiles)


TREE_TYPES = {
    "key_ptr": "*i32",
    "id_ptr": "*i32",
    "parent_ptr": "*i64",
    "path_ptr": "*i64",
    "taken_ptr": "*i64",
    "row_ptr": "*i64",
    "shift_ptr": "*fp32",
    "nodes": "i32",
    "chunks": "i32",
}


def compile_cases() -> list[CompileCase]:
    """The walks and the race for 60 nodes, bf16 logits, a vocabulary of 151936 and fp32 draft probabilities."""
    cases = [_case(follow_largest, "", num_warps=1, NODES=64, CHUNK_BLOCK=CHUNK_BLOCK)]
    for name, kind in KINDS.items():
        for what, filtered in ((name, False), (f"{name} cut", True)):
            constants = {"KIND": kind.value, "FILTERED": filtered, "STEPS": 64, "TILES": 32}
            cases.append(_case(accept_children, what, num_warps=WALK_WARPS, BLOCK=MASS_BLOCK, **constants))
            cases.append(_case(race_for_rest, what, num_warps=NUM_WARPS, BLOCK=RACE_BLOCK, **constants))
    return cases


def _case(function: Any, what: str, num_warps: int, **constants: int) -> CompileCase:
    types = POINTERS | SIZES | STRIDES | TREE_TYPES | {"logits_ptr": "*bf16"}
    fixed = constants | {name: 1 for name in ("stride_v", "stride_pu") if name in function.arg_names}
    names = [name for name in function.arg_names if name not in fixed]
    return CompileCase(
        name=f"{function.__name__} {what}".rstrip(),
        function=function,
        signature={name: types[name] for name in names},
        constants=fixed,
        num_warps=num_warps,
        aligned=tuple(name for name in names if name.endswith("_ptr") or name == "vocab" or name in STRIDES),
    )
