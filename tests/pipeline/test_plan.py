"""What a run would take of the disk is known, and refused, before anything is done."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from drafthead.data.errors import InputError
from drafthead.pipeline.plan import check_head, check_states, count_shipped, make_plan, render_plan
from drafthead.pipeline.recipe import Recipe, load_recipe
from drafthead.pipeline.run_dir import Run
from drafthead.pipeline.shipped import ShippedAnswers
from drafthead.pipeline.target import Target, open_target
from safetensors.torch import load_file, save_file


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


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(("shipped", "limit", "expected"), [(150, 200, 150), (3000, 200, 200), (0, 200, 0)])
def test_answers_that_come_along_are_not_written(
    shipped: int, limit: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = f"prompts.sources=[{{source: builtin, limit: 50}}, {{source: 'builtin:self-written', limit: {limit}}}]"
    run = Run(path=tmp_path, recipe=recipe(tmp_path, sources), stages={})
    found = ShippedAnswers({str(number): [1] for number in range(shipped)})
    monkeypatch.setattr(ShippedAnswers, "of", lambda run: found)
    assert count_shipped(run) == expected


# ---- targets that no head here can be trained for, or no tree be evaluated with


def changed_target(folder: Path, **values: object) -> Target:
    """The built-in target with other values in its configuration."""
    shutil.copytree(open_target("builtin:tiny-random").path, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))
    return Target(folder)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("values", "overrides", "reason"),
    [
        ({"final_logit_softcapping": 30.0}, (), "final_logit_softcapping=30"),
        ({"logits_scaling": 8.0}, (), "logits_scaling=8"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            ("head={type: mtp, layout: mimo}", "draft_vocab.size=512"),
            "quantised",
        ),
        (
            {"model_type": "mistral", "sliding_window": 64, "architectures": ["MistralForCausalLM"]},
            ("eval.tree={nodes: 8}",),
            "eval.tree",
        ),
    ],
    ids=["capped logits", "scaled logits", "quantised", "sliding"],
)
def test_a_target_that_cannot_be_used_is_refused_before_any_stage(
    tmp_path: Path, values: dict[str, object], overrides: tuple[str, ...], reason: str
) -> None:
    chosen = recipe(tmp_path, *overrides)
    check_head(chosen, open_target(chosen.target))
    with pytest.raises(InputError, match=reason):
        check_head(chosen, changed_target(tmp_path / "target", **values))


@pytest.mark.usefixtures("cache")
def test_a_target_with_biases_behind_its_states_is_refused(tmp_path: Path) -> None:
    target = changed_target(tmp_path / "target")
    path = target.path / "model.safetensors"
    save_file({**load_file(path), "model.norm.bias": torch.ones(64)}, path)
    with pytest.raises(InputError, match=r"its final norm has a bias \(model\.norm\.bias\)"):
        check_head(recipe(tmp_path), target)
