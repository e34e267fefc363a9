"""What the speculative loop asks of a target and of a drafter.

Shapes: B requests, Q new tokens of a pass, K draft tokens, V target vocabulary, A captured layers, D hidden.
Both keep their caches indexed by position: writing a position again is the roll-back, and entries behind a query's own
position are never seen.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TargetPass:
    """Result of one pass of the target."""

    logits_BQV: Tensor
    aux_BQAD: Tensor
    last_BQD: Tensor
    """State before the final norm."""


class TargetModel(Protocol):
    """A target with a cache for a batch of requests."""

    def start(self, prompts: list[list[int]], max_length: int) -> TargetPass:
        """Prefill right-padded prompts; logits of each prompt's last token only [B, 1, V], states of all tokens."""

    def step(self, tokens_BQ: Tensor, position_BQ: Tensor) -> TargetPass:
        """Run new tokens at the given positions."""

    def select(self, rows: Tensor) -> None:
        """Keep only these requests."""


class Drafter(Protocol):
    """Something that proposes K tokens for each request."""

    def start(self, batch_size: int, max_length: int) -> None:
        """Forget everything and make room."""

    def observe(self, next_BQ: Tensor, states: TargetPass, position_BQ: Tensor, count_B: Tensor) -> None:
        """Take in verified slots: the target's true states of a position and the token that follows it.

        Of each request only the first `count_B` slots are real. The last real one holds the token just sampled.
        """

    def draft(self, k: int) -> Tensor:
        """K greedy draft tokens [B, K] that continue after the last observed slot."""

    def select(self, rows: Tensor) -> None:
        """Keep only these requests."""
