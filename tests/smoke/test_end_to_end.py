"""The smoke recipe through the command line: killed four times, it still ends in the same head, bit for bit."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drafthead.eval.engine import is_available
from drafthead.pipeline.run_dir import Run

pytestmark = pytest.mark.slow
COMMAND = [sys.executable, "-m", "drafthead.pipeline.cli"]
RECIPE = ["run", "smoke/eagle3", "run.name=tiny"]
Reached = Callable[[], object]


def kill_when(reached: Reached, folder: Path, number: signal.Signals = signal.SIGKILL) -> None:
    """Start `drafthead run` and kill that one process as soon as `reached`."""
    log = folder / "stderr.txt"
    with open(log, "w") as stderr:
        process = subprocess.Popen([*COMMAND, *RECIPE], cwd=folder, stdout=subprocess.DEVNULL, stderr=stderr)
        end = time.monotonic() + 400
        while not reached():
            if process.poll() is not None or time.monotonic() > end:
                process.kill()
                pytest.fail(f"it ended before: {log.read_text()[-3000:]}")
            time.sleep(0.002)
        process.send_signal(number)
        process.wait(timeout=100)
    assert "Traceback" not in log.read_text()


def state(run: Path, stage: str) -> Any:
    path = run / "run.json"
    return json.loads(path.read_text())["stages"].get(stage, {}).get("state") if path.exists() else None


def test_killed_four_times_it_ends_in_the_same_head(
    tiny_run: Run, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTHEAD_CACHE", str(tmp_path / "cache"))  # nothing of the tiny run may be used
    run = tmp_path / "runs" / "tiny"
    part = run / "respond" / "answers.part.jsonl"
    moments: dict[str, Reached] = {
        "respond": lambda: part.exists() and part.stat().st_size > 0,
        "capture": lambda: state(run, "capture") == "running",
        "train": lambda: list(run.glob("train/checkpoints/step-*")),
        "eval": lambda: state(run, "eval") == "running",
    }
    for stage, reached in moments.items():
        kill_when(reached, tmp_path)
        assert not (run / stage / "manifest.json").exists(), f"{stage} was over before the kill"
    kill_when(lambda: state(run, "export") == "finished", tmp_path, signal.SIGINT)

    exported, expected = run / "export", tiny_run.path / "export"
    assert (exported / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()
    assert (exported / "config.json").read_bytes() == (expected / "config.json").read_bytes()
    ours, theirs = (json.loads((one / "eval" / "report.json").read_text()) for one in (run, tiny_run.path))
    assert ours == theirs
    log = [json.loads(line) for line in (run / "train" / "log.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in log if "loss" in row]
    assert steps == sorted(set(steps)), "a resumed log repeats no step"


@pytest.mark.serve
@pytest.mark.skipif(not is_available(), reason="vllm is not installed")
def test_served_check_of_the_tiny_head(tiny_run: Run, cache: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "serve-check", str(tiny_run.path), "--k", "3", "--json"],
        capture_output=True,
        text=True,
        env=dict(os.environ),
        timeout=900,
    )
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert done.returncode == (0 if report["ok"] else 1)
    assert report["ok"] == (not report["failures"])
    count = report["prompts"]
    assert report["identical_to_plain"] == f"{count}/{count}"
    for kind in ("predicted", "served"):
        assert report[kind]["k"] == 3
        assert len(report[kind]["per_position"]) == 3
    differences = [
        abs(ours - theirs)
        for ours, theirs in zip(report["predicted"]["per_position"], report["served"]["per_position"], strict=True)
    ]
    assert report["ok"] == (max(differences) <= tiny_run.recipe.serve_check.tolerance)
