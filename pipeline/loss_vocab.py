"""The draft tokens that the loss of a micro batch looks at (`train.loss_vocab`).

Both distributions are taken over these tokens alone, and equal ones over every set are equal ones over all tokens; so
that every token has its turn, most of the set is drawn anew for each micro batch. A set that stays the same trains a
head that drafts the others badly, the longer the worse (docs/log.md).

Shapes: U draft vocabulary, V target vocabulary, S tokens of a set.
"""

import torch
from drafthead.data.batches import Pack
from drafthead.data.encoding import Row
from drafthead.pipeline.encode import count_supervised
from drafthead.pipeline.heads.base import FrozenTarget
from torch import Tensor

FREQUENT_SHARE = 0.25
"""Of a set: the tokens that the target writes most often, which are in all sets."""


class LossVocab:
    """Sets of `size` draft tokens, one for each micro batch.

    A set holds the most frequent tokens, then those that the answers of the micro batch hold, then chance ones. It
    depends on the tokens of the micro batch and the seed: not on the step, the rank or what was drawn before, so that
    a resumed training and one on other ranks draw the same.
    """

    def __init__(self, frozen: FrozenTarget, rows: list[Row], size: int, seed: int):
        """`frozen`: the target with the whole draft vocabulary; `rows`: whose answers are counted."""
        self.frozen, self.size, self.seed = frozen, size, seed
        ids_U = by_frequency(rows, frozen.target_ids_U, len(frozen.draft_ids_V))
        frequent = int(size * FREQUENT_SHARE)
        self.frequent, self.others = ids_U[:frequent], ids_U[frequent:]
        self.is_other_V = torch.zeros(len(frozen.draft_ids_V), dtype=torch.bool)
        self.is_other_V[self.others] = True

    def of(self, pack: Pack) -> FrozenTarget:
        """The target with the draft tokens of this micro batch alone."""
        return self.frozen.restricted(self.ids(pack).to(self.frozen.target_ids_U.device))

    def ids(self, pack: Pack) -> Tensor:
        """Target ids [S], ascending."""
        tokens_T = pack.tokens_T.cpu()
        generator = torch.Generator().manual_seed(pack.checksum(self.seed))
        drawn = self.others[torch.randperm(len(self.others), generator=generator)]
        written = tokens_T[pack.supervised_T.cpu()].unique()
        written = written[self.is_other_V[written]]
        is_written_V = torch.zeros_like(self.is_other_V)
        is_written_V[written] = True
        rest = torch.cat([written, drawn[~is_written_V[drawn]]])
        return torch.cat([self.frequent, rest[: self.size - len(self.frequent)]]).sort().values


def by_frequency(rows: list[Row], target_ids_U: Tensor, vocab_size: int) -> Tensor:
    """The given ids, those that the target wrote most often first; of equals the lowest."""
    counts_U = count_supervised(rows, vocab_size)[target_ids_U]
    return target_ids_U[counts_U.argsort(descending=True, stable=True)]
