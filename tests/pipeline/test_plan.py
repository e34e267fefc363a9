"""What a run would take of the disk is known, and refused, before anything is done."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from drafthead.data.errors import InputError
from drafthead.pipeline.plan import check_states, make_plan, render_plan
from drafthead.pipeline.recipe import Recipe, load_recipe
from drafthead.pipeline.target import open_target


@pytest.fixture
def small_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000_000))


def recipe(tmp_path: Path, *overrides: str) -> Recipe:
    """24 prompts of at most 110 + 24 tokens, on a target 64 wide; with a seed of which no states are in the cache."""
    return load_recipe("smoke/eagle3", [f"run.dir={tmp_path}", "run.seed=77", "capture.last=read", *overrides])


@pytest.mark.usefixtures("cache", "small_disk")
def test_states_that_do_not_fit_are_refused_before_any_stage(tmp_path: Path) -> None:
    chosen = recipe(tmp_path)
    with pytest.raises(InputError, match=r"3,216 tokens x 3 layers x 256 bytes = 0\.0 GB, with 624 last states"):
        check_states(chosen, open_target(chosen.target))
    plan = make_plan(chosen)
    assert plan["disk"]["fits"] is False
    assert plan["disk"]["bytes_per_token"] == round((3216 * (3 * 256 + 4) + 624 * 256) / 3216, 1)
    assert "they do not fit, the run will be refused" in render_plan(plan)


@pytest.mark.usefixtures("cache", "small_disk")
@pytest.mark.parametrize("override", ["capture.mode=online", "capture.dtype=int8", "prompts.limit=6"])
def test_each_remedy_helps(tmp_path: Path, override: str) -> None:
    chosen = recipe(tmp_path, override)
    check_states(chosen, open_target(chosen.target))
    assert make_plan(chosen)["disk"]["fits"] is True


@pytest.mark.usefixtures("cache", "small_disk")
def test_an_assumed_number_of_prompts_refuses_nothing(tmp_path: Path) -> None:
    chosen = recipe(tmp_path, "prompts.sources=[{source: org/data}]", "prompts.limit=24000")
    check_states(chosen, open_target(chosen.target))
