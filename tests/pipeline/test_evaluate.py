"""The evaluation of a finished tiny run: trees and typical acceptance beside the chain, each under its label."""

import json
from pathlib import Path
from typing import Any

import pytest
from drafthead.data.errors import InputError
from drafthead.pipeline.evaluate import evaluate_prompts, load_prompts
from drafthead.pipeline.loop import EvalOptions, SpeculativeLoop
from drafthead.pipeline.recipe import TreeConfig, TypicalConfig, load_recipe
from drafthead.pipeline.run_dir import Run
from drafthead.pipeline.summary import branched_lines

SMOKE = "smoke/eagle3"
CommandLine = Any


def evaluate_tiny(run: Run, limit: int | None = 4, **settings: Any) -> dict[str, Any]:
    options = EvalOptions(**{"k": 2, "temperature": 0.0, "max_new_tokens": 12, "limit": limit, **settings})
    return evaluate_prompts(run, load_prompts(run, None, limit, 12), options)


def test_numbers_by_prompt_length_and_their_intervals(tiny_run: Run, cache: Path) -> None:
    """Of the stage's own report."""
    report = tiny_run.report("eval")
    buckets = report["by_context_length"]
    lengths = [len(prompt.ids) for prompt in load_prompts(tiny_run, None, tiny_run.recipe.eval.limit, 24).prompts]
    for one in buckets:
        assert one["prompts"] == sum(one["from"] <= length <= one["to"] for length in lengths)
    for name in ("prompts", "drafts"):
        assert (
            sum(one[name] for one in buckets) == sum(one[name] for one in report["by_domain"].values()) == report[name]
        )
    low, high = report["mean_acceptance_length_interval"]
    assert low < report["mean_acceptance_length"] < high
    assert "by_temperature" not in report


def test_further_temperatures_stand_beside_the_first(drafthead: CommandLine, tiny_run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps({"prompt": f"{number}?"}) + "\n" for number in range(3)))
    given = ("--prompts", "mine.jsonl", "--max-new-tokens", "9", "--json")
    both = drafthead("eval", tiny_run.path, "--temperature", "0.9,0", *given).json()
    alone = [drafthead("eval", tiny_run.path, "--temperature", str(one), *given).json() for one in (0.9, 0)]
    assert [one["temperature"] for one in both["by_temperature"]] == [0.9, 0]
    for one, report in zip(both.pop("by_temperature"), alone, strict=True):
        assert {name: report[name] for name in one} == one
    assert both == alone[0], "the report's own numbers are those of the first"


def test_a_prompt_samples_the_same_in_any_batch(tiny_run: Run, cache: Path) -> None:
    loop = SpeculativeLoop(tiny_run)
    prompt = load_prompts(tiny_run, None, 1, 12).prompts[0]
    options = EvalOptions(k=2, temperature=1.0, max_new_tokens=12, limit=None)
    together = loop.generate([prompt] * 3, options, k=2)
    loop.batch_size = 2
    apart = loop.generate([prompt] * 3, options, k=2)
    assert [one.tokens for one in apart] == [one.tokens for one in together]
    assert len({tuple(one.tokens) for one in together}) == 3, "each request has a seed of its own"


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
def test_a_growing_tree_is_reported_beside_the_static_one(tiny_run: Run, cache: Path) -> None:
    config = TreeConfig(nodes=9, depth=3, width=4)
    static = evaluate_tiny(tiny_run, tree=config)
    both = evaluate_tiny(tiny_run, tree=config.model_copy(update={"dynamic": True}))
    dynamic = both.pop("dynamic_tree")
    assert both == static, "the other numbers are what they are without it"
    assert (dynamic["drafts"], dynamic["nodes"], dynamic["depth"], dynamic["width"]) == ("tree", 9, 3, 4)
    assert dynamic["identical_to_plain"] == "4/4"
    assert dynamic["mean_acceptance_length"] == pytest.approx(1 + sum(dynamic["per_depth"]))
    assert "grown in each round" in dynamic["method"]
    assert "not comparable with chains" in dynamic["method"]
    (line,) = branched_lines({"dynamic_tree": dynamic})
    assert line.startswith("  dynamic tree of 9 nodes, depth 3 (vLLM serves chains: not comparable)")


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
    done = drafthead("eval", tiny_run.path, "--tree", "7", "--dynamic", *given)
    assert done.code == 0
    for tree in (done.json()["tree"], done.json()["dynamic_tree"]):
        assert (tree["nodes"], tree["identical_to_plain"]) == (7, "1/1")
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
