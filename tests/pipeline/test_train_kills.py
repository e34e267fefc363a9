"""C17: killed with SIGKILL at random moments, a training ends in the weights of one that was left alone, bit for bit.

DRAFTHEAD_KILLS=50 make test ARGS="-k kills"        # fifty moments instead of a handful
"""

import multiprocessing
import os
import random
import runpy
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from drafthead.data.files import read_json, read_jsonl
from drafthead.pipeline.run_dir import Run
from safetensors.torch import load_file

pytestmark = pytest.mark.slow
KILLS = int(os.environ.get("DRAFTHEAD_KILLS", "5"))
CHILD = Path(__file__).with_name("train_child.py")
STEPS = (
    "train.tokens=4k",
    "train.batch_tokens=256",
    "train.depth=2",
    "train.evaluate_every=4",
    "train.checkpoint_every=1",
    "train.log_every=1",
)


def train(run: Run, kill_after_s: float | None) -> bool:
    """Train in a process of its own; returns whether it was killed."""
    environment = {"DRAFTHEAD_CACHE": os.environ["DRAFTHEAD_CACHE"], "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    call = {"CALL": {"run": str(run.path), "env": environment}}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["drafthead.pipeline.stages"])
    process = context.Process(target=runpy.run_path, args=(str(CHILD), call))
    process.start()
    process.join(100 if kill_after_s is None else kill_after_s)
    killed = process.exitcode is None
    assert not (killed and kill_after_s is None), "it hangs"
    process.kill()
    process.join()
    assert killed or process.exitcode == 0
    return killed


def rates(run: Run) -> list[tuple[int, float]]:
    rows = read_jsonl(run.path / "train" / "log.jsonl")
    return [(row["step"], row["learning_rate"]) for row in rows if "learning_rate" in row]


def test_kills_at_random_moments_change_nothing(make_run: Any, tiny_run: Run) -> None:
    def ready(name: str) -> Run:
        run: Run = make_run(name, *STEPS)
        for stage in ("prompts", "respond", "encode", "draft-vocab", "capture"):
            run.run_stage(stage)
        (run.path / "train").mkdir()
        return run

    straight = ready("straight")
    train(straight, None)  # the first pays for the fork server
    again = ready("again")
    start = time.monotonic()
    train(again, None)
    whole_s = time.monotonic() - start
    expected = load_file(straight.path / "train" / "head.safetensors")

    moments = random.Random(17)
    kills = 0
    number = 0
    while kills < KILLS:
        run = ready(f"killed-{number}")
        number += 1
        while kills < KILLS and train(run, moments.uniform(0.2, 1.0) * whole_s):
            kills += 1
        train(run, None)
        found = load_file(run.path / "train" / "head.safetensors")
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), run.path
        assert read_json(run.path / "train" / "report.json") == read_json(straight.path / "train" / "report.json")
        assert rates(run) == rates(straight)
        assert number < 10 * KILLS, "trainings end before they can be killed"
