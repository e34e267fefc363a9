"""What the parent pointers of a draft tree say: which rows see each other, and how deep each row lies.

Shapes: B requests, N draft nodes, M = N + 1 rows of a target pass: row 0 is the root (the last known token), row n + 1
is node n. `parent_BN` holds the parent node of each node, `ROOT` for children of the root and `PADDING` for nodes that
a request lacks. A parent stands before its children; siblings are tried in the order in which they stand.
"""

import torch
from torch import Tensor

ROOT = -1
PADDING = -2


def tree_visibility(parent_BN: Tensor) -> Tensor:
    """Which rows each row attends to among the rows of its tree: itself and its ancestors.

    Args:
        parent_BN: Parent pointers, as above.

    Returns:
        visible_BMM: bool; a padding row sees nothing, not even itself, and nobody sees it.
    """
    batch, nodes = parent_BN.shape
    own_M = torch.arange(nodes + 1, device=parent_BN.device)
    padding_BM = torch.nn.functional.pad(parent_BN == PADDING, (1, 0))
    above_BM = torch.nn.functional.pad(parent_BN.long() + 1, (1, 0))
    above_BM = torch.where(padding_BM, own_M, above_BM)
    visible_BMM = (own_M[:, None] == own_M) & ~padding_BM[..., None]
    # after i rounds a row sees its 2^i nearest rows upwards, itself among them, and `above` is the 2^i-th one
    for _ in range(nodes.bit_length()):
        visible_BMM = visible_BMM | visible_BMM.gather(1, above_BM[..., None].expand(batch, nodes + 1, nodes + 1))
        above_BM = above_BM.gather(1, above_BM)
    return visible_BMM


def tree_depth(visible_BMM: Tensor) -> Tensor:
    """Edges between each row and the root [B, M]; 0 for padding. Position id of a row = the root's + its depth."""
    return (visible_BMM.sum(-1) - 1).clamp_min(0)
