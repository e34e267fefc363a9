"""Public attention of the rows of a draft tree: checks and launch."""

import math

import torch
from drafthead.kernels.backend import runs_triton
from drafthead.kernels.tree_attention import reference
from torch import Tensor

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def tree_attention(
    query_BMHP: Tensor,
    cache: tuple[Tensor, Tensor],
    length_B: Tensor,
    tree: tuple[Tensor, Tensor],
    visible_BMM: Tensor,
    scale: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """See `reference.tree_attention`; the rows of an accepted path go to the cache afterwards, at their positions.

    Args:
        query_BMHP: Queries of all rows, H a multiple of G.
        cache: Keys and values [B, L, G, P] by position, read where they lie if P is contiguous.
        length_B: Cached positions in front of the root, int64, at most L.
        tree: Keys and values [B, M, G, P] of the rows.
        visible_BMM: bool, from `verify_tree.structure.tree_visibility`.
        scale: Factor of the scores; P ** -0.5 by default.
        impl: See `backend.runs_triton`.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit together, or a head dim over 256 on the Triton path.
    """
    _check(query_BMHP, cache, length_B, tree, visible_BMM)
    scale = query_BMHP.shape[-1] ** -0.5 if scale is None else scale
    if not runs_triton(impl, query_BMHP):
        return reference.tree_attention(query_BMHP, cache, length_B, tree, visible_BMM, scale)
    if query_BMHP.dtype == torch.bfloat16 and not query_BMHP.is_cuda:
        # Triton 3.9's interpreter multiplies the bits of bf16 numbers, and cuts them off where it should round
        wide_cache, wide_tree = ((keys.float(), values.float()) for keys, values in (cache, tree))
        output_BMHP = _launch(query_BMHP.float(), wide_cache, length_B, wide_tree, visible_BMM, scale)
        return output_BMHP.to(query_BMHP.dtype)
    with torch.cuda.device_of(query_BMHP):
        return _launch(query_BMHP, cache, length_B, tree, visible_BMM, scale)


def _check(
    query_BMHP: Tensor,
    cache: tuple[Tensor, Tensor],
    length_B: Tensor,
    tree: tuple[Tensor, Tensor],
    visible_BMM: Tensor,
) -> None:
    if query_BMHP.dim() != 4 or cache[0].dim() != 4:
        raise ValueError(
            f"query {tuple(query_BMHP.shape)}, cache {tuple(cache[0].shape)}: need [B, M, H, P], [B, L, G, P]"
        )
    batch, rows, heads, size = query_BMHP.shape
    slots, groups = cache[0].shape[1:3]
    fits = all(part.shape == (batch, slots, groups, size) for part in cache)
    fits = fits and all(part.shape == (batch, rows, groups, size) for part in tree)
    if not fits or length_B.shape != (batch,) or visible_BMM.shape != (batch, rows, rows):
        raise ValueError(
            f"shapes do not fit: query {tuple(query_BMHP.shape)}, cache {[tuple(part.shape) for part in cache]}, "
            f"lengths {tuple(length_B.shape)}, tree {[tuple(part.shape) for part in tree]}, "
            f"visible {tuple(visible_BMM.shape)}"
        )
    if groups == 0 or heads % groups:
        raise ValueError(f"{heads} heads: not a multiple of {groups} kv heads")
    if visible_BMM.dtype != torch.bool or length_B.dtype != torch.long:
        raise ValueError(f"visible {visible_BMM.dtype}, lengths {length_B.dtype}: need torch.bool, torch.int64")
    parts = (query_BMHP, *cache, *tree)
    if len({part.dtype for part in parts}) > 1:
        raise ValueError(f"dtypes differ: {', '.join(str(part.dtype) for part in parts)}")
    if len({part.device for part in (*parts, length_B, visible_BMM)}) > 1:
        raise ValueError("query, cache, lengths, tree and visibility lie on different devices")


def _launch(
    query_BMHP: Tensor,
    cache: tuple[Tensor, Tensor],
    length_B: Tensor,
    tree: tuple[Tensor, Tensor],
    visible_BMM: Tensor,
    scale: float,
) -> Tensor:
    # Triton takes half a second to import and does not exist everywhere
    import triton
    from drafthead.kernels.tree_attention import kernel

    batch, rows, heads, size = query_BMHP.shape
    slots, groups = cache[0].shape[1:3]
    if query_BMHP.dtype not in DTYPES or size > 256:
        raise ValueError(f"{query_BMHP.dtype}, head dim {size}: the kernel takes bf16, fp16 or fp32 and at most 256")
    output_BMHP = torch.empty(query_BMHP.shape, dtype=query_BMHP.dtype, device=query_BMHP.device)
    if output_BMHP.numel() == 0:
        return output_BMHP
    query_BMHP, visible_BMM, length_B = query_BMHP.contiguous(), visible_BMM.contiguous(), length_B.contiguous()
    group_rows, num_splits = rows * heads // groups, triton.cdiv(slots, kernel.SPLIT)
    partial, top, total = (
        torch.empty(batch * groups * group_rows, num_splits + 1, width, dtype=torch.float32, device=query_BMHP.device)
        for width in (size, 1, 1)
    )
    sizes = (rows, groups, heads // groups, size, slots)
    settings = kernel.settings(DTYPES[query_BMHP.dtype], group_rows, size)
    tiles = batch * groups * triton.cdiv(group_rows, settings["BLOCK_R"])
    for pair, in_tree in ((cache, False), (tree, True)):
        # read where they lie
        keys, values = (part if part.stride(-1) == 1 else part.contiguous() for part in pair)
        kernel.split_kernel[(tiles, 1 if in_tree else num_splits)](
            query_BMHP,
            keys,
            values,
            length_B,
            visible_BMM,
            partial,
            top,
            total,
            scale * math.log2(math.e),
            *sizes,
            *keys.stride()[:3],
            *values.stride()[:3],
            IN_TREE=in_tree,
            SPLIT=kernel.SPLIT,
            **settings,
        )
    kernel.combine_kernel[(batch * groups * triton.cdiv(group_rows, kernel.COMBINED_ROWS),)](
        partial,
        top,
        total,
        length_B,
        visible_BMM,
        output_BMHP,
        *sizes,
        SPLIT=kernel.SPLIT,
        BLOCK_R=kernel.COMBINED_ROWS,
        BLOCK_P=settings["BLOCK_P"],
        num_warps=kernel.COMBINE_WARPS,
    )
    return output_BMHP
