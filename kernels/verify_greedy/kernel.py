"""Greedy verification in Triton: one pass over the logits, then a walk over what it found.

`find_largest` reads every logit once: a program takes one chunk of one query's vocabulary. `accept_prefix`, a program
for each request, joins the chunks and accepts.

Shapes: B requests, K draft steps, Q = K + 1 queries, V target vocabulary, S chunks of the vocabulary.
"""

import triton
import triton.language as tl
from drafthead.kernels.backend import CompileCase

CHUNK_BYTES = 16384
"""Logits that a program reads at once: 128 bytes a thread are in flight, enough programs fit on a multiprocessor."""
VECTOR_BYTES = 16
QUERY_BLOCK = 16
CHUNK_BLOCK = 32
LARGEST = tl.constexpr(0x7FFFFFFF)
SMALLEST = tl.constexpr(-0x80000000)


def chunk_of(vocab: int, itemsize: int) -> int:
    """How many logits a program reads."""
    return min(CHUNK_BYTES // itemsize, int(triton.next_power_of_2(max(vocab, VECTOR_BYTES // itemsize))))


def levels_of(itemsize: int) -> int:
    """Base 2 logarithm of how many logits a thread reads by one instruction."""
    return (VECTOR_BYTES // itemsize).bit_length() - 1


@triton.jit
def sortable(value):
    """An int32 for an fp32 that orders as torch's argmax does: -0 is 0, all NaN are equal and above infinity."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(value != value, LARGEST, key)


@triton.jit
def largest_of_group(value, GROUPS: tl.constexpr, LEVELS: tl.constexpr):
    """Maximum of each row of a [GROUPS, 2 ** LEVELS] tile, NaN where there is one.

    The elements of a row lie in one thread, so halving costs one instruction for each; the maximum that `tl.max` takes
    passes over NaN.
    """
    for level in tl.static_range(LEVELS):
        left, right = tl.split(tl.reshape(value, (GROUPS, 1 << (LEVELS - 1 - level), 2)))
        value = tl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL)
    return tl.reshape(value, (GROUPS,))


@triton.jit
def find_largest(
    logits_ptr,
    num_draft_ptr,
    key_ptr,
    id_ptr,
    queries,
    vocab,
    chunks,
    stride_b,
    stride_q,
    stride_v,
    stride_num,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """Sortable value and id of the largest logit of each chunk, [B, Q, S]; queries behind the draft are left out."""
    row = tl.program_id(0) // chunks
    chunk = tl.program_id(0) % chunks
    request = (row // queries).to(tl.int64)
    query = (row % queries).to(tl.int64)
    if query > tl.maximum(tl.load(num_draft_ptr + request * stride_num), 0):
        return
    GROUP: tl.constexpr = 1 << LEVELS
    GROUPS: tl.constexpr = CHUNK // GROUP
    start = chunk * CHUNK
    start_ptr = logits_ptr + request * stride_b + query * stride_q + start.to(tl.int64) * stride_v
    group = tl.arange(0, GROUPS)
    member = tl.arange(0, GROUP)
    offset = group[:, None] * GROUP + member[None, :]
    value = tl.load(start_ptr + offset.to(tl.int64) * stride_v, mask=start + offset < vocab, other=float("-inf"))
    key = sortable(largest_of_group(value.to(tl.float32), GROUPS, LEVELS))
    largest = tl.max(key, 0)
    # Where in its group the largest lies is cheaper to look up than to carry along
    offset = tl.min(tl.where(key == largest, group, GROUPS), 0) * GROUP + member
    value = tl.load(start_ptr + offset.to(tl.int64) * stride_v, mask=start + offset < vocab, other=float("-inf"))
    found = tl.min(tl.where(sortable(value.to(tl.float32)) == largest, offset, CHUNK), 0)
    place = row.to(tl.int64) * chunks + chunk
    tl.store(key_ptr + place, largest)
    tl.store(id_ptr + place, start + found)


@triton.jit
def accept_prefix(
    key_ptr,
    id_ptr,
    draft_ptr,
    num_draft_ptr,
    accepted_ptr,
    output_ptr,
    mask_ptr,
    queries,
    chunks,
    stride_draft_b,
    stride_draft_k,
    stride_num,
    QUERY_BLOCK: tl.constexpr,
    CHUNK_BLOCK: tl.constexpr,
):
    """Join the chunks of each query and accept up to the first draft token that is not the target's own."""
    request = tl.program_id(0).to(tl.int64)
    steps = queries - 1
    count = tl.minimum(tl.maximum(tl.load(num_draft_ptr + request * stride_num), 0), steps).to(tl.int32)
    accepted = count
    for first_query in range(0, queries, QUERY_BLOCK):
        query = first_query + tl.arange(0, QUERY_BLOCK)
        row = request * queries + query
        best = tl.full((QUERY_BLOCK,), SMALLEST, tl.int32)
        own = tl.full((QUERY_BLOCK,), 0, tl.int32)
        for first_chunk in range(0, chunks, CHUNK_BLOCK):
            chunk = first_chunk + tl.arange(0, CHUNK_BLOCK)
            place = row[:, None] * chunks + chunk[None, :]
            inside = (query <= count)[:, None] & (chunk < chunks)[None, :]
            key = tl.load(key_ptr + place, mask=inside, other=SMALLEST)
            token = tl.load(id_ptr + place, mask=inside, other=LARGEST)
            largest = tl.max(key, 1)
            lowest = tl.min(tl.where(key == largest[:, None], token, LARGEST), 1)
            own = tl.where(largest > best, lowest, own)
            best = tl.maximum(best, largest)
        place = request * stride_draft_b + query.to(tl.int64) * stride_draft_k
        draft = tl.load(draft_ptr + place, mask=query < count, other=-1)
        accepted = tl.minimum(accepted, tl.min(tl.where(draft == own, queries, query), 0))
        tl.store(output_ptr + row, tl.where(query <= accepted, own, -1), mask=query < queries)
        tl.store(mask_ptr + request * steps + query, query < accepted, mask=query < steps)
    tl.store(accepted_ptr + request, accepted)


def compile_cases() -> list[CompileCase]:
    """Both kernels as launched for a vocabulary of 151,936."""
    find = [
        CompileCase(
            name=f"find_largest {dtype}",
            function=find_largest,
            signature={
                "logits_ptr": f"*{dtype}",
                "num_draft_ptr": "*i64",
                "key_ptr": "*i32",
                "id_ptr": "*i32",
                "queries": "i32",
                "vocab": "i32",
                "chunks": "i32",
                "stride_b": "i64",
                "stride_q": "i64",
            },
            constants={
                "stride_v": 1,
                "stride_num": 1,
                "CHUNK": chunk_of(151936, itemsize),
                "LEVELS": levels_of(itemsize),
            },
            aligned=("logits_ptr", "num_draft_ptr", "key_ptr", "id_ptr", "vocab", "stride_b", "stride_q"),
        )
        for dtype, itemsize in (("bf16", 2), ("fp16", 2), ("fp32", 4))
    ]
    accept = CompileCase(
        name="accept_prefix",
        function=accept_prefix,
        signature={
            "key_ptr": "*i32",
            "id_ptr": "*i32",
            "draft_ptr": "*i64",
            "num_draft_ptr": "*i64",
            "accepted_ptr": "*i64",
            "output_ptr": "*i64",
            "mask_ptr": "*i1",
            "queries": "i32",
            "chunks": "i32",
            "stride_draft_b": "i64",
        },
        constants={
            "stride_draft_k": 1,
            "stride_num": 1,
            "QUERY_BLOCK": QUERY_BLOCK,
            "CHUNK_BLOCK": CHUNK_BLOCK,
        },
        num_warps=4,
    )
    return [*find, accept]
