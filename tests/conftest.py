"""Shared by the tests of the pipeline: a cache of their own, a finished tiny run, and the command line.

The tiny run is the smoke recipe on `builtin:tiny-random`, from prompts to export, made once a session.
"""

import json
import multiprocessing
import os
import runpy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from drafthead.pipeline.cli import quiet_libraries
from drafthead.pipeline.recipe import load_recipe
from drafthead.pipeline.run_dir import Run, create_run
from drafthead.pipeline.stages import STAGES
from drafthead.pipeline.target import open_target

SMOKE = "smoke/eagle3"
THROUGH_EXPORT = tuple(name for name in STAGES if name != "serve-check")
CHILD = Path(__file__).with_name("cli_child.py")
PRELOAD = ("drafthead.pipeline.stages", "drafthead.pipeline.plan", "drafthead.pipeline.doctor")

MakeRun = Callable[..., Run]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tests use tiny tensors, for which a second thread of torch only waits, badly so on a busy machine."""
    torch.set_num_threads(1)


def reset_accelerator() -> None:
    """Accelerate keeps its settings in class variables; each training of a process needs new ones."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.fixture
def fresh_accelerator() -> Iterator[None]:
    """For tests that train in this process."""
    reset_accelerator()
    yield
    reset_accelerator()


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def cache(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The session's cache for this test, and W&B that writes files only."""
    set_environment(monkeypatch, cache_folder)
    return cache_folder


def set_environment(patch: pytest.MonkeyPatch, cache: Path) -> None:
    patch.setenv("DRAFTHEAD_CACHE", str(cache))
    patch.setenv("WANDB_MODE", "offline")
    patch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def tiny_run(cache_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run finished through export; tests must not change its files."""
    with pytest.MonkeyPatch.context() as patch:
        set_environment(patch, cache_folder)
        run = create_run(load_recipe(SMOKE, [f"run.dir={tmp_path_factory.mktemp('runs')}", "run.name=tiny"]), STAGES)
        for name in THROUGH_EXPORT:
            run.run_stage(name)
    return run


@pytest.fixture
def make_run(cache: Path, tmp_path: Path) -> MakeRun:
    """Make a run of the smoke recipe with overrides, below `tmp_path`."""

    def make(name: str, *overrides: str) -> Run:
        return create_run(load_recipe(SMOKE, [f"run.dir={tmp_path}/runs", f"run.name={name}", *overrides]), STAGES)

    return make


# ---- the command line ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Done:
    """What one command left behind."""

    code: int
    stdout: str
    stderr: str

    @property
    def complaints(self) -> list[str]:
        """The lines that are drafthead's own last word; a bar that is overwritten counts as a line."""
        return [line for line in self.stderr.splitlines() if line.startswith("drafthead:")]

    def json(self) -> dict[str, Any]:
        """The one object on stdout; anything beside it fails."""
        value = json.loads(self.stdout)
        assert isinstance(value, dict)
        return value


class CommandLine:
    """Run `drafthead ...` in a process of its own, forked from one that has imported everything already."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(list(PRELOAD))

    def __call__(self, *arguments: object, timeout: float = 240, **limits: Any) -> Done:
        """`limits`: see cli_child.py."""
        streams = {name: self.folder / f".{name}" for name in ("stdout", "stderr")}
        call = {
            "argv": ["drafthead", *map(str, arguments)],
            "cwd": str(self.folder),
            "env": dict(os.environ),
            **{name: str(path) for name, path in streams.items()},
            **limits,
        }
        process = self.context.Process(target=runpy.run_path, args=(str(CHILD), {"CALL": call}))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            pytest.fail(f"drafthead {arguments}: no end after {timeout} s: {streams['stderr'].read_text()[-2000:]}")
        stdout, stderr = (path.read_text(encoding="utf-8", errors="replace") for path in streams.values())
        return Done(process.exitcode, stdout, stderr)


@pytest.fixture
def drafthead(cache: Path, tmp_path: Path) -> CommandLine:
    """The command line, run in `tmp_path`."""
    quiet_libraries()
    return CommandLine(tmp_path)


@pytest.fixture
def tiny_target(cache: Path) -> Path:
    """The folder of `builtin:tiny-random`; tests must not change it."""
    return open_target("builtin:tiny-random").path
