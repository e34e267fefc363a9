"""Another, smaller model drafts: it reads the same tokens as the target and writes the next ones greedily.

As vLLM 0.32's method `draft_model` (v1/spec_decode/draft_model.py): every verified token is run once more, with the one
just sampled, and each draft token goes through the model to get the next. Its cache is indexed by position like the
target's, so writing a position again is the roll-back.

Shapes: B requests, Q new tokens of a pass, K draft tokens, V target vocabulary, U draft vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from drafthead.eval.drafters.shared_vocab import SharedVocabulary
from drafthead.eval.hf_target import HFTarget
from drafthead.eval.protocols import TargetPass
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class DraftModelOptions:
    """Which model drafts, by vLLM's names."""

    model: str
    """Its folder."""
    use_heterogeneous_vocab: bool = False
    """Its tokens are others than the target's: draft those that both have."""


class DraftModel:
    """Implements `protocols.Drafter` with a causal language model in transformers.

    Raises:
        InputError: As `HFTarget`.
    """

    def __init__(self, model: Any, vocabulary: SharedVocabulary | None = None):
        """`vocabulary`: translates where the two models' tokens are not the same."""
        self.model = HFTarget(model, [], role="draft model")
        self.vocabulary = vocabulary

    def start(self, prompts: list[list[int]], max_length: int) -> None:
        self.model.reserve(max_length)
        # the slots to come hold the tokens behind it
        self.first_B = torch.tensor([ids[0] for ids in prompts], device=self.model.model.device)
        self.is_new = True

    def observe(self, next_BQ: Tensor, states: TargetPass, position_BQ: Tensor, count_B: Tensor) -> None:
        position_BQ = position_BQ + 1
        if self.is_new:
            next_BQ = torch.cat([self.first_B[:, None], next_BQ], 1)
            position_BQ = torch.nn.functional.pad(position_BQ, (1, 0))
            count_B = count_B + 1
            self.is_new = False
        last_B = count_B - 1
        self.token_B = self._next(next_BQ, position_BQ, last_B)
        self.position_B = position_BQ[torch.arange(len(last_B), device=last_B.device), last_B]

    def draft(self, k: int) -> Tensor:
        tokens = [self.token_B]
        for step in range(1, k):
            tokens.append(self._next(tokens[-1][:, None], self.position_B[:, None] + step, None))
        return torch.stack(tokens, 1)

    def select(self, rows: Tensor) -> None:
        self.model.select(rows)
        self.token_B, self.position_B = self.token_B[rows], self.position_B[rows]

    def _next(self, tokens_BQ: Tensor, position_BQ: Tensor, row_B: Tensor | None) -> Tensor:
        """Run the target's tokens; the token that follows the only one, or that in `row_B`, of each request [B]."""
        if self.vocabulary is not None:
            tokens_BQ = self.vocabulary.to_draft(tokens_BQ)
        logits_BU = self.model.run(tokens_BQ, position_BQ, row_B)[:, 0]
        return logits_BU.argmax(-1) if self.vocabulary is None else self.vocabulary.most_likely(logits_BU)
