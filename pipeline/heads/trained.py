"""A run's trained head as the evaluations use it."""

from dataclasses import dataclass

import torch
from drafthead.data.draft_vocab import DraftVocab
from drafthead.eval.protocols import TreeDrafter
from drafthead.pipeline.heads.base import FrozenTarget, Head
from drafthead.pipeline.heads.build import build_frozen_target, load_head
from drafthead.pipeline.run_dir import Run


@dataclass(frozen=True, kw_only=True)
class LoadedHead:
    """The head, rounded as it is exported, and what of the target it reads."""

    head: Head
    frozen: FrozenTarget
    aux_layers: list[int]

    @classmethod
    def load(cls, run: Run, device: str, dtype: torch.dtype) -> "LoadedHead":
        """Of a run that has trained one; computes in `dtype`."""
        folder = run.input("train")
        target = run.served_target
        head, description = load_head(folder, target)
        vocab = DraftVocab.load(run.input("draft-vocab") / "draft_vocab.safetensors")
        # the served head is the exported one: its rounding is part of what is predicted
        return cls(
            head=head.to(getattr(torch, run.recipe.export.dtype)).to(device, dtype),
            frozen=build_frozen_target(target, vocab).to(device),
            aux_layers=description["aux_layer_ids"],
        )

    def drafter(self) -> TreeDrafter:
        return self.head.drafter(self.frozen)
