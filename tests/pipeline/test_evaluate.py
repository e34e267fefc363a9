"""The evaluation of a finished tiny run: trees and typical acceptance beside the chain, each under its label."""

import json
from pathlib import Path
from typing import Any

import pytest
from drafthead.data.errors import InputError
from drafthead.pipeline.evaluate import EvalOptions, evaluate_prompts, load_prompts
from drafthead.pipeline.recipe import TreeConfig, TypicalConfig, load_recipe
from drafthead.pipeline.run_dir import Run
from drafthead.pipeline.summary import branched_lines

SMOKE = "smoke/eagle3"
CommandLine = Any


def evaluate_tiny(run: Run, limit: int | None = 4, **settings: Any) -> dict[str, Any]:
    options = EvalOptions(**{"k": 2, "temperature": 0.0, "max_new_tokens": 12, "limit": limit, **settings})
    return evaluate_prompts(run, load_prompts(run, None, limit, 12), options)


@pytest.mark.slow
def test_a_tree_is_reported_beside_the_chain(tiny_run: Run, cache: Path) -> None:
    chain, both = evaluate_tiny(tiny_run), evaluate_tiny(tiny_run, tree=TreeConfig(nodes=9, depth=3))
    tree = both.pop("tree")
    assert both == chain, "the chain's numbers are what they are without a tree"
    assert (tree["drafts"], tree["nodes"]) == ("tree", 9)
    assert len(tree["parents"]) == len(tree["ranks"]) == 9
    assert len(tree["per_depth"]) == tree["depth"] <= 3
    assert tree["identical_to_plain"] == "4/4"
    assert tree["mean_acceptance_length"] == pytest.approx(1 + sum(tree["per_depth"]))
    assert "other prompts than those evaluated" in tree["searched_on"]
    assert "not comparable with chains" in tree["method"]
    (line,) = branched_lines({"tree": tree})
    assert line.startswith(f"  tree of 9 nodes, depth {tree['depth']} (vLLM serves chains: not comparable)")


@pytest.mark.slow
def test_a_tree_searched_on_the_evaluated_prompts_says_so(tiny_run: Run, cache: Path) -> None:
    report = evaluate_tiny(tiny_run, limit=None, tree=TreeConfig(nodes=3, depth=2))
    assert report["tree"]["searched_on"].endswith("held-out answers to the evaluated prompts themselves")


@pytest.mark.slow
def test_typical_acceptance_is_reported_as_not_lossless(tiny_run: Run, cache: Path) -> None:
    settings = {"temperature": 1.0, "tree": TreeConfig(nodes=5, depth=2)}
    lossless = evaluate_tiny(tiny_run, **settings)
    report = evaluate_tiny(tiny_run, **settings, typical=TypicalConfig(epsilon=0.0))
    typical = report.pop("typical")
    assert report == lossless
    assert report["tree"]["identical_to_plain"] is None
    assert "NOT lossless" in typical["method"]
    assert typical["chain"]["mean_acceptance_length"] == 3, "at epsilon 0 every draft is kept"
    assert typical["tree"]["mean_acceptance_length"] == 1 + typical["tree"]["depth"]
    assert branched_lines({"typical": typical}) == [
        f"  typical acceptance (not lossless): accept length chain 3.00, tree {1 + typical['tree']['depth']:.2f}"
    ]


@pytest.mark.slow
def test_the_command_line_takes_a_tree(drafthead: CommandLine, tiny_run: Run, tmp_path: Path) -> None:
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text(json.dumps({"prompt": "1?"}) + "\n")
    given = ("--prompts", prompts, "--max-new-tokens", "9", "--json")
    done = drafthead("eval", tiny_run.path, "--tree", "7", *given)
    assert done.code == 0
    assert (done.json()["tree"]["nodes"], done.json()["tree"]["identical_to_plain"]) == (7, "1/1")
    refused = drafthead("eval", tiny_run.path, "--typical", *given)
    assert refused.code == 2
    assert refused.complaints == [
        "drafthead: eval.typical: typical acceptance is a rule for sampling; give a temperature above 0"
    ]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["eval.tree.node=3"], r"unknown key eval\.tree\.node; did you mean eval\.tree\.nodes\?"),
        (["eval.tree={nodes: 0}"], r"eval\.tree\.nodes=0"),
        (["eval.typical={}"], r"eval\.typical: .*; set eval\.temperature above 0"),
    ],
    ids=["unknown key", "no nodes", "typical at temperature 0"],
)
def test_wrong_settings_are_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_recipe(SMOKE, overrides)


def test_settings_are_read() -> None:
    recipe = load_recipe(SMOKE, ["eval.tree={nodes: 15}", "eval.typical={delta: 0.5}", "eval.temperature=0.7"])
    assert recipe.eval.tree == TreeConfig(nodes=15, depth=4)
    assert recipe.eval.typical == TypicalConfig(epsilon=0.09, delta=0.5)
