"""What a training writes down as it goes: sums between log lines, log.jsonl, Weights & Biases."""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drafthead.data.files import read_partial_jsonl, write_jsonl
from drafthead.pipeline.heads.base import HeadOutput
from drafthead.pipeline.throughput import StepClock
from drafthead.pipeline.tracking import Tracker


@dataclass
class Tally:
    """Sums of the steps since the last log line."""

    clock: StepClock = field(default_factory=StepClock)
    steps: int = 0
    loss: float = 0.0
    slots: int = 0
    tokens: int = 0
    run: list[float] = field(default_factory=list)
    survived: list[float] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    overlap: list[float] = field(default_factory=list)
    start: float = field(default_factory=time.monotonic)

    def add(self, output: HeadOutput) -> None:
        self.loss += float(output.loss.detach())
        self.slots += int(output.rows_K[0])
        survived, chances = output.survived_K.tolist(), output.rows_K.tolist()
        self.run = _added(self.run, output.run_K.tolist())
        self.survived = _added(self.survived, survived)
        self.chances = _added(self.chances, chances)
        self.overlap = _added(self.overlap, output.overlap_K.tolist())

    def count_step(self, tokens: int) -> None:
        """Count a step of so many tokens, those of all processes."""
        self.steps += 1
        self.tokens += tokens

    def metrics(self, flops: int = 0) -> dict[str, float]:
        """Values of this process, but `tokens_per_s` of all.

        Times are means over the steps; `tflops` says how many of its `flops` (10^12) it did in a second.
        `slot_survival_*` averages over slots (with `chains: served` the later ones over those where a round starts) and
        so overestimates serving; `draft_vocab_overlap_*` is sum min(p, q) of the slots that were trained on, with p
        renormalised over the draft vocabulary.
        """
        elapsed = time.monotonic() - self.start
        steps = max(1, self.steps)
        values = {
            "loss": self.loss / max(1, self.slots),
            "tokens_per_s": self.tokens / elapsed,
            "step_ms": 1e3 * elapsed / steps,
            **{f"{part}_ms": 1e3 * seconds / steps for part, seconds in self.clock.seconds().items()},
            "tflops": flops / elapsed / 1e12,
        }
        columns = zip(self.survived, self.overlap, self.chances, strict=True)
        for step, (hit, overlap, chance) in enumerate(columns, start=1):
            values[f"slot_survival_{step}"] = hit / max(1, chance)
            values[f"draft_vocab_overlap_{step}"] = overlap / max(1, chance)
        return values


def _added(sums: list[float], values: list[float]) -> list[float]:
    return [a + b for a, b in zip(sums, values, strict=True)] if sums else values


class TrainLog:
    """log.jsonl: one object a line; lines of steps that will be trained again are cut off on resume."""

    def __init__(self, path: Path, step: int):
        self.path = path
        write_jsonl(path, [row for row in read_partial_jsonl(path) if row["step"] <= step])

    def append(self, row: dict[str, Any]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def unlearned(path: Path) -> str | None:
    """One line about a loss that is no lower at the end of a training than at its beginning."""
    rows = [row for row in read_partial_jsonl(path) if "loss" in row]
    if len(rows) < 3 or rows[-1]["loss"] < rows[0]["loss"]:
        return None
    first, last = rows[0], rows[-1]
    return (
        f"WARNING: train: the loss has not fallen: {first['loss']:.3f} at step {first['step']:,}, {last['loss']:.3f} "
        f"at step {last['step']:,}; look at train.learning_rate and at the data (`drafthead inspect`)"
    )


@dataclass
class Sinks:
    """Where the main process writes its numbers."""

    log: TrainLog | None
    tracker: Tracker

    def write(self, step: int, values: dict[str, Any], prefix: str) -> None:
        if self.log is None:
            return
        self.log.append({"step": step, **values})
        self.tracker.log({f"{prefix}/{name}": value for name, value in values.items()}, step)
