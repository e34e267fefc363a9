"""Attention of the training-time test over packed documents, without a T x T x S mask.

The query of slot t sees the step-0 keys of its own document up to slot t, and of each later step only its own column:
exactly the keys that a served draft holds in its cache at that step. Two ways to compute it:

    by_document    one document after the other, its scores written out; the reference, and the faster one on a CPU
    all_at_once    all documents in one FlexAttention kernel over a block mask of T / 128 x T / 128; for CUDA

The second attends to the step-0 keys alone and takes the own columns in by the kernel's log-sum-exp: with base_T the
step-0 scores and own_S the others,

    softmax(cat[base_T, own_S]) @ cat[values] = sum_i w_i * [flex(base), own values]_i,  w = softmax([lse(base), own_S])

Shapes: T packed tokens of a micro batch, R the rows (slots) that are computed, H heads, G key-value heads, N heads of a
group, P head dim, S training-time-test steps after the first, B blocks of `BLOCK` rows, C such blocks of tokens.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

BLOCK = 128
"""FlexAttention's block of queries and of keys."""
SMALLEST_HEAD = 16
"""Channels of a head below which FlexAttention has no CUDA kernel."""
KeysValues = tuple[Tensor, Tensor]
Documents = Sequence[tuple[int, int]]


def unroll_attention(
    query_RHP: Tensor, base: KeysValues, own: Sequence[KeysValues], documents: Documents, row_T: Tensor
) -> Tensor:
    """Attention of one step, by the way that suits the device.

    Args:
        query_RHP: Queries of the slots `row_T`, in ascending order.
        base: Step-0 keys and values [T, G, P] of all slots; values may have another size than keys.
        own: Keys and values [R, G, P] of the steps after 0, each for the same rows as the queries.
        documents: (start, length) of each document in the pack.
        row_T: Slot index of each query [R], ascending.

    Returns:
        [R, H * P].
    """
    if query_RHP.device.type == "cpu":
        # small bf16 products of ever new shapes cost more to compile than to compute
        with torch.autocast("cpu", enabled=False):
            wide = [(keys.float(), values.float()) for keys, values in (base, *own)]
            mixed = by_document(query_RHP.float(), wide[0], wide[1:], documents, row_T)
        return mixed.to(query_RHP.dtype)
    sizes = (query_RHP.shape[1], base[0].shape[1], query_RHP.shape[2], base[1].shape[2])
    attend = all_at_once if flex_agrees(query_RHP.device, query_RHP.dtype, sizes) else by_document
    return attend(query_RHP, base, own, documents, row_T)


def by_document(
    query_RHP: Tensor,
    base: tuple[Tensor, Tensor],
    own: Sequence[tuple[Tensor, Tensor]],
    documents: Sequence[tuple[int, int]],
    row_T: Tensor,
) -> Tensor:
    """The reference: documents are separate matrix products, so nothing can leak between them."""
    heads, size = query_RHP.shape[1:]
    groups = base[0].shape[1]
    grouped = query_RHP.unflatten(1, (groups, heads // groups)) * size**-0.5
    own_scores = [torch.einsum("rgnp,rgp->rgn", grouped, keys) for keys, _ in own]
    edges = torch.searchsorted(row_T, torch.tensor([start for start, _ in documents], device=row_T.device))
    bounds = [*edges.tolist(), row_T.shape[0]]
    outputs = []
    for (start, length), first, last in zip(documents, bounds, bounds[1:], strict=False):
        if first == last:
            continue
        keys, values = (tensor[start : start + length] for tensor in base)
        scores = torch.einsum("rgnp,tgp->gnrt", grouped[first:last], keys)
        position = row_T[first:last] - start
        future = torch.arange(length, device=row_T.device) > position[:, None]
        scores = scores.masked_fill(future, float("-inf"))
        columns = [score[first:last].permute(1, 2, 0)[..., None] for score in own_scores]
        weights = torch.cat([scores, *columns], -1).softmax(-1, dtype=torch.float32).to(values.dtype)
        output = torch.einsum("gnrt,tgp->rgnp", weights[..., :length], values)
        for step, (_, own_values) in enumerate(own):
            column = weights[..., length + step].permute(2, 0, 1)[..., None]
            output = output + column * own_values[first:last, :, None]
        outputs.append(output)
    # no rows at all still pass through every module: ZeRO-3 gathers weights on all ranks at the same call
    return torch.cat(outputs or [grouped[:0, ..., :1].expand(-1, -1, -1, base[1].shape[-1])]).flatten(1)


# ---- all documents in one kernel -------------------------------------------------------------------------


def all_at_once(
    query_RHP: Tensor, base: KeysValues, own: Sequence[KeysValues], documents: Documents, row_T: Tensor
) -> Tensor:
    """The same by FlexAttention, with gradients on CUDA only; arguments as `unroll_attention`'s."""
    from torch.nn.attention.flex_attention import AuxRequest

    if not len(row_T):
        return by_document(query_RHP, base, own, documents, row_T)
    keys, values = (tensor.to(query_RHP.dtype).transpose(0, 1)[None] for tensor in base)
    mask = document_blocks(documents, row_T, len(base[0]))
    mixed_1HRP, aux = _flex(query_RHP.device.type)(
        query_RHP.transpose(0, 1)[None],
        keys,
        values,
        block_mask=mask,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )
    return with_own_columns(mixed_1HRP[0].transpose(0, 1), aux.lse[0].T, query_RHP, own).flatten(1)


def with_own_columns(mixed_RHP: Tensor, lse_RH: Tensor, query_RHP: Tensor, own: Sequence[KeysValues]) -> Tensor:
    """Attention over the step-0 keys, its log-sum-exp of scores, and the own columns as one softmax [R, H, P]."""
    if not own:
        return mixed_RHP
    repeat = query_RHP.shape[1] // own[0][0].shape[1]
    with torch.autocast(query_RHP.device.type, enabled=False):  # the log-sum-exp is fp32, so must be what joins it
        keys_SRHP, values_SRHP = (
            torch.stack([pair[which] for pair in own]).repeat_interleave(repeat, 2).float() for which in (0, 1)
        )
        scores_RHS = torch.einsum("rhp,srhp->rhs", query_RHP.float(), keys_SRHP) * query_RHP.shape[-1] ** -0.5
        weights_RHX = torch.cat([lse_RH.float()[..., None], scores_RHS], -1).softmax(-1)
        columns_RHP = torch.einsum("rhs,srhp->rhp", weights_RHX[..., 1:], values_SRHP)
        return (weights_RHX[..., :1] * mixed_RHP.float() + columns_RHP).to(mixed_RHP.dtype)


def document_blocks(documents: Documents, row_T: Tensor, num_tokens: int) -> Any:
    """FlexAttention's block mask for queries at the slots `row_T` over the tokens of their own documents so far.

    Rows ascend and documents lie side by side, so the blocks that a block of rows sees are a range: from the start of
    its first row's document to the slot of its last row. Nothing of size R x T is made.
    """
    from torch.nn.attention.flex_attention import BlockMask

    device = row_T.device
    start_N = torch.tensor([start for start, _ in documents], device=device)
    start_R = start_N[torch.searchsorted(start_N, row_T, right=True) - 1]
    count, num_blocks = len(row_T), -(-num_tokens // BLOCK)
    first_row_B = torch.arange(0, count, BLOCK, device=device)
    last_row_B = (first_row_B + BLOCK - 1).clamp_max(count - 1)
    first_B, last_B = start_R[first_row_B] // BLOCK, row_T[last_row_B] // BLOCK
    # behind the range the indices mean nothing, but must be blocks
    index_BC = (first_B[:, None] + torch.arange(num_blocks, device=device)).remainder(num_blocks)

    def sees(batch: Tensor, head: Tensor, row: Tensor, token: Tensor) -> Tensor:
        return (token >= start_R[row]) & (token <= row_T[row])

    return BlockMask.from_kv_blocks(
        (last_B - first_B + 1).int()[None, None],
        index_BC.int()[None, None],
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(count, num_tokens),
    )


@functools.cache
def _flex(device: str) -> Callable[..., Any]:
    """Compiled on CUDA; elsewhere as it is, which serves tests."""
    from torch.nn.attention.flex_attention import flex_attention

    attend: Callable[..., Any] = flex_attention
    return torch.compile(attend, dynamic=True) if device == "cuda" else attend


@functools.cache
def flex_agrees(device: torch.device, dtype: torch.dtype, sizes: tuple[int, int, int, int]) -> bool:
    """Whether FlexAttention can be had here for heads of these sizes and equals the reference.

    Tried once a process on two small documents, forward and backward; what was chosen goes to stderr. The sizes are H,
    G, P of keys and P of values.
    """
    heads, _, size, value_size = sizes
    what = f"attention in training on {device}, {dtype}, {heads} heads of {size}"
    if min(size, value_size) < SMALLEST_HEAD:
        print(f"{what}: document by document", file=sys.stderr)
        return False
    try:
        difference = _difference_from_reference(device, dtype, sizes)
    except (RuntimeError, ValueError, ImportError) as error:  # no kernel for this device or these sizes
        first = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
        print(f"{what}: document by document, since FlexAttention fails here ({first})", file=sys.stderr)
        return False
    agrees = difference <= (2e-2 if dtype in (torch.bfloat16, torch.float16) else 2e-3)
    chosen = "FlexAttention" if agrees else "document by document, since FlexAttention differs from it"
    print(f"{what}: {chosen} (largest relative difference {difference:.1g})", file=sys.stderr)
    return agrees


def _difference_from_reference(device: torch.device, dtype: torch.dtype, sizes: tuple[int, int, int, int]) -> float:
    """Largest difference of outputs and gradients, relative to their size, over two documents of 150 tokens."""
    heads, groups, size, value_size = sizes
    documents, row_T = [(0, 150), (150, 150)], torch.arange(20, 290, 3, device=device)
    generator = torch.Generator(device).manual_seed(0)

    def random(rows: int, number: int, width: int) -> Tensor:
        return torch.randn(rows, number, width, generator=generator, device=device).to(dtype).requires_grad_()

    query = random(len(row_T), heads, size)
    pairs = [(random(rows, groups, size), random(rows, groups, value_size)) for rows in (300, len(row_T))]
    leaves = [query, *(tensor for pair in pairs for tensor in pair)]
    weight = torch.randn(len(row_T), heads * value_size, generator=generator, device=device)
    found = []
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        for attend in (all_at_once, by_document):
            mixed = attend(query, pairs[0], pairs[1:], documents, row_T)
            found.append([mixed, *torch.autograd.grad((mixed.float() * weight).sum(), leaves)])
    return max(
        float((one.float() - other.float()).norm() / other.float().norm()) for one, other in zip(*found, strict=True)
    )
