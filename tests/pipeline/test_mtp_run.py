"""A run with an MTP layer: it shares what does not depend on the head, and is served from its export folder."""

import json
from pathlib import Path

import pytest
import torch
from drafthead.data.errors import InputError
from drafthead.pipeline.export.folder import serve_command
from drafthead.pipeline.export.preflight import preflight
from drafthead.pipeline.export.push import Upload
from drafthead.pipeline.heads.build import check_target, load_head
from drafthead.pipeline.recipe import load_recipe
from drafthead.pipeline.run_dir import Run, create_run, open_run
from drafthead.pipeline.stages import STAGES
from drafthead.pipeline.target import open_target

SHARED = ("prompts", "respond", "encode", "capture")


@pytest.mark.parametrize("recipe", ["mtp", "smoke/mtp"])
def test_answers_and_states_are_those_of_the_eagle3_recipe(
    recipe: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "target", open_target("builtin:tiny-random"))
    runs = [
        Run(path=tmp_path, recipe=load_recipe(name), stages=STAGES)
        for name in (recipe, recipe.replace("mtp", "eagle3"))
    ]
    keys = [{name: run.key(name) for name in STAGES} for run in runs]
    assert {name for name in STAGES if keys[0][name] == keys[1][name]} == set(SHARED)


def test_a_run_ends_in_a_folder_that_is_served_as_a_whole(tiny_run: Run, cache: Path, tmp_path: Path) -> None:
    settings = ["train.tokens=4k", "eval.limit=2", f"run.dir={tmp_path}", "run.name=mtp"]
    run = create_run(load_recipe("smoke/mtp", settings), STAGES)
    ran = [name for name in STAGES if name != "serve-check" and run.run_stage(name)]
    assert ran == ["draft-vocab", "train", "eval", "export"]
    export = run.path / "export"
    assert preflight(export, run.target.path).ok
    record = json.loads((run.path / "run.json").read_text())
    assert record["target_path"] == record["export_path"] == str(export.resolve())
    assert serve_command(run.target.path, export).startswith(f"vllm serve {export.resolve()} ")
    card = (export / "README.md").read_text()
    assert f"vllm serve {export.resolve()} --speculative-config" in card
    assert "multi-token-prediction" in card
    assert json.loads((export / "speculative_config.json").read_text()) == {
        "method": "mtp",
        "num_speculative_tokens": 3,
    }
    assert run.report("eval")["identical_to_plain"] == "2/2"
    upload = Upload(run, "me/head", None)
    sizes = {one["path"]: one["bytes"] for one in upload.describe()["files"]}
    weights = run.target.path / "model.safetensors"
    assert sizes["model.safetensors"] == weights.stat().st_size, "the file, not the link"
    assert {path.name for path in export.iterdir()} - sizes.keys() == {"manifest.json"}
    assert upload.facts["serve_command"].startswith("vllm serve me/head --speculative-config")
    assert not open_run(run.path, STAGES, []).run_stage("export"), "finished"


def test_a_small_draft_vocabulary_is_refused_before_any_work(cache: Path) -> None:
    recipe = load_recipe("smoke/mtp", ["draft_vocab.size=256"])
    with pytest.raises(InputError, match=r"draft_vocab.size=256: .* set draft_vocab.size=512"):
        check_target(recipe.head, recipe.draft_vocab.size, open_target(recipe.target))


def test_a_loss_over_fewer_tokens_leaves_the_drafts_alone(tiny_run: Run, cache: Path, tmp_path: Path) -> None:
    settings = ["train.tokens=2k", "train.loss_vocab=64", f"run.dir={tmp_path}", "run.name=fewer"]
    run = create_run(load_recipe("smoke/mtp", settings), STAGES)
    for name in ("prompts", "respond", "encode", "draft-vocab", "capture", "train"):
        run.run_stage(name)
    head, _ = load_head(run.path / "train", run.target)
    assert head.options.draft_vocab_size == run.target.vocab_size
    assert torch.equal(head.lm_head.weight, run.target.lm_head_VD)
