"""What the speculative loop asks of a target and of a drafter.

Shapes: B requests, Q new tokens of a pass, K draft tokens, V target vocabulary, A captured layers, D hidden; N nodes of
a draft tree, M = N + 1 rows (the root and the nodes), R ranks.
Both keep their caches indexed by position: writing a position again is the roll-back, and entries behind a query's own
position are never seen.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from drafthead.eval.tree_search import TreeShape
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TargetPass:
    """Result of one pass of the target."""

    logits_BQV: Tensor
    aux_BQAD: Tensor
    last_BQD: Tensor
    """State before the final norm."""

    def states_at(self, row_BQ: Tensor) -> "TargetPass":
        """The states of some rows of each request, without logits."""
        request_B1 = torch.arange(len(row_BQ), device=row_BQ.device)[:, None]
        return TargetPass(
            logits_BQV=self.logits_BQV[:, :0],
            aux_BQAD=self.aux_BQAD[request_B1, row_BQ],
            last_BQD=self.last_BQD[request_B1, row_BQ],
        )


class TargetModel(Protocol):
    """A target with a cache for a batch of requests."""

    def start(self, prompts: list[list[int]], max_length: int) -> TargetPass:
        """Prefill right-padded prompts; logits of each prompt's last token only [B, 1, V], states of all tokens."""

    def step(self, tokens_BQ: Tensor, position_BQ: Tensor) -> TargetPass:
        """Run new tokens at the given positions."""

    def select(self, rows: Tensor) -> None:
        """Keep only these requests."""


class TreeTarget(TargetModel, Protocol):
    """A target that can run a draft tree in one pass."""

    def step_tree(self, tokens_BM: Tensor, known_B: Tensor, visible_BMM: Tensor) -> TargetPass:
        """Run the root, at position `known_B`, and its nodes; each row sees the cache and the rows that are visible.

        The cache stays as it is: what was computed for the rows is held beside it until the next pass.
        """

    def keep_path(self, row_BQ: Tensor, position_BQ: Tensor) -> None:
        """Write rows of the latest tree pass to the cache at the given positions."""


class Drafter(Protocol):
    """Something that proposes K tokens for each request."""

    def start(self, prompts: list[list[int]], max_length: int) -> None:
        """Begin with new requests, whose prompt ids these are, and make room.

        The prompt's first token stands in no slot: here is where a drafter learns it.
        """

    def observe(self, next_BQ: Tensor, states: TargetPass, position_BQ: Tensor, count_B: Tensor) -> None:
        """Take in verified slots: the target's true states of a position and the token that follows it.

        Of each request only the first `count_B` slots are real. The last real one holds the token just sampled.
        """

    def draft(self, k: int) -> Tensor:
        """Greedy draft tokens that continue after the last observed slot.

        Returns:
            [B, K] with K at most k, 0 included: a request may get fewer tokens than another, or none. -1 stands behind
            its last one.
        """

    def select(self, rows: Tensor) -> None:
        """Keep only these requests."""


class GrowingTree(Protocol):
    """A draft tree of each request that is run level by level: row 0 is the root, then come the nodes as they are run.

    What follows a node is given as tokens and the logarithms of their draft probabilities, both [B, Q, R], the
    likeliest first; R is at most `count`.
    """

    def first(self, count: int) -> tuple[Tensor, Tensor]:
        """What follows the last observed slot; Q = 1."""

    def deeper(self, parent_BQ: Tensor, token_BQ: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Run nodes of the next level, given by their parents' rows and their tokens; what follows them."""


class TreeDrafter(Drafter, Protocol):
    """A drafter that proposes the nodes of a tree as well."""

    max_depth: int
    """Draft steps that it has."""

    def draft_tree(self, shape: TreeShape) -> Tensor:
        """Of a static tree: the token of each node [B, N], at its rank behind the path to its parent."""

    def open_tree(self) -> GrowingTree:
        """A tree that grows from the last observed slot; it leaves no traces."""

    def rank_tokens(self, given_BK: Tensor, count: int) -> Tensor:
        """The most likely tokens of K draft steps, the likeliest first, each step given the tokens of those before it.

        Returns:
            [B, K, R], R at most `count`. Slots from the last observed one's position on may be overwritten.
        """
