"""The benchmark of the training step: ours is measured, and a peer that cannot run is named with its reason."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from drafthead.pipeline.run_dir import Run

BENCH = Path(__file__).resolve().parents[1] / "bench" / "train.py"


def measured(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH), *map(str, arguments), "--steps", "2", "--warm-up", "1", "--json"]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
def test_a_peer_that_cannot_run_costs_its_own_line(tiny_run: Run, cache: Path) -> None:
    done = measured(tiny_run.path, "--speculators", sys.executable)  # our environment has no speculators
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert report["speculators_failed"] == "ModuleNotFoundError: No module named 'speculators'"
    assert set(report["tokens_per_s"]) == {"ours, by the recipe", "ours, every slot at every step"}
    assert all(row["overall"] > 0 and row["steps"] == 2 for row in report["tokens_per_s"].values())


@pytest.mark.slow
def test_no_run_is_one_line(tmp_path: Path) -> None:
    done = measured(tmp_path / "nowhere")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "no run to take states from" in line
