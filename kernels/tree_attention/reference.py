"""Attention of the rows of a draft tree over a cached prefix and their own ancestors, the definition.

Shapes: B requests, M rows of the tree (row 0 the root), H heads, G kv heads, J = H / G heads of a kv head, P head dim,
L cache slots.
"""

import torch
from torch import Tensor


def tree_attention(
    query_BMHP: Tensor,
    cache: tuple[Tensor, Tensor],
    length_B: Tensor,
    tree: tuple[Tensor, Tensor],
    visible_BMM: Tensor,
    scale: float,
) -> Tensor:
    """softmax(scale * query . key) @ value over the first `length_B` cache slots and the visible rows of the tree.

    Half precision is computed in fp32, float64 as it is.

    Args:
        query_BMHP: Queries of all rows.
        cache: Keys and values [B, L, G, P] by position; slots from `length_B` on hold anything, NaN too.
        length_B: Cached positions in front of the root.
        tree: Keys and values [B, M, G, P] of the rows themselves; those of padding rows hold anything.
        visible_BMM: Which rows each row sees (`verify_tree.structure.tree_visibility`); padding not even itself.
        scale: Factor of the scores.

    Returns:
        [B, M, H, P] in the dtype of the queries; 0 for padding rows.
    """
    groups = tree[0].shape[2]
    wide = torch.promote_types(query_BMHP.dtype, torch.float32)
    cached_BL = torch.arange(cache[0].shape[1], device=length_B.device) < length_B[:, None]
    live_BM = visible_BMM.diagonal(dim1=1, dim2=2)
    seen_BMX = torch.cat([cached_BL[:, None].expand(-1, live_BM.shape[1], -1), visible_BMM], -1) & live_BM[..., None]
    # what nobody may see is zeroed, since 0 * NaN would reach the sums
    holds_BX = torch.cat([cached_BL, live_BM], -1)[..., None, None]
    key_BXGP, value_BXGP = (
        torch.cat([old, new], 1).to(wide).masked_fill(~holds_BX, 0) for old, new in zip(cache, tree, strict=True)
    )
    query_BMGJP = query_BMHP.to(wide).unflatten(2, (groups, -1)) * scale
    score_BMGJX = torch.einsum("bmgjp,bxgp->bmgjx", query_BMGJP, key_BXGP)
    score_BMGJX = score_BMGJX.masked_fill(~seen_BMX[:, :, None, None], float("-inf"))
    output_BMGJP = torch.einsum("bmgjx,bxgp->bmgjp", score_BMGJX.softmax(-1), value_BXGP)
    return output_BMGJP.masked_fill(~live_BM[..., None, None, None], 0).flatten(2, 3).to(query_BMHP.dtype)
