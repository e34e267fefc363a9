"""Trains speculators' EAGLE-3 model for so many seconds; run by bench/equal_minutes.py with the interpreter of
speculators' own environment.

As its trainer does by default (see speculators_step.py), its rates following the share of the seconds that is spent, so
that the schedule ends with them. The model is saved as its checkpoints are, which vLLM loads.
"""

import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from speculators_step import Trainer, batch_of

REPORT_EVERY = 50
FIRST_SHARE = 0.001
"""Share of the training that counts as done at the first step: a rate of 0 would waste it."""


def main() -> None:
    folder = Path(sys.argv[1])
    settings = json.loads((folder / "settings.json").read_text())
    torch.set_num_threads(settings["threads"])
    torch.manual_seed(settings["seed"])
    trainer = Trainer(folder, settings)
    losses, tokens, wanted = [], 0, settings["seconds"]
    start = time.perf_counter()
    for batch in load_ahead(folder, settings["packs"]):
        spent = time.perf_counter() - start
        if spent >= wanted:
            break
        losses.append(trainer.step(batch, max(spent / wanted, FIRST_SHARE))[0])
        tokens += batch["input_ids"].numel()
        if len(losses) % REPORT_EVERY == 1:
            line = f"speculators: step {len(losses)}, loss {losses[-1]:.3f}, {spent:.0f} of {wanted:.0f} s"
            print(line, file=sys.stderr, flush=True)
    seconds = time.perf_counter() - start
    trainer.model.save_pretrained(settings["out"])
    report = {"tokens": tokens, "seconds": seconds, "steps": len(losses), "loss": statistics.mean(losses[-20:])}
    (folder / "report.json").write_text(json.dumps(report))


def load_ahead(folder: Path, packs: int) -> Iterator[dict[str, torch.Tensor]]:
    """Batches without end, each read while the one before is trained on."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(batch_of, folder / "0.safetensors")
        for number in itertools.count(1):
            batch = waiting.result()
            waiting = pool.submit(batch_of, folder / f"{number % packs}.safetensors")
            yield batch


if __name__ == "__main__":
    main()
