"""Capture: the frozen target's states of every training and held-out row.

    drafthead capture runs/eagle3

Notable: only the decoder runs, not the lm_head; layers are read by hooks, so that nothing but the captured states is
kept; right padding needs no mask, since no real token attends to what comes after it. `capture.backend: vllm` asks an
engine instead (`capture_vllm.py`).
"""

import os
import shutil
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from drafthead.data.encoding import Row, common_opening, read_rows
from drafthead.data.errors import GateError, InputError
from drafthead.data.files import digest, sha256_of
from drafthead.data.quantize import CODES, read_dtype, vector_bytes
from drafthead.data.shards import ShardWriter, Store
from drafthead.data.store_faults import find_fault
from drafthead.data.store_format import LastKept, StoreInfo
from drafthead.eval.states import StateRecorder
from drafthead.pipeline.capture_vllm import States, VllmStates
from drafthead.pipeline.cores import fastest_dtype, side_by_side
from drafthead.pipeline.heads.build import HEADS
from drafthead.pipeline.on_policy import measure_on_policy, show_on_policy
from drafthead.pipeline.progress import progress
from drafthead.pipeline.recipe import Recipe
from drafthead.pipeline.respond import SPLITS
from drafthead.pipeline.run_dir import Run
from drafthead.pipeline.state_logits import LOGIT_TOLERANCE, StateLogits
from drafthead.pipeline.target import Target
from torch import Tensor

MOST_OF_DISK = 0.95
MAX_WORKERS = 8
"""Batches in flight on a CPU; each holds its states."""


def capture(run: Run) -> dict[str, Any]:
    """Write the state stores of both splits; rows of whole shards are not captured again."""
    settings = run.recipe.capture
    target = run.target
    info = store_info(run.recipe, target)
    layers, stored = info.layer_ids, read_dtype(settings.dtype)
    rows = {split: read_rows(run.input("encode") / f"{split}.parquet") for split in SPLITS}
    every = [row for split in SPLITS for row in rows[split]]
    tokens, last_states = sum(len(row.input_ids) for row in every), info.count_last(every)
    if settings.mode == "online":
        return {"layer_ids": layers, "mode": "online", "tokens": tokens}  # pipeline/online.py
    folder = run.folder("capture")
    written = sum(path.stat().st_size for path in folder.rglob("shard-*.safetensors"))
    check_disk(folder, info, tokens, last_states, written)

    counts: dict[str, Any] = {"layer_ids": layers}
    bad: list[str] = []
    with open_backend(run, layers, stored, max(len(row.input_ids) for row in every)) as backend:
        for split in SPLITS:
            writer = ShardWriter(folder / split, info, settings.shard_tokens)
            bad += capture_rows(backend, rows[split], writer, settings.batch_tokens, f"capture {split}")
            counts[split] = {
                "rows": len(writer.done),
                "tokens": sum(len(row.input_ids) for row in rows[split] if row.key in writer.done),
            }
    if len(bad) > settings.max_bad_share * len(every):
        raise GateError(
            "FeatureGate",
            "states",
            f"{len(bad)} rows are unusable, for instance {bad[0]}; capture.max_bad_share={settings.max_bad_share:g}",
        )
    counts["on_policy"] = measure_on_policy(target, rows["train"], Store(folder / "train"))
    show_on_policy(counts["on_policy"])
    size = sum(path.stat().st_size for path in folder.rglob("shard-*"))
    return {**counts, "bytes_per_token": round(size / max(1, tokens), 1), "bad": bad}


def capture_rows(
    backend: "TransformersStates | VllmStates", rows: list[Row], writer: ShardWriter, batch_tokens: int, what: str
) -> list[str]:
    """Write the states of the rows that the store lacks; returns which rows are unusable, and why."""
    bad: list[str] = []
    total = sum(len(row.input_ids) for row in rows)
    left = sum(len(row.input_ids) for row in rows if row.key not in writer.done)
    backend.begin(rows)
    with progress(total, what, "tok", total - left) as bar:
        # the batches of an uninterrupted run, whose padding decides the last bits of the states
        batches = list(length_batches(rows, batch_tokens))
        open_batches = [batch for batch in batches if not writer.done.issuperset(row.key for row in batch)]
        for batch, states in backend.record_all(open_batches):
            sound: list[tuple[Row, Tensor]] = []
            for row, (aux, last) in zip(batch, states, strict=True):
                if row.key in writer.done:
                    continue
                reason = find_fault(aux, last, len(row.input_ids))
                if reason:
                    bad.append(f"{row.key} ({reason})")
                else:
                    writer.add(row, aux, last)
                    sound.append((row, last))
                bar.update(len(row.input_ids))
            if sound:
                backend.check(*sound[0])
    writer.finish()
    return bad


def store_info(recipe: Recipe, target: Target) -> StoreInfo:
    """What a recipe's stores say of all their shards."""
    settings = recipe.capture
    return StoreInfo(
        fingerprint=target.fingerprint,
        revision=recipe.target,
        template=template_hash(target, recipe.encode.template_kwargs),
        layer_ids=target.resolve_aux_layers(settings.aux_layers),
        num_layers=target.num_layers,
        hidden_size=target.hidden_size,
        dtype=settings.dtype,
        last=last_kept(recipe),
    )


def last_kept(recipe: Recipe) -> LastKept:
    """Which positions keep the last state: what the head reads, and all where prompts are learned from too."""
    module, _ = HEADS[recipe.head.type]
    reads: LastKept = module.reads_last
    return "all" if recipe.capture.last == "all" or recipe.train.context_weight else reads


def template_hash(target: Target, template_kwargs: dict[str, Any]) -> str:
    files = (target.path / name for name in ("chat_template.jinja", "tokenizer_config.json"))
    return digest([{path.name: sha256_of(path) for path in files if path.is_file()}, template_kwargs])


def compute_dtype(stored: str) -> torch.dtype:
    """What the target computes in: the stored states' type, or float32 on a CPU that multiplies that faster."""
    kept = read_dtype(stored)
    return torch.float32 if kept == torch.bfloat16 and fastest_dtype() == "float32" else kept


def open_backend(run: Run, layers: list[int], stored: torch.dtype, longest: int) -> "TransformersStates | VllmStates":
    """What the recipe says is to compute the states; a context manager."""
    settings = run.recipe.capture
    compute = compute_dtype(settings.dtype)
    if settings.backend == "transformers":
        return TransformersStates(run.target, layers, compute=compute, stored=stored)
    return VllmStates(
        run.target,
        layers,
        compute=compute,
        stored=stored,
        longest=longest,
        kv_cache_gib=run.recipe.respond.kv_cache_gib,
        log_path=run.path / "logs" / "capture.log",
    )


class TransformersStates:
    """The target in this process: with `VllmStates`, the two that capture can ask; a context manager."""

    def __init__(self, target: Target, layers: list[int], *, compute: torch.dtype, stored: torch.dtype):
        self.target = target
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = target.load(compute, self.device)
        self.recorder = StateRecorder(self.model, layers)
        self.stored = stored

    def __enter__(self) -> "TransformersStates":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def begin(self, rows: list[Row]) -> None:
        """Get ready for a split: what its rows begin with is run once, and the gate looks at its first batch."""
        self.gate = FeatureGate(self.model, self.target, str(self.stored).removeprefix("torch."))
        self.recorder.share_opening(rows[0].input_ids[: common_opening(rows)])

    def record_all(self, batches: list[list[Row]]) -> Iterator[tuple[list[Row], States]]:
        return record_all(self.recorder, batches, self.device, self.stored)

    def check(self, row: Row, last_TD: Tensor) -> None:
        """Hold a batch's row against the target's logits."""
        self.gate.check(row, last_TD)


def record_all(
    recorder: StateRecorder, batches: list[list[Row]], device: str, stored: torch.dtype
) -> Iterator[tuple[list[Row], States]]:
    """States of the batches, in their order: a batch on each core, or on CUDA one running while another is written."""
    workers = min(MAX_WORKERS, len(os.sched_getaffinity(0))) if device == "cpu" else 1
    record = lambda batch: list(recorder.record([row.input_ids for row in batch], stored))  # noqa: E731
    with side_by_side(workers) as threads:
        waiting = deque[tuple[list[Row], Future[States]]]()
        for batch in batches:
            waiting.append((batch, threads.submit(record, batch)))
            if len(waiting) > workers:
                done, states = waiting.popleft()
                yield done, states.result()
        for done, states in waiting:
            yield done, states.result()


def check_disk(folder: Path, info: StoreInfo, tokens: int, last_states: int, written: int = 0) -> None:
    """Refuse before any work when the states would not fit.

    Raises:
        InputError: The disk of `folder` has less room than the states that are not `written` yet need.
    """
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    needed = info.num_bytes(tokens, last_states)
    if needed - written > MOST_OF_DISK * free:
        raise InputError(
            f"capture: {describe_bytes(info, tokens, last_states)}, but {folder} has {readable(free)} free; compute "
            f"them while training (capture.mode=online), or use {_smaller(info, tokens, last_states)}fewer prompts "
            f"(prompts.limit), shorter rows (encode.max_length), or another disk (DRAFTHEAD_CACHE=...)"
        )


def describe_bytes(info: StoreInfo, tokens: int, last_states: int) -> str:
    """What the states of so many tokens take on disk, layers and last states apart."""
    vector = vector_bytes(info.hidden_size, info.dtype)
    return (
        f"{tokens:,} tokens x {len(info.layer_ids)} layers x {vector:,} bytes = "
        f"{readable(info.num_bytes(tokens, 0))}, with {last_states:,} last states "
        f"{readable(info.num_bytes(tokens, last_states))}"
    )


def _smaller(info: StoreInfo, tokens: int, last_states: int) -> str:
    """The type of one byte a value, where it is not chosen yet."""
    if info.dtype in CODES:
        return ""
    small = replace(info, dtype="int8").num_bytes(tokens, last_states)
    return f"states of one byte a value (capture.dtype=int8: {readable(small)}), "


def readable(size: float) -> str:
    return f"{size / 1e12:,.1f} TB" if size >= 1e12 else f"{size / 1e9:,.1f} GB"


class FeatureGate:
    """Stored last states must lead to the target's own logits, by way of the tensors on disk."""

    EVERY = 32

    def __init__(self, model: Any, target: Target, dtype: str):
        self.model = model
        self.dtype = dtype
        self.logits = StateLogits(target)
        self.batches = 0

    def check(self, row: Row, last_TD: Tensor) -> None:
        """Look at a few positions of one row, now and then.

        Raises:
            GateError: norm + lm_head of the state is not what the target computes.
        """
        self.batches += 1
        if self.batches % self.EVERY != 1:
            return
        ids = torch.tensor([row.input_ids], device=self.model.device)
        with torch.inference_mode():
            own_QV = self.model(input_ids=ids, use_cache=False, logits_to_keep=4).logits[0].float().cpu()
        state_QD = last_TD[len(row.input_ids) - len(own_QV) : len(row.input_ids)].cpu()
        difference = (self.logits(state_QD) - own_QV).abs().max() / own_QV.abs().max()
        if not difference <= LOGIT_TOLERANCE[self.dtype]:
            raise GateError(
                "FeatureGate",
                f"row {row.key}",
                f"norm + lm_head of the captured last state differs from the target's logits by {difference:.3g} of "
                f"their size (allowed: {LOGIT_TOLERANCE[self.dtype]}); the state is not the one before the final norm, "
                f"or the target scales or caps its logits",
            )


def length_batches(rows: list[Row], batch_tokens: int) -> Iterator[list[Row]]:
    """Rows of similar length together, longest first; at most `batch_tokens` tokens with padding."""
    ordered = sorted(rows, key=lambda row: -len(row.input_ids))
    while ordered:
        size = max(1, batch_tokens // len(ordered[0].input_ids))
        yield ordered[:size]
        ordered = ordered[size:]
