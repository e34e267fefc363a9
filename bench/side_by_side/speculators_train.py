"""Trains speculators' EAGLE-3 model for so many seconds; run by bench/equal_minutes.py with the interpreter of
speculators' own environment.

As its trainer does by default (see speculators_step.py), the schedule as long as what fits into the seconds by the
speed of a few steps before. The model is saved as its checkpoints are, which vLLM loads.
"""

import json
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from speculators_step import Trainer, batch_of

TRIAL_STEPS = 8
"""The first of them is slower."""


def main() -> None:
    folder = Path(sys.argv[1])
    settings = json.loads((folder / "settings.json").read_text())
    torch.set_num_threads(settings["threads"])
    torch.manual_seed(settings["seed"])
    trial = Trainer(folder, settings, total_steps=TRIAL_STEPS)
    batches = [batch_of(folder / f"{number % settings['packs']}.safetensors") for number in range(TRIAL_STEPS)]
    times = [trial.step(batch)[1] for batch in batches]
    total = max(1, round(settings["seconds"] / statistics.mean(times[1:])))
    del trial
    print(f"speculators: {statistics.mean(times[1:]):.2f} s a step, {total} steps", file=sys.stderr, flush=True)

    torch.manual_seed(settings["seed"])
    trainer = Trainer(folder, settings, total_steps=total)
    losses, tokens = [], 0
    start = time.perf_counter()
    for number, batch in enumerate(load_ahead(folder, settings["packs"], total)):
        losses.append(trainer.step(batch)[0])
        tokens += batch["input_ids"].numel()
        if number % 50 == 0 or number == total - 1:
            spent = time.perf_counter() - start
            line = f"speculators: step {number + 1}/{total}, loss {losses[-1]:.3f}, {spent:.0f} s"
            print(line, file=sys.stderr, flush=True)
    seconds = time.perf_counter() - start
    trainer.model.save_pretrained(settings["out"])
    report = {"tokens": tokens, "seconds": seconds, "steps": total, "loss": statistics.mean(losses[-20:])}
    (folder / "report.json").write_text(json.dumps(report))


def load_ahead(folder: Path, packs: int, steps: int) -> Iterator[dict[str, torch.Tensor]]:
    """Batches, each read while the one before is trained on."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(batch_of, folder / "0.safetensors")
        for number in range(1, steps + 1):
            batch = waiting.result()
            waiting = pool.submit(batch_of, folder / f"{number % packs}.safetensors")
            yield batch


if __name__ == "__main__":
    main()
