"""Rows of made-up data for the tests of heads, and packs of them.

Shapes: T tokens, A captured layers (none where a head reads the last state alone), D hidden.
"""

import itertools
from dataclasses import dataclass

import torch
from drafthead.pipeline.heads.base import HeadBatch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Document:
    """One row of data before packing."""

    tokens_T: Tensor
    last_TD: Tensor
    supervised_T: Tensor
    aux_TAD: Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens_T)

    def aux(self) -> Tensor:
        return self.last_TD.new_empty(len(self), 0, self.last_TD.shape[1]) if self.aux_TAD is None else self.aux_TAD


def pack(*documents: Document, opening: int = 0) -> HeadBatch:
    lengths = [len(document) for document in documents]
    starts = itertools.accumulate(lengths, initial=0)
    return HeadBatch(
        tokens_T=torch.cat([document.tokens_T for document in documents]),
        aux_TAD=torch.cat([document.aux() for document in documents]),
        last_TD=torch.cat([document.last_TD for document in documents]),
        position_T=torch.cat([torch.arange(length) for length in lengths]),
        supervised_T=torch.cat([document.supervised_T for document in documents]),
        documents=list(zip(starts, lengths, strict=False)),
        opening=opening,
    )
