"""Killed with SIGKILL at random moments of any stage, `drafthead run` ends in the export of one left alone, bit by bit.

DRAFTHEAD_KILLS=50 make test ARGS="-k pipeline_kills"        # fifty moments instead of a handful
"""

import contextlib
import functools
import json
import multiprocessing
import os
import random
import runpy
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest
from drafthead.data.files import read_json
from drafthead.pipeline.run_dir import MANIFEST, Run

from tests.conftest import CHILD, PRELOAD, THROUGH_EXPORT

pytestmark = pytest.mark.slow
KILLS = int(os.environ.get("DRAFTHEAD_KILLS", "3"))
KILLS_OF_A_RUN = 4
START, START_S = "start", 1.0
"""Before the first stage: the target is made, the run is set up."""
FINER = ("respond.max_num_seqs=3", "capture.shard_tokens=400", "train.checkpoint_every=10")
"""More places to go on from than in the run that is left alone; the key of no stage knows of them."""
SAME = (
    "respond/answers.jsonl",
    "encode/train.parquet",
    "train/head.safetensors",
    "train/report.json",
    "eval/report.json",
    "export/config.json",
    "export/model.safetensors",
)


class Pipeline:
    """`drafthead run` in one folder, with a cache of its own and each time in a new process group."""

    def __init__(self, folder: Path):
        folder.mkdir()
        self.folder = folder
        self.run = folder / "runs" / "tiny"
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(list(PRELOAD))

    def start(self) -> BaseProcess:
        call = {
            "argv": ["drafthead", "run", "smoke/eagle3", "run.name=tiny", *FINER],
            "cwd": str(self.folder),
            "env": {**os.environ, "DRAFTHEAD_CACHE": str(self.folder / "cache"), "WANDB_MODE": "disabled"},
            "stdout": str(self.folder / "stdout"),
            "stderr": str(self.folder / "stderr"),
            "own_group": True,
        }
        process = self.context.Process(target=runpy.run_path, args=(str(CHILD), {"CALL": call}))
        process.start()
        return process

    def kill_when(self, reached: Callable[[], bool], then_s: float = 0.0) -> None:
        """Start the command and kill its process group `then_s` after it has `reached` something."""
        process = self.start()
        end = time.monotonic() + 200
        while not reached():
            assert process.exitcode is None, self.stderr()
            assert time.monotonic() < end, self.stderr()
            time.sleep(0.001)
        process.join(then_s)
        assert process.exitcode is None, self.stderr()
        with contextlib.suppress(ProcessLookupError):  # not in a group of its own yet
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
        self.assert_no_orphan()
        assert "Traceback" not in self.stderr()

    def has_begun(self, stage: str) -> bool:
        return stage == START or stage in self.states()

    def is_through(self) -> bool:
        return self.states().get("export") == "finished"

    def states(self) -> dict[str, str]:
        """`running` or `finished` of each stage that has begun."""
        path = self.run / "run.json"
        stages = json.loads(path.read_text()).get("stages", {}) if path.exists() else {}
        return {name: one["state"] for name, one in stages.items()}

    def stderr(self) -> str:
        path = self.folder / "stderr"
        return path.read_text(errors="replace")[-3000:] if path.exists() else ""

    def assert_no_orphan(self) -> None:
        """The training worker has a session of its own, and must end all the same."""
        end = time.monotonic() + 10
        while left := [one.pid for one in psutil.process_iter(["cwd"]) if one.info["cwd"] == str(self.folder)]:
            assert time.monotonic() < end, f"still running: {left}"
            time.sleep(0.01)


def test_pipeline_kills_at_random_moments_change_nothing(tiny_run: Run, cache: Path, tmp_path: Path) -> None:
    stages = (START, *THROUGH_EXPORT)
    seconds = {name: read_json(tiny_run.folder(name) / MANIFEST)["seconds"] for name in THROUGH_EXPORT}
    seconds[START] = START_S
    moments = random.Random(KILLS)  # another number of kills has other moments
    left, number = KILLS, 0
    while left:
        pipeline = Pipeline(tmp_path / f"killed-{number}")
        count = min(left, KILLS_OF_A_RUN)
        for place in sorted(moments.choices(range(len(stages)), k=count)):
            stage = stages[place]
            then_s = moments.uniform(0, max(0.05, seconds[stage]))
            pipeline.kill_when(functools.partial(pipeline.has_begun, stage), then_s)
            states = pipeline.states()
            where = next((name for name in states if states[name] == "running"), "between stages")
            print(f"run {number}: killed {then_s:.3f} s after the beginning of {stage}: {where}")
        pipeline.kill_when(pipeline.is_through)  # the served check needs a vLLM
        for name in SAME:
            assert (pipeline.run / name).read_bytes() == (tiny_run.path / name).read_bytes(), (pipeline.run, name)
        folders = [(pipeline.run / name).resolve() for name in THROUGH_EXPORT]
        torn = [path for folder in folders for end in ("part", "old") for path in folder.rglob(f".*.{end}")]
        assert not torn, torn
        left, number = left - count, number + 1
