"""Medusa heads through the pipeline, from prompts to export; what the command line refuses."""

from pathlib import Path
from typing import Any

import pytest
from drafthead.data.shards import Store
from drafthead.pipeline.export.preflight import preflight
from drafthead.pipeline.recipe import load_recipe
from drafthead.pipeline.run_dir import create_run
from drafthead.pipeline.stages import STAGES

SMOKE = "smoke/medusa"


@pytest.mark.slow
def test_the_smoke_recipe_exports_heads_with_and_without_captured_layers(cache: Path, tmp_path: Path) -> None:
    walks = []
    for name, overrides in (("layers", []), ("none", ["capture.aux_layers=[]"])):
        recipe = load_recipe(SMOKE, [f"run.dir={tmp_path}", f"run.name={name}", "train.tokens=10k", *overrides])
        run = create_run(recipe, STAGES)
        for stage in STAGES:
            if stage != "serve-check":
                run.run_stage(stage)
        assert preflight(run.folder("export"), run.target.path).failures == []
        assert "A Medusa draft head" in (run.folder("export") / "README.md").read_text()
        assert run.report("eval")["identical_to_plain"] == "4/4"
        walks.append(run.report("train")["walk"])
        assert len(Store(run.input("capture") / "train").info.layer_ids) == (3 if name == "layers" else 0)
    assert walks[0] == walks[1], "the heads read the last state alone"


def test_a_path_that_names_another_head_is_refused_before_any_work(drafthead: Any, tmp_path: Path) -> None:
    done = drafthead("run", SMOKE, f"run.dir={tmp_path}/eagle3-runs")
    assert (done.code, len(done.complaints)) == (1, 1)
    assert "ExportGate: path part 'eagle3-runs'" in done.complaints[0]
    assert not (tmp_path / "eagle3-runs").exists()


def test_separate_lm_heads_over_a_part_of_the_vocabulary_are_refused_before_any_work(drafthead: Any) -> None:
    done = drafthead("run", SMOKE, "head.shared_lm_head=false", "head.train_lm_head=true")
    assert (done.code, len(done.complaints)) == (2, 1)
    assert "head.shared_lm_head=false with a draft vocabulary of 256" in done.complaints[0]


@pytest.mark.parametrize("stage", ["eval", "serve-check"])
def test_more_draft_tokens_than_heads_are_refused_before_any_work(
    drafthead: Any, cache: Path, tmp_path: Path, stage: str
) -> None:
    run = create_run(load_recipe(SMOKE, [f"run.dir={tmp_path}", "run.name=m"]), STAGES)
    done = drafthead(stage, run.path, "--k", 4)
    assert (done.code, len(done.complaints)) == (2, 1)
    assert "eval.k=4: a Medusa head drafts at most head.num_heads=3" in done.complaints[0]
