"""Recipes: what is wrong is named, with the field, the file and the nearest right key."""

from pathlib import Path

import pytest
import yaml
from drafthead.data.errors import InputError
from drafthead.pipeline.plan import make_plan, render_plan
from drafthead.pipeline.recipe import RECIPES, SourceConfig, load_recipe
from drafthead.pipeline.run_dir import create_run
from drafthead.pipeline.stages import STAGES

NAMES = sorted(
    str(path.relative_to(RECIPES).with_suffix(""))
    for path in RECIPES.rglob("*.yaml")
    if path.relative_to(RECIPES).parts[0] != "launch"
)
SMALL = "target: builtin:tiny-random\nprompts: {sources: [{source: builtin}]}\ntrain: {tokens: 1k}\n"


@pytest.fixture
def small(tmp_path: Path) -> str:
    return str(write(tmp_path / "small.yaml", SMALL))


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def complaint(name: str, *overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        load_recipe(name, list(overrides))
    return str(caught.value)


# ---- keys and values


@pytest.mark.parametrize(
    ("override", "unknown", "nearest"),
    [
        ("trian.depth=3", "trian", "train"),
        ("train.learning_rte=1", "train.learning_rte", "train.learning_rate"),
        ("serve_check.tolerence=1", "serve_check.tolerence", "serve_check.tolerance"),
        ("prompts.self_written.temprature=1", "prompts.self_written.temprature", "prompts.self_written.temperature"),
        ("prompts.sources=[{source: a, limt: 3}]", "prompts.sources.0.limt", "prompts.sources.0.limit"),
        ("prompts.heldout=[{source: a, splt: b}]", "prompts.heldout.0.splt", "prompts.heldout.0.split"),
    ],
    ids=["section", "key", "key-with-underscore", "nested", "in-a-list", "in-a-union"],
)
def test_an_unknown_key_names_the_nearest(override: str, unknown: str, nearest: str, small: str) -> None:
    assert f"unknown key {unknown}; did you mean {nearest}?" in complaint(small, override)


def test_an_unknown_key_in_the_file_names_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "typo.yaml", SMALL + "evla: {k: 3}\n")
    assert complaint(str(path)) == f"{path}: unknown key evla; did you mean eval?"


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("train.tokens=lots", "train.tokens='lots'"),
        ("train.tokens=0", "train.tokens=0"),
        ("train.tokens=", "train.tokens=None"),
        ("train.depth=0", "train.depth=0"),
        ("train.learning_rate=.nan", "train.learning_rate=nan"),
        ("train.loss=mse", "train.loss='mse'"),
        ("head.type=medusa9", "head.type='medusa9'"),
        ("eval.k=17", "eval.k=17"),
        ("prompts=5", "prompts=5"),
        ("prompts.sources=5", "prompts.sources=5"),
        ("prompts.sources=[{limit: 3}]", "prompts.sources.0.source is missing"),
        ("train=null", "train=None"),
    ],
    ids=str,
)
def test_a_bad_value_names_the_field(override: str, named: str, small: str) -> None:
    assert named in complaint(small, override)


def test_an_infinite_count_names_the_field(small: str) -> None:
    assert "train.tokens='inf'" in complaint(small, "train.tokens=inf")


def test_engine_off_needs_no_quotes(small: str) -> None:
    assert load_recipe(small, ["respond.engine=off"]).respond.engine == "off"


@pytest.mark.parametrize("override", ["train.tokens", "=5", "train.tokens=[1", "target.name=x"])
def test_a_malformed_override_is_quoted(override: str, small: str) -> None:
    assert complaint(small, override).startswith(override)


@pytest.mark.parametrize(
    ("text", "count"),
    [("200M", 200_000_000), ("8k", 8000), ("1.5M", 1_500_000), ("2B", 2 * 10**9), ("1_000", 1000), ("7", 7)],
)
def test_counts_have_suffixes(text: str, count: int, small: str) -> None:
    assert load_recipe(small, [f"train.tokens={text}"]).train.tokens == count


def test_prompts_may_be_one_file(small: str) -> None:
    assert load_recipe(small, ["prompts=file.jsonl"]).prompts.sources == [SourceConfig(source="file.jsonl")]


def test_overrides_reach_into_sections_that_the_file_lacks(small: str) -> None:
    recipe = load_recipe(small, ["eval.k=5", "encode.template_kwargs.enable_thinking=false"])
    assert (recipe.eval.k, recipe.encode.template_kwargs) == (5, {"enable_thinking": False})


def test_the_last_override_wins(small: str) -> None:
    assert load_recipe(small, ["eval.k=5", "eval.k=2"]).eval.k == 2


# ---- files


def test_extends_merges_sections_and_replaces_lists(tmp_path: Path) -> None:
    write(tmp_path / "far.yaml", SMALL + "eval: {k: 5, limit: 9}\nserve_check: {k: [1, 2]}\n")
    (tmp_path / "near").mkdir()
    write(tmp_path / "near" / "middle.yaml", "extends: ../far.yaml\neval: {limit: 8}\n")
    path = write(tmp_path / "near" / "leaf.yaml", "extends: middle.yaml\nserve_check: {k: [3]}\ntrain: {depth: 2}\n")
    recipe = load_recipe(str(path), ["eval.batch_size=4"])
    assert (recipe.eval.k, recipe.eval.limit, recipe.eval.batch_size) == (5, 8, 4)
    assert recipe.serve_check.k == [3]
    assert (recipe.train.tokens, recipe.train.depth) == (1000, 2)
    assert recipe.run.name == "leaf"


@pytest.mark.parametrize("chain", [["a"], ["a", "b"], ["a", "b", "c"]], ids=lambda chain: "-".join(chain))
def test_extends_in_a_circle_is_refused(chain: list[str], tmp_path: Path) -> None:
    for name, parent in zip(chain, [*chain[1:], chain[0]], strict=True):
        write(tmp_path / f"{name}.yaml", f"extends: {parent}.yaml\n")
    assert "leads back to itself" in complaint(str(tmp_path / "a.yaml"))


def test_extends_that_is_not_there_names_the_path(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "extends: gone.yaml\n")
    assert complaint(str(path)) == f"{path}: extends: {tmp_path}/gone.yaml does not exist"


def test_an_error_in_the_parent_names_the_parent(tmp_path: Path) -> None:
    write(tmp_path / "parent.yaml", "a: 1\nb: [\n")
    path = write(tmp_path / "a.yaml", "extends: parent.yaml\n")
    assert complaint(str(path)).startswith(f"{tmp_path}/parent.yaml line 3: not valid YAML")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"target: x\ntrain: {tokens: 1k\nprompts: y\n", " line 3: not valid YAML"),
        (b"target: x\n\teval: 1\n", " line 2: not valid YAML"),
        (b"- a\n- b\n", ": a recipe is a mapping of sections, this is list"),
        (b"", ": a recipe is a mapping of sections, this is NoneType"),
        (b"target: \xff\xfe\n", ": not UTF-8 text"),
        (b"target: \x00\n", ": not valid YAML"),
    ],
    ids=["brace", "tab", "list", "empty", "latin", "nul"],
)
def test_a_malformed_file_names_file_and_line(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    assert complaint(str(path)).startswith(f"{path}{said}")


@pytest.mark.parametrize("name", ["no/such", "no_such.yaml"])
def test_a_missing_recipe_lists_those_there_are(name: str) -> None:
    text = complaint(name)
    assert text.startswith(f"{name}: no such recipe")
    assert "smoke/eagle3" in text
    assert "launch/" not in text


# ---- settings that must go together

MEDUSA = "head={type: medusa, num_heads: 2}"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.depth=3"], "train.depth=3: head.num_heads is 2"),
        (["train.depth=1"], "train.depth=1: head.num_heads is 2"),
        (["eval.k=3"], "eval.k=3: a Medusa head drafts at most head.num_heads=2"),
        (["eval.k=2", "export.k=3"], "export.k=3: a Medusa head drafts at most head.num_heads=2"),
        (["eval.k=2", "export.k=2", "serve_check.k=[1, 5]"], "serve_check.k=5: a Medusa head drafts at most"),
        (["eval.k=2", "export.k=2", "serve_check.k=[2]", "head.shared_lm_head=false"], "head.train_lm_head=False"),
    ],
    ids=["deeper", "shallower", "eval", "export", "serve-check", "separate but frozen"],
)
def test_a_medusa_head_drafts_and_trains_what_it_has_heads_for(overrides: list[str], said: str, small: str) -> None:
    assert said in complaint(small, MEDUSA, *overrides)


def test_the_depth_of_a_medusa_head_need_not_be_said(small: str) -> None:
    overrides = [MEDUSA, "eval.k=2", "export.k=1", "serve_check.k=[1, 2]"]
    assert load_recipe(small, overrides).train.depth == 2


def test_eagle3_needs_captured_layers_and_medusa_does_not(small: str) -> None:
    assert "capture.aux_layers=[]: an EAGLE-3 head reads" in complaint(small, "capture.aux_layers=[]")
    assert load_recipe(small, ["head={type: medusa}", "serve_check.k=[3]", "capture.aux_layers=[]"])


def test_a_head_of_another_type_replaces_the_one_it_extends(tmp_path: Path) -> None:
    write(tmp_path / "far.yaml", SMALL + "head: {type: eagle3, fc_norm: true}\nserve_check: {k: [3]}\n")
    path = write(tmp_path / "near.yaml", "extends: far.yaml\nhead: {type: medusa, bias: true}\n")
    assert load_recipe(str(path)).head.model_dump(exclude_defaults=True) == {"type": "medusa", "bias": True}
    same = write(tmp_path / "same.yaml", "extends: far.yaml\nhead: {norm_output: true}\n")
    assert load_recipe(str(same)).head.model_dump(exclude_defaults=True) == {"fc_norm": True, "norm_output": True}


@pytest.mark.parametrize(("one", "other"), [("eagle3", "medusa"), ("smoke/eagle3", "smoke/medusa")])
def test_medusa_reads_the_answers_and_states_of_eagle3(one: str, other: str) -> None:
    recipes = load_recipe(one), load_recipe(other)
    assert recipes[0].target == recipes[1].target
    for name in ("prompts", "respond", "encode", "draft-vocab", "capture"):
        first, second = (STAGES[name].settings(recipe) for recipe in recipes)
        assert first == second


# ---- the recipes of the project


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_loads_and_survives_saving(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    saved = write(tmp_path / "other_name.yaml", yaml.safe_dump(recipe.model_dump(mode="json")))
    assert load_recipe(str(saved)) == recipe


@pytest.mark.parametrize("name", NAMES)
def test_first_line_is_the_command(name: str) -> None:
    assert (RECIPES / f"{name}.yaml").read_text().startswith(f"# make train RECIPE={name}")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if load_recipe(name).target.startswith("builtin:")])
def test_every_recipe_with_a_builtin_target_can_be_planned(name: str) -> None:
    # in the user's own cache, where the larger built-in target is made once
    recipe = load_recipe(name)
    plan = make_plan(recipe)
    assert [stage["name"] for stage in plan["stages"]] == list(STAGES)
    assert plan["prompts"]["count"] > 0
    assert plan["prompts"]["exact"]
    assert plan["disk"]["bytes_per_token"] > 0
    assert str(recipe.run.name) in render_plan(plan)


def test_planning_makes_no_run(cache: Path, tmp_path: Path) -> None:
    make_plan(load_recipe("smoke/eagle3", [f"run.dir={tmp_path}/runs"]))
    assert not (tmp_path / "runs").exists()


def test_the_saved_recipe_of_a_run_is_the_recipe(cache: Path, tmp_path: Path) -> None:
    recipe = load_recipe("smoke/eagle3", [f"run.dir={tmp_path}", "run.name=x", "train.betas=[0.8, 0.9]"])
    run = create_run(recipe, STAGES)
    assert run.recipe == recipe
    assert load_recipe(str(run.path / "recipe.yaml")) == recipe


def test_a_loss_vocabulary_is_for_a_frozen_lm_head() -> None:
    with pytest.raises(InputError, match=r"train.loss_vocab=64: .* set head.train_lm_head=false"):
        load_recipe("smoke/eagle3", ["train.loss_vocab=64"])
    recipe = load_recipe("smoke/eagle3", ["train.loss_vocab=64", "head.train_lm_head=false"])
    assert recipe.train.loss_vocab == 64
