"""Two ranks: the gradient of one process over all their batches, no waiting for a silent rank, one line of error."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from drafthead.data.errors import InputError
from drafthead.pipeline.checkpoint import resumed_accumulation
from drafthead.pipeline.launch import build_ops, launch_command
from drafthead.pipeline.ranks import NOTE, forget_failures, say_once
from drafthead.pipeline.run_dir import Run

UNEVEN = [[0, 1, 2, 3], [4], [5], [6, 7]]
SILENT = 1
"""Pack of the second rank in the first of two micro batches."""


def one_step(run: Run, launch: str, packs: list[list[int]], silent: int, folder: Path) -> Any:
    out = folder / f"{launch}.pt"
    build_ops(launch)
    command, variables = launch_command(
        launch, "rank_worker", [str(run.path), launch, json.dumps(packs), str(silent), str(out)]
    )
    environment = {**os.environ, **variables, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(out)


@pytest.mark.slow
@pytest.mark.parametrize("launch", ["ddp", "zero3"])
def test_uneven_and_silent_ranks_take_the_step_of_one_process(
    launch: str, tiny_run: Run, cache: Path, tmp_path: Path
) -> None:
    union = [[row for number, pack in enumerate(UNEVEN) for row in pack if number != SILENT]]
    alone = one_step(tiny_run, "single", union, -1, tmp_path)
    both = one_step(tiny_run, launch, UNEVEN, SILENT, tmp_path)
    assert (alone["ranks"], both["ranks"]) == (1, 2)
    assert both["norm"] == pytest.approx(alone["norm"], rel=1e-5)
    # fp32 sums of some 200 rows in another order, read from weights of size 1: 1e-7 of them, a few times over
    largest = max(float(gradient.abs().max()) for gradient in alone["gradients"].values())
    assert largest > 1e-3
    for name, gradient in alone["gradients"].items():
        torch.testing.assert_close(both["gradients"][name], gradient, rtol=1e-4, atol=1e-6 + 1e-4 * largest)


# ---- failures of ranks

RANK = """
import os, sys, time
from pathlib import Path
from drafthead.data.errors import InputError
from drafthead.pipeline.ranks import say_once
folder, kind = Path(sys.argv[1]), sys.argv[2]
with say_once(folder):
    if kind == "both" or os.environ["RANK"] == "1":
        raise InputError("recipe: this will not do")
    while not list(folder.glob(".failed-*")):
        time.sleep(0.01)
    raise RuntimeError("Connection closed by peer")
"""


@pytest.mark.parametrize("kind", ["both", "one"])
def test_failing_ranks_say_why_in_one_line(kind: str, tmp_path: Path) -> None:
    worker = [sys.executable, "-c", RANK, str(tmp_path), kind]
    ranks = [
        subprocess.Popen(worker, env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"}, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    said = "".join(rank.communicate(timeout=100)[1].decode() for rank in ranks)
    assert said == "drafthead: recipe: this will not do\n"
    assert all(rank.returncode for rank in ranks)
    assert ranks[1].returncode == 2
    assert forget_failures(tmp_path)
    assert not forget_failures(tmp_path)


def test_another_error_of_a_rank_shows_its_traceback(tmp_path: Path) -> None:
    code = RANK.replace('"Connection', '"A fault').replace("list(folder", "True or list(folder")
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), "one"],
        env={**os.environ, "RANK": "0", "WORLD_SIZE": "2"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "A fault" in done.stderr


def test_one_process_leaves_no_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit), say_once(tmp_path):
        raise InputError("no")
    assert not list(tmp_path.glob(f"{NOTE}*"))


# ---- another number of ranks


@pytest.mark.parametrize(
    ("before", "packs", "ranks", "accumulation"), [(8, 8, 4, 2), (8, 8, 8, 1), (4, 8, 8, 1), (1, 6, 3, 2), (2, 4, 1, 4)]
)
def test_a_step_stays_what_it_was(before: int, packs: int, ranks: int, accumulation: int) -> None:
    state = {"world_size": before, "packs_per_step": packs, "path": "run/train/checkpoints/step-4"}
    assert resumed_accumulation(state, ranks, deepspeed=False) == accumulation


@pytest.mark.parametrize(
    ("ranks", "deepspeed", "message"),
    [
        (
            3,
            False,
            r"step-4: its steps are of 8 micro batches \(written by 4 processes\), which 3 .* cannot share",
        ),
        (16, False, "a number that divides 8"),
        (2, True, r"step-4: written by 4 processes, this run has 2, and DeepSpeed's state .* start 4 processes"),
    ],
)
def test_ranks_that_cannot_go_on_say_so(ranks: int, deepspeed: bool, message: str) -> None:
    state = {"world_size": 4, "packs_per_step": 8, "path": "run/train/checkpoints/step-4"}
    with pytest.raises(InputError, match=message):
        resumed_accumulation(state, ranks, deepspeed=deepspeed)
