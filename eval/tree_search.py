"""Which static tree to draft: a greedy search over measured accuracies (Cai et al. 2024, Medusa, section 2.3.3).

The tree is the same in every round: a node says which draft step ("head") proposes its token and which of that step's
most likely tokens it is. Rank 0 of every step alone is the usual chain.

Shapes: K draft steps, R ranks, N nodes.
"""

import heapq
from dataclasses import dataclass

import torch
from drafthead.data.errors import InputError
from drafthead.kernels.verify_tree.structure import ROOT
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TreeShape:
    """A static draft tree; parents stand before their children, more promising siblings before others."""

    parents: tuple[int, ...]
    """Parent node of each node, `ROOT` for those that follow the last known token."""
    heads: tuple[int, ...]
    """Draft step that proposes each node: its depth - 1."""
    ranks: tuple[int, ...]
    """Which of that step's tokens it is, 0 the most likely."""
    expected_accept_length: float
    """1 + the sum of the path probabilities, as if hits at different depths were independent. They are not: this orders
    trees, what a tree accepts is measured by its loop."""

    def __post_init__(self) -> None:
        for node, (parent, head) in enumerate(zip(self.parents, self.heads, strict=True)):
            assert ROOT <= parent < node, f"node {node} stands before its parent {parent}"
            assert head == (0 if parent == ROOT else self.heads[parent] + 1), f"node {node}: head {head}"

    @property
    def num_nodes(self) -> int:
        return len(self.parents)

    @property
    def depth(self) -> int:
        """Draft tokens on the longest path."""
        return max(self.heads) + 1

    def parent_N(self, device: torch.device | str) -> Tensor:
        """The parents as `verify_tree` takes them, one row of [B, N]."""
        return torch.tensor(self.parents, device=device)


def search_tree(accuracy_KR: Tensor, nodes: int = 63, depth: int = 4) -> TreeShape:
    """Add the node with the largest path probability until there are `nodes`.

    The probability of a path is the product of its nodes' accuracies. A child never has more than its parent, so the
    greedy choice is the best tree of that size. Of equal ones the shallower comes first, then the lower ranks.

    Args:
        accuracy_KR: How often the token of rank r of step j is the right one, for each step by itself.
        nodes: Nodes at most; fewer where no further one has ever been right.
        depth: Depth at most, and never more than there are steps.

    Raises:
        InputError: No token of the first step was ever right.
    """
    accuracy = accuracy_KR[:depth].tolist()
    found: list[tuple[float, tuple[int, ...], int]] = []
    # an entry orders by probability, then by length, then by ranks
    heap: list[tuple[float, int, tuple[int, ...], int]]
    heap = [(-chance, 1, (rank,), ROOT) for rank, chance in enumerate(accuracy[0]) if chance > 0]
    heapq.heapify(heap)
    while heap and len(found) < nodes:
        chance, length, path, parent = heapq.heappop(heap)
        found.append((-chance, path, parent))
        if length < len(accuracy):
            for rank, following in enumerate(accuracy[length]):
                if following > 0:
                    heapq.heappush(heap, (chance * following, length + 1, (*path, rank), len(found) - 1))
    if not found:
        raise InputError("eval.tree: no draft token was right in the texts that the tree is searched on; train longer")
    return TreeShape(
        parents=tuple(parent for _, _, parent in found),
        heads=tuple(len(path) - 1 for _, path, _ in found),
        ranks=tuple(path[-1] for _, path, _ in found),
        expected_accept_length=1 + sum(chance for chance, _, _ in found),
    )
