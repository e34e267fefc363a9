"""The training step of an EAGLE-3 head beside speculators', on the same packs of one run's captured states.

    python bench/train.py runs/eagle3 --speculators /path/to/its/environment/bin/python [--steps 40] [--json]

speculators lives in an environment of its own (`pip install speculators`), whose interpreter is run as a subprocess;
without one, ours alone is measured. How to read the table: bench/README.md.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
# this folder's kernels.py bears the name of a package that transformers looks for
sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() != ROOT / "bench"]

from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from drafthead.data.batches import Pack, plan_epoch  # noqa: E402
from drafthead.data.errors import InputError  # noqa: E402
from drafthead.pipeline.cli import quiet_libraries  # noqa: E402
from drafthead.pipeline.heads.build import build_head  # noqa: E402
from drafthead.pipeline.launch import make_accelerator  # noqa: E402
from drafthead.pipeline.optim import build_optimizer  # noqa: E402
from drafthead.pipeline.recipe import Eagle3Config, Recipe  # noqa: E402
from drafthead.pipeline.run_dir import Run, open_run  # noqa: E402
from drafthead.pipeline.stages import STAGES  # noqa: E402
from drafthead.pipeline.train import resolve_precision  # noqa: E402
from drafthead.pipeline.train_inputs import Inputs, loader_of  # noqa: E402
from drafthead.pipeline.train_log import Tally  # noqa: E402
from drafthead.pipeline.train_step import micro_batch_threads, take_step  # noqa: E402

sys.path.append(str(ROOT / "bench"))
from side_by_side.packs import write_packs  # noqa: E402

sys.path.remove(str(ROOT / "bench"))

PEER = ROOT / "bench" / "side_by_side" / "speculators_step.py"
BAR = 2.7
"""Times speculators' tokens a second that ours has to reach on two cores."""
Step = Callable[[list[int]], float]
"""Trains on the packs of these numbers; returns the seconds that it took."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 if a peer that was asked for could not be run."""
    options = _options(argv)
    if not (options.run / "recipe.yaml").is_file():
        print(
            f"{options.run}: no run to take states from; give one with finished stages up to capture", file=sys.stderr
        )
        return 0 if argv is None and len(sys.argv) == 1 else 2
    quiet_libraries()  # a line of DeepSpeed's own before the JSON object
    if options.threads:
        torch.set_num_threads(options.threads)
    run = open_run(options.run, STAGES, [])
    if not isinstance(run.recipe.head, Eagle3Config):
        raise InputError(f"{options.run}: a {run.recipe.head.type} head; the comparison is of EAGLE-3 heads")
    inputs = Inputs.open(run)
    each = run.recipe.train.accumulation
    packs = pick_packs(run.recipe, inputs, each * (options.warm_up + options.steps))
    steps = [list(range(first, first + each)) for first in range(0, len(packs) - each + 1, each)]
    contenders: dict[str, Step] = {
        name: our_step(one, run, inputs, packs) for name, one in variants(run.recipe).items()
    }
    with ExitStack() as stack:
        failure = None
        if options.speculators:
            try:
                contenders["speculators"] = stack.enter_context(Peer(options.speculators, run, packs))
            except PeerError as error:
                failure = str(error)
                print(f"speculators: cannot run: {failure}", file=sys.stderr)
        seconds = measure(contenders, steps)
    tokens = [sum(len(packs[number].tokens_T) for number in step) for step in steps]
    rows = {name: speed(times[options.warm_up :], tokens[options.warm_up :]) for name, times in seconds.items()}
    report = {
        "run": str(options.run),
        "threads": torch.get_num_threads(),
        "precision": resolve_precision(run.recipe),
        "tokens_a_step": sum(tokens) / len(tokens),
        "micro_batches_a_step": each,
        "tokens_per_s": rows,
        "speculators_failed": failure,
    }
    print(json.dumps(report, indent=1) if options.json else render(report))
    return int(failure is not None)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python bench/train.py", description=main.__doc__)
    parser.add_argument(
        "run", type=Path, nargs="?", default=ROOT / "runs" / "eagle3", help="a run whose states are used"
    )
    parser.add_argument("--speculators", help="the Python interpreter of an environment with speculators")
    parser.add_argument("--steps", type=int, default=40, help="steps that are timed, of each contender")
    parser.add_argument("--warm-up", type=int, default=5, help="steps before them")
    parser.add_argument("--threads", type=int, help="of each contender")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    return parser.parse_args(argv)


def pick_packs(recipe: Recipe, inputs: Inputs, count: int) -> list[Pack]:
    """The first packs that a training would see."""
    lengths = [len(row.input_ids) for row in inputs.rows]
    dealt: list[list[int]] = []
    for epoch in range(count):
        dealt += plan_epoch(lengths, recipe.train.batch_tokens, recipe.run.seed, epoch)
        if len(dealt) >= count:
            break
    load = loader_of(inputs.store)
    return [load([inputs.rows[row] for row in pack]) for pack in dealt[:count]]


def variants(recipe: Recipe) -> dict[str, Recipe]:
    """The recipe as it is, and one that does the work that speculators does: every slot at every step, all trained."""
    everything = {
        "head": recipe.head.model_copy(update={"train_lm_head": True}),
        "train": recipe.train.model_copy(update={"chains": "all", "loss_vocab": None}),
    }
    return {"ours, by the recipe": recipe, "ours, every slot at every step": recipe.model_copy(update=everything)}


def our_step(recipe: Recipe, run: Run, inputs: Inputs, packs: list[Pack]) -> Step:
    """Make a head and return what takes its step on the packs of the given numbers, as the training loop does."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    settings = recipe.train
    precision = resolve_precision(recipe)
    accelerator = make_accelerator(
        "single", precision=precision, accumulation=settings.accumulation, max_grad_norm=settings.max_grad_norm
    )
    inputs.place(accelerator.device, precision)
    head = build_head(recipe.head, run.target, inputs.frozen, packs[0].aux_TAD.shape[1], recipe.run.seed)
    model, optimizer = accelerator.prepare(head, build_optimizer(head, settings))
    model.train()
    read = inputs if settings.loss_vocab else replace(inputs, loss_vocab=None)
    threads = micro_batch_threads(accelerator, settings.accumulation)

    def step(numbers: list[int]) -> float:
        chosen = [packs[number] for number in numbers]
        slots = sum(int((pack.supervised_T & (pack.position_T >= 2)).sum()) for pack in chosen)
        start = time.perf_counter()
        take_step(accelerator, model, optimizer, iter(chosen), read, slots, settings, Tally(), threads)
        return time.perf_counter() - start

    return step


class PeerError(RuntimeError):
    """The peer's process ended, with its last words."""


class Peer:
    """speculators' step in a process of its own, which answers each number on its input with seconds."""

    def __init__(self, python: str, run: Run, packs: list[Pack]):
        self.folder = tempfile.TemporaryDirectory()
        folder = Path(self.folder.name)
        write_packs(folder, run, packs)
        self.stderr = folder / "stderr.txt"
        with open(self.stderr, "w") as stderr:
            self.process = subprocess.Popen(
                [python, str(PEER), str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )

    def __enter__(self) -> Step:
        try:
            self._answer()  # ready
        except PeerError:
            self.__exit__()
            raise
        return self.step

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()

    def step(self, numbers: list[int]) -> float:
        """A step of its own on each pack: it does not accumulate."""
        assert self.process.stdin is not None
        seconds = 0.0
        for number in numbers:
            self.process.stdin.write(f"{number}\n")
            self.process.stdin.flush()
            seconds += float(self._answer())
        return seconds

    def _answer(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("bench "):
                return line.split()[1]
        last = [line for line in self.stderr.read_text().splitlines() if line.strip()]
        raise PeerError(last[-1] if last else "it said nothing")


def measure(contenders: dict[str, Step], steps: list[list[int]]) -> dict[str, list[float]]:
    """Everyone takes a step before anyone takes the next, so that a slow minute is slow for all."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for numbers in steps:
        for name, take in contenders.items():
            seconds[name].append(take(numbers))
    return seconds


def speed(seconds: list[float], tokens: list[int]) -> dict[str, float]:
    """Tokens a second: over all steps, and the median step's."""
    each = [size / time for size, time in zip(tokens, seconds, strict=True)]
    return {"overall": sum(tokens) / sum(seconds), "median": median(each), "steps": len(each)}


def render(report: dict[str, Any]) -> str:
    rows: dict[str, dict[str, float]] = report["tokens_per_s"]
    peer = rows.get("speculators")
    lines = [
        f"{report['run']}: {report['tokens_a_step']:.0f} tokens a step, micro batches a step: "
        f"{report['micro_batches_a_step']}, threads: {report['threads']}, products in {report['precision']}",
        "",
        "| contender | tokens/s | median step's | x speculators |",
        "|---|---|---|---|",
    ]
    for name, row in rows.items():
        times = f"{row['overall'] / peer['overall']:.2f}" if peer else "-"
        lines.append(f"| {name} | {row['overall']:,.0f} | {row['median']:,.0f} | {times} |")
    if peer:
        lines += ["", f"bar: {BAR} x speculators, by the recipe, on two cores"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
