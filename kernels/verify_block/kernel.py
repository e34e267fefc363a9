"""Kernels of block verification, around those of `verify_sampling`: what is left of p, and the joint acceptance.

`chain` follows the joint ratio P_i from draft token to draft token; `leftover` sums R_i over a tile of the vocabulary;
`sample_block` accepts by them and races.

Shapes: B requests, K draft steps, Q = K + 1 queries, S tiles of the vocabulary.
"""

import triton
import triton.language as tl
from drafthead.kernels.backend import CompileCase
from drafthead.kernels.philox_device import accept_uniform
from drafthead.kernels.verify_sampling.kernel import (
    KINDS,
    ONE_HOT,
    RACE_BLOCK,
    Draft,
    case,
    race,
    tile_chances,
    token_chances,
)
from drafthead.kernels.verify_sampling.row_kernel import Stats, Target, load_request

LEFTOVER_WARPS = 16
"""With 8 the top-k and top-p variant spills on sm_100."""


@triton.jit
def chain(
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
    joint_ptr,
    left_ptr,
    STEPS: tl.constexpr,
    TILES: tl.constexpr,
    KIND: tl.constexpr,
    FILTERED: tl.constexpr,
):
    """P_0 .. P_K of one request; for one-hot drafts R_i too, which is P_i less what the next draft token has of it."""
    index = tl.program_id(0).to(tl.int64)
    target = Target(logits_ptr, stride_b, stride_q, stride_v, queries, vocab)
    stats = Stats(top_ptr, total_ptr, first_ptr, tiles, cut_ptr, last_ptr)
    draft = Draft(token_ptr, probs_ptr, stride_pb, stride_pk, stride_pu, ids_ptr)
    request = load_request(num_draft_ptr, temperature_ptr, seed_ptr, position_ptr, index, queries)
    p_N, q_N = token_chances(target, stats, draft, request, STEPS, TILES, KIND, FILTERED)
    step_N = tl.arange(0, STEPS)
    joint = 1.0
    tl.store(joint_ptr + index * queries, joint)
    for step in range(request.num_draft):
        p = tl.sum(tl.where(step_N == step, p_N, 0.0))
        q = tl.sum(tl.where(step_N == step, q_N, 0.0))
        if KIND == ONE_HOT:
            tl.store(left_ptr + index * (queries - 1) + step, joint * (1.0 - p))
        reached = joint * p
        # a token that q cannot give is certain if p can give it, and impossible otherwise
        certain = tl.where(reached > 0.0, 1.0, 0.0)
        joint = tl.where(reached >= q, certain, reached / tl.where(reached >= q, 1.0, q))
        tl.store(joint_ptr + index * queries + step + 1, joint)


@triton.jit
def leftover(
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
    joint_ptr,
    left_ptr,
    left_tiles,
    STEPS: tl.constexpr,
    TILES: tl.constexpr,
    KIND: tl.constexpr,
    FILTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One tile of R_i = sum of max(P_i p - q, 0), for the step i of a request, as [B, K, S]."""
    tile = tl.program_id(0) % left_tiles
    place = (tl.program_id(0) // left_tiles).to(tl.int64)
    index, step = place // (queries - 1), place % (queries - 1)
    request = load_request(num_draft_ptr, temperature_ptr, seed_ptr, position_ptr, index, queries)
    if (step == 0) | (step >= request.num_draft):
        return
    target = Target(logits_ptr, stride_b, stride_q, stride_v, queries, vocab)
    stats = Stats(top_ptr, total_ptr, first_ptr, tiles, cut_ptr, last_ptr)
    draft = Draft(token_ptr, probs_ptr, stride_pb, stride_pk, stride_pu, ids_ptr)
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    p, q = tile_chances(target, stats, draft, request, step, ids, TILES, KIND, FILTERED)
    joint = tl.load(joint_ptr + index * queries + step)
    tl.store(left_ptr + place * left_tiles + tile, tl.sum(tl.maximum(joint * p - q, 0.0)))


@triton.jit
def sample_block(
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
    joint_ptr,
    left_ptr,
    left_tiles,
    accepted_ptr,
    score_ptr,
    winner_ptr,
    race_tiles,
    STEPS: tl.constexpr,
    TILES: tl.constexpr,
    LEFT_TILES: tl.constexpr,
    KIND: tl.constexpr,
    FILTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Accept up to the last i with u_i < h_i, then race for the token behind."""
    index = (tl.program_id(0) // race_tiles).to(tl.int64)
    target = Target(logits_ptr, stride_b, stride_q, stride_v, queries, vocab)
    stats = Stats(top_ptr, total_ptr, first_ptr, tiles, cut_ptr, last_ptr)
    draft = Draft(token_ptr, probs_ptr, stride_pb, stride_pk, stride_pu, ids_ptr)
    request = load_request(num_draft_ptr, temperature_ptr, seed_ptr, position_ptr, index, queries)
    step = tl.arange(0, STEPS)
    count = step + 1
    tile = tl.arange(0, LEFT_TILES)[None, :]
    place = (index * (queries - 1) + count)[:, None] * left_tiles + tile
    before_last = count < request.num_draft
    left = tl.sum(tl.load(left_ptr + place, mask=before_last[:, None] & (tile < left_tiles), other=0.0), 1)
    joint = tl.load(joint_ptr + index * queries + count, mask=count <= request.num_draft, other=0.0)
    short = 1.0 - joint
    h = tl.where(short > 0.0, left / tl.where(short > 0.0, left + short, 1.0), 1.0)
    h = tl.where(before_last, h, joint)
    taken = (count <= request.num_draft) & (accept_uniform(request.seed, request.position, step) < h)
    accepted = tl.max(tl.where(taken, count, 0))
    if tl.program_id(0) % race_tiles == 0:
        tl.store(accepted_ptr + index, accepted)
    # a small factor would only lose digits where no draft probability is taken off
    mask = accepted < request.num_draft
    factor = tl.load(joint_ptr + index * queries + accepted, mask=mask, other=1.0)
    race(
        target, stats, draft, request, accepted, factor, score_ptr, winner_ptr, race_tiles, BLOCK, TILES, KIND, FILTERED
    )


def compile_cases() -> list[CompileCase]:
    """Every kernel of its own at its largest blocks; `row_stats`, `row_cut` and `finish` are `verify_sampling`'s."""
    cases = []
    for name, kind in KINDS.items():
        for filtered in (False, True):
            what = f"{name} cut" if filtered else name
            constants = {"KIND": kind.value, "FILTERED": filtered}
            cases.append(case(chain, what, num_warps=1, **constants))
            cases.append(case(sample_block, what, BLOCK=RACE_BLOCK, LEFT_TILES=64, **constants))
            if kind != ONE_HOT:
                cases.append(case(leftover, what, num_warps=LEFTOVER_WARPS, BLOCK=RACE_BLOCK, **constants))
    return cases
