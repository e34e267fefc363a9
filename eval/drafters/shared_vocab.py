"""Drafting with a model of another vocabulary: token-level intersection (TLI; Timor et al. 2025).

Only tokens whose text both vocabularies have are drafted, so each draft token is one of the target's and verification
is what it always is: the text stays the target's. A token of the context that the draft model lacks is read by it as
its unknown token, or its EOS if it has none, as vLLM 0.32 does (`use_heterogeneous_vocab`,
v1/spec_decode/vocab_mapping.py): what is measured here is what is served. The paper's own loop tokenises the context
anew instead, which keeps its text and costs the one-to-one positions of the two caches.

Shapes: B requests, Q tokens, V target vocabulary, U draft vocabulary.
"""

from dataclasses import dataclass

import torch
from drafthead.data.errors import InputError
from drafthead.data.vocab_match import Vocabulary, shared_tokens
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SharedVocabulary:
    """Ids of the tokens that two vocabularies have in common, both ways."""

    draft_ids_V: Tensor
    """Draft id of each target id; the draft model's unknown token where it has none."""
    target_ids_U: Tensor
    """Target id of each draft id; -1 where there is none."""

    @classmethod
    def of(cls, target: Vocabulary, draft: Vocabulary, device: torch.device | str) -> "SharedVocabulary":
        """Match two vocabularies by their tokens' texts.

        Raises:
            InputError: They have no token in common, or the draft model has neither an unknown token nor an EOS.
        """
        shared = shared_tokens(target, draft)
        unknown = draft.eos_id if draft.unk_id is None else draft.unk_id
        if not shared:
            raise InputError("draft model: its vocabulary has no token in common with the target's; take another model")
        if unknown is None:
            raise InputError(
                "draft model: its tokenizer has neither an unknown token nor an EOS, which stand for tokens of the "
                "target that it lacks; set unk_token in its tokenizer_config.json"
            )
        pairs_X2 = torch.tensor(shared, device=device)
        draft_ids_V = torch.full((target.size,), unknown, device=device)
        target_ids_U = torch.full((draft.size,), -1, device=device)
        draft_ids_V[pairs_X2[:, 0]] = pairs_X2[:, 1]
        target_ids_U[pairs_X2[:, 1]] = pairs_X2[:, 0]
        return cls(draft_ids_V=draft_ids_V, target_ids_U=target_ids_U)

    @property
    def num_shared(self) -> int:
        return int((self.target_ids_U >= 0).sum())

    @property
    def share_of_target(self) -> float:
        """Of the target's vocabulary, what can be drafted."""
        return self.num_shared / len(self.draft_ids_V)

    def to_draft(self, tokens_BQ: Tensor) -> Tensor:
        """Target ids as the draft model reads them."""
        return self.draft_ids_V[tokens_BQ]

    def most_likely(self, logits_BU: Tensor) -> Tensor:
        """Target id of the draft model's likeliest token among the shared ones [B]."""
        shared_BU = logits_BU.masked_fill(self.target_ids_U < 0, float("-inf"))
        return self.target_ids_U[shared_BU.argmax(-1)]
