"""A draft tree that is grown anew in every round, by what the drafter believes (EAGLE-2; Li et al. 2024).

A node's confidence is the product of the draft probabilities along its path, an estimate of how likely the target
accepts it. Level by level the most confident nodes are run; of all that was seen the best ones overall are verified.
What is drafted depends on the drafter and the context alone, never on what the target is about to sample, so
verification is that of a static tree: lossless, children in their order.

Shapes: B requests, Q nodes run together, R tokens considered behind each, X nodes of a level or of all, N draft nodes.
"""

from dataclasses import dataclass

import torch
from drafthead.eval.protocols import TreeDrafter
from drafthead.kernels.verify_tree.structure import ROOT
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class DynamicTree:
    """How far a tree is grown, and how much of it is kept."""

    nodes: int
    """Nodes kept at most."""
    levels: int
    """Depth at most."""
    width: int
    """Nodes of a level that are run, and tokens considered behind each."""

    @property
    def num_nodes(self) -> int:
        """Nodes of every tree, where the draft vocabulary has `width` tokens."""
        return min(self.nodes, self.width + (self.levels - 1) * self.width**2)

    @property
    def depth(self) -> int:
        """Draft tokens on the longest path that there can be."""
        return min(self.levels, self.nodes)


@dataclass(frozen=True, kw_only=True)
class Level:
    """Nodes of one depth, behind all those that were run."""

    token_BX: Tensor
    confidence_BX: Tensor
    """Logarithm of the product along the path."""
    parent_BX: Tensor
    """Number of the parent among the nodes of all levels."""
    row_BX: Tensor
    """The parent's row in the `GrowingTree`."""


def grow_tree(drafter: TreeDrafter, shape: DynamicTree) -> tuple[Tensor, Tensor]:
    """Grow a tree of each request from what it last observed.

    Returns:
        Token and parent of each node, both [B, N], as `verify_tree` takes them: parents before their children,
        siblings by confidence. The trees of two requests differ, their sizes don't.
    """
    tree = drafter.open_tree()
    token_B1R, log_q_B1R = tree.first(shape.width)
    root_BR = torch.full_like(token_B1R[:, 0], ROOT)
    levels = [
        Level(
            token_BX=token_B1R[:, 0],
            confidence_BX=log_q_B1R[:, 0],
            parent_BX=root_BR,
            row_BX=torch.zeros_like(root_BR),
        )
    ]
    num_before, num_rows = 0, 1
    for _ in range(shape.levels - 1):
        last = levels[-1]
        width = min(shape.width, last.token_BX.shape[1])
        confidence_BQ, best_BQ = last.confidence_BX.topk(width, 1)
        parent_row_BQ, token_BQ = last.row_BX.gather(1, best_BQ), last.token_BX.gather(1, best_BQ)
        token_BQR, log_q_BQR = tree.deeper(parent_row_BQ, token_BQ, shape.width)
        row_Q = num_rows + torch.arange(width, device=token_BQ.device)
        levels.append(
            Level(
                token_BX=token_BQR.flatten(1),
                confidence_BX=(confidence_BQ[..., None] + log_q_BQR).flatten(1),
                parent_BX=(num_before + best_BQ)[..., None].expand_as(token_BQR).flatten(1),
                row_BX=row_Q[:, None].expand_as(token_BQR).flatten(1),
            )
        )
        num_before += last.token_BX.shape[1]
        num_rows += width
    return keep_best(levels, shape.num_nodes)


def keep_best(levels: list[Level], count: int) -> tuple[Tensor, Tensor]:
    """The most confident nodes of all levels, in the order in which they were found."""
    token_BX = torch.cat([level.token_BX for level in levels], 1)
    confidence_BX = torch.cat([level.confidence_BX for level in levels], 1)
    parent_BX = torch.cat([level.parent_BX for level in levels], 1)
    # a child has at most its parent's confidence and stands behind it, so a stable order takes no child alone
    order_BX = confidence_BX.sort(dim=1, descending=True, stable=True).indices
    kept_BN = order_BX[:, :count].sort(dim=1).values
    parent_BN = parent_BX.gather(1, kept_BN)
    place_BN = torch.searchsorted(kept_BN, parent_BN)
    return token_BX.gather(1, kept_BN), place_BN.where(parent_BN != ROOT, ROOT)
