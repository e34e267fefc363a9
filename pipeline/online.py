"""States that are computed while a head trains and are written nowhere: `capture.mode: online`.

A thread runs the target ahead of the loop (`load_ahead` of data/batches.py), on CUDA on a stream of its own. What it
gives is what the store would have held: the same recorder, the same types. Where rows run together, a row's last bits
depend on the others through the padding; alone (`capture.batch_tokens=1`) they are equal bit for bit.
"""

import contextlib
from typing import Any

import torch
from drafthead.data.batches import Pack, lay_out
from drafthead.data.encoding import Row, common_opening, read_rows
from drafthead.data.errors import GateError, InputError
from drafthead.data.quantize import read_dtype
from drafthead.data.store_faults import find_fault
from drafthead.data.store_format import StoreInfo
from drafthead.eval.states import StateRecorder
from drafthead.pipeline.capture import FeatureGate, compute_dtype, length_batches, store_info
from drafthead.pipeline.respond import SPLITS
from drafthead.pipeline.run_dir import Run
from drafthead.pipeline.target import Target
from torch import Tensor


class OnlineStates:
    """States of the rows of one split; `info` and `get` are those of a `Store`.

    Args:
        model: The target in transformers; splits share it.
        rows: All that will be asked for.
        batch_tokens: Rows of a pack run together up to so many tokens, padding included.
    """

    def __init__(self, model: Any, target: Target, info: StoreInfo, rows: list[Row], batch_tokens: int):
        self.info = info
        self.rows = {row.key: row for row in rows}
        self.batch_tokens = batch_tokens
        self.dtype = read_dtype(info.dtype)
        self.gate = FeatureGate(model, target, str(self.dtype).removeprefix("torch."))
        self.recorder = StateRecorder(model, info.layer_ids)
        self.recorder.share_opening(rows[0].input_ids[: common_opening(rows)])
        self.stream = torch.cuda.Stream() if model.device.type == "cuda" else None

    def load(self, rows: list[Row]) -> Pack:
        """A pack of rows whose states are computed now.

        Raises:
            GateError: The target's states of a row cannot be used.
        """
        found: dict[str, tuple[Tensor, Tensor]] = {}
        with torch.cuda.stream(self.stream) if self.stream is not None else contextlib.nullcontext():
            for batch in length_batches(rows, self.batch_tokens):
                states = list(self.recorder.record([row.input_ids for row in batch], self.dtype))
                self.gate.check(batch[0], states[0][1])
                for row, (aux, last) in zip(batch, states, strict=True):
                    if reason := find_fault(aux, last, len(row.input_ids)):
                        raise GateError("FeatureGate", f"row {row.key}", reason)
                    found[row.key] = aux, self._kept(row, last)
        return lay_out(rows, [found[row.key] for row in rows])

    def get(self, row_id: str) -> tuple[Tensor, Tensor]:
        """States of a row: aux [T, A, D] and last [T, D], of which those that a store would not keep are zero."""
        pack = self.load([self.rows[row_id]])
        return pack.aux_TAD, pack.last_TD

    def _kept(self, row: Row, last_TD: Tensor) -> Tensor:
        first, stop = self.info.last_window(len(row.input_ids), row.context_length)
        last_TD[:first] = 0
        last_TD[stop:] = 0
        return last_TD


def open_online(run: Run) -> list[tuple[list[Row], OnlineStates]]:
    """Rows and states of both splits.

    Raises:
        InputError: A split has no rows.
    """
    settings = run.recipe.capture
    model = run.target.load(compute_dtype(settings.dtype), "cuda" if torch.cuda.is_available() else "cpu")
    info = store_info(run.recipe, run.target)
    opened = []
    for split in SPLITS:
        path = run.input("encode") / f"{split}.parquet"
        rows = read_rows(path)
        if not rows:
            raise InputError(f"{path}: no rows")
        opened.append((rows, OnlineStates(model, run.target, info, rows, settings.batch_tokens)))
    return opened
