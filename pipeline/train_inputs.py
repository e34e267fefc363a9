"""What a training reads of the stages before it."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from drafthead.data.batches import Pack, load_pack
from drafthead.data.draft_vocab import DraftVocab
from drafthead.data.encoding import Row, common_opening, read_rows
from drafthead.data.errors import InputError
from drafthead.data.shards import Store
from drafthead.data.store_faults import sound_rows
from drafthead.pipeline.heads.base import FrozenTarget
from drafthead.pipeline.heads.build import build_frozen_target
from drafthead.pipeline.loss_vocab import LossVocab
from drafthead.pipeline.online import OnlineStates, open_online
from drafthead.pipeline.respond import SPLITS
from drafthead.pipeline.run_dir import Run


@dataclass
class Inputs:
    """What the loop reads of the stages before it."""

    rows: list[Row]
    store: Store | OnlineStates
    heldout_rows: list[Row]
    heldout_store: Store | OnlineStates
    frozen: FrozenTarget
    loss_vocab: LossVocab | None
    """Which draft tokens the loss looks at; None where it looks at all (`train.loss_vocab`)."""
    opening: int
    """Tokens that all training rows begin with alike."""

    @classmethod
    def open(cls, run: Run) -> "Inputs":
        """Open the stores, keeping the rows whose states are there and whole.

        Raises:
            InputError: The states come from another target, or too many of them cannot be used.
        """
        vocab = DraftVocab.load(run.input("draft-vocab") / "draft_vocab.safetensors")
        frozen = build_frozen_target(run.target, vocab)
        opened = open_online(run) if run.recipe.capture.mode == "online" else cls._open_stores(run)
        (rows, store), (heldout_rows, heldout_store) = opened
        size = run.recipe.train.loss_vocab
        fewer = LossVocab(frozen, rows, size, run.recipe.run.seed) if size is not None and size < vocab.size else None
        return cls(rows, store, heldout_rows, heldout_store, frozen, fewer, common_opening(rows))

    def place(self, device: torch.device, precision: str) -> None:
        """Move the target's parts to where the head trains, its lm_head in the type of the products."""
        self.frozen.to(device)
        if precision == "fp32":
            self.frozen.lm_head_UD = self.frozen.lm_head_UD.float()  # once, instead of at every step

    def scored(self, pack: Pack) -> FrozenTarget:
        """The target as the loss of a micro batch looks at it."""
        return self.frozen if self.loss_vocab is None else self.loss_vocab.of(pack)

    @property
    def scored_tokens(self) -> int:
        """Draft tokens that the loss of a micro batch looks at."""
        return len(self.frozen.target_ids_U) if self.loss_vocab is None else self.loss_vocab.size

    @staticmethod
    def _open_stores(run: Run) -> list[tuple[list[Row], Store | OnlineStates]]:
        opened: list[tuple[list[Row], Store | OnlineStates]] = []
        for split in SPLITS:
            store = Store(run.input("capture") / split)
            if store.info.fingerprint != run.target.fingerprint:
                raise InputError(
                    f"{store.folder}: states of target {store.info.fingerprint}, this run's is {run.target.fingerprint}"
                )
            rows, left_out = sound_rows(
                read_rows(run.input("encode") / f"{split}.parquet"), store, run.recipe.capture.max_bad_share
            )
            if left_out:
                print(left_out, file=sys.stderr)
            opened.append((rows, store))
        return opened


def loader_of(store: Store | OnlineStates) -> Callable[[list[Row]], Pack]:
    """What makes packs of rows: their states are read, or computed."""
    return store.load if isinstance(store, OnlineStates) else lambda rows: load_pack(rows, store)
