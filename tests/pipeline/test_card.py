"""The model card: every number on it is that of a report, its metadata is what the hub reads, it is never stale."""

import copy
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from drafthead.data.files import read_json, write_json
from drafthead.pipeline.advise import AdviceOptions, advise
from drafthead.pipeline.expected_rates import read_expected
from drafthead.pipeline.export import stage
from drafthead.pipeline.export.base_model import BaseModel, describe_base
from drafthead.pipeline.export.card import model_card
from drafthead.pipeline.export.card_facts import card_facts, source_facts
from drafthead.pipeline.recipe import Recipe
from drafthead.pipeline.run_dir import Run, open_run
from huggingface_hub import ModelCard

Table = list[dict[str, str]]


@pytest.fixture
def facts(served_run: Run, cache: Path) -> dict[str, Any]:
    return copy.deepcopy(card_facts(served_run))


def tables_of(card: str, section: str) -> Iterator[Table]:
    """The tables below a heading, a dict a row."""
    text = card.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    for block in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        header, _, *rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in block.splitlines()]
        yield [dict(zip(header, row, strict=True)) for row in rows]


def shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def test_every_rate_is_the_evaluations(served_run: Run, cache: Path) -> None:
    card, report = (served_run.path / "export" / "README.md").read_text(), served_run.report("eval")
    measures, positions, domains = tables_of(card, "Acceptance")
    values = {row["measure"]: row["value"] for row in measures}
    assert values.pop("answers equal to plain decoding") == report["identical_to_plain"] == "4/4"
    assert list(values.values()) == [
        shown(report[name])
        for name in ("mean_acceptance_length", "mean_of_requests_acceptance_length", "draft_acceptance_rate")
    ]
    joint, given = "accepted (of all rounds)", "accepted given the earlier ones"
    assert [(row[joint], row[given]) for row in positions] == [
        (shown(a), shown(b)) for a, b in zip(report["per_position"], report["conditional"], strict=True)
    ]
    assert [row["domain"] for row in domains] == list(report["by_domain"])
    for row, one in zip(domains, report["by_domain"].values(), strict=True):
        assert (row["prompts"], row["rounds"]) == (str(one["prompts"]), str(one["drafts"]))
        assert row["length"] == shown(one["mean_acceptance_length"])
        assert row["mean of requests"] == shown(one["mean_of_requests_acceptance_length"])
        assert row["of all rounds"].split(" / ") == [shown(rate) for rate in one["per_position"]]
        assert row["given the earlier"].split(" / ") == [shown(rate) for rate in one["conditional"]]
    assert sum(int(row["prompts"]) for row in domains) == report["prompts"]
    assert f"temperature 0, over {report['drafts']} rounds on held-out prompts ({report['prompts']} of them" in card


def test_predicted_and_served_stand_side_by_side_at_every_k(served_run: Run, cache: Path) -> None:
    card, check = (served_run.path / "export" / "README.md").read_text(), served_run.report("serve-check")
    tables = list(tables_of(card, "Served by vLLM"))
    assert len(tables) == len(check["by_k"]) == 2
    for table, one in zip(tables, check["by_k"].values(), strict=True):
        columns = {"predicted": "predicted (our loop)", "walk": "walk (walk on the served texts)"}
        columns["served"] = "served (vLLM's counters)"
        *positions, length, rounds = table
        for kind, column in columns.items():
            assert [row[column] for row in positions] == [shown(rate) for rate in one[kind]["per_position"]]
            assert length[column] == shown(one[kind]["mean_acceptance_length"])
            assert rounds[column] == str(one[kind]["drafts"])
        timed = f"31.25 ms/token plain, {one['ms_per_token']:.2f} ms/token with the head, {one['speedup_batch_1']:.2f}x"
        assert timed in card
    assert "vLLM served the head as predicted: 3 held-out prompts, float32" in card


def test_the_advice_is_that_of_plan(served_run: Run, cache: Path) -> None:
    card, advice = (served_run.path / "export" / "README.md").read_text(), advise(AdviceOptions(), served_run)
    (table,) = tables_of(card, "How many draft tokens")
    assert [(row["draft tokens"], row["tokens a round"], row["speed-up"]) for row in table] == [
        (f"k = {row['k']}", f"{row['expected_tokens']:.3f}", f"{row['speedup']:.3f}x") for row in advice["table"]
    ]
    said = f"k = {advice['k']}, {advice['speedup']:.2f}x" if advice["k"] else "off: every k costs more than it gains"
    assert f"`drafthead plan` at batch 1: {said}." in card
    assert str(served_run.path) not in card.partition("## How many draft tokens")[2]


def test_data_and_recipe_are_those_of_the_run(served_run: Run, cache: Path) -> None:
    card = (served_run.path / "export" / "README.md").read_text()
    data, recipe = pairs_of(card, "Training data"), pairs_of(card, "Recipe")
    rows = served_run.report("encode")["train"]
    assert int(data["training rows (assistant turns)"]) == rows["kept"]
    assert int(data["training tokens"]) == rows["tokens"]
    assert int(data["supervised tokens"]) == rows["supervised_tokens"]
    assert int(data["tokens trained on, epochs included"]) == served_run.report("train")["tokens"]
    assert int(data["taken from `builtin`"]) == served_run.report("prompts")["sources"]["builtin"] == 24
    assert data["answers written by"].startswith("the target itself (transformers, float32, greedy, at most 24")
    assert int(recipe["optimiser steps"]) == served_run.report("train")["steps"]
    assert int(recipe["head taken from step"]) == served_run.report("train")["taken_step"]
    assert f"rows of up to {read_json(served_run.path / 'train' / 'head.json')['trained_length']} tokens" in card


@pytest.mark.parametrize(
    ("heldout", "said"),
    [([{"source": "builtin"}], "taken from `a.jsonl`"), (0.25, "taken from `a.jsonl`, the held-out ones among them")],
    ids=["prompts of their own", "a share"],
)
def test_a_source_is_not_said_to_have_given_what_was_held_out(served_run: Run, heldout: Any, said: str) -> None:
    settings = {
        **served_run.recipe.model_dump(),
        "prompts": {"sources": [{"source": "/x/a.jsonl"}], "heldout": heldout},
    }
    assert source_facts(Recipe.model_validate(settings), {"/x/a.jsonl": 20}) == {said: 20}


def pairs_of(card: str, section: str) -> dict[str, str]:
    """A table of names and values."""
    text = card.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| ([^|]+) \| (.+) \|$", text, re.MULTILINE))


def test_a_server_is_held_against_the_card_alone(served_run: Run, tmp_path: Path) -> None:
    shutil.copy(served_run.path / "export" / "README.md", tmp_path)
    expected, report = read_expected(tmp_path, 3), read_json(served_run.path / "eval" / "report.json")
    assert expected.drafts == report["drafts"]
    assert expected.per_position == [round(rate, 3) for rate in report["per_position"]]


# ---- metadata --------------------------------------------------------------------------------------------


def test_the_hub_can_read_the_metadata(facts: dict[str, Any]) -> None:
    facts["base"] = BaseModel(hub_id="org/model", revision="0" * 40, license="llama3.1")
    facts["datasets"] = ["org/data"]
    data = ModelCard(model_card(facts)).data
    assert (data.base_model, data.license, data.library_name, data.pipeline_tag, data.datasets) == (
        "org/model",
        "llama3.1",
        "vllm",
        "text-generation",
        ["org/data"],
    )
    assert data.tags == ["speculative-decoding", "eagle3", "vllm"]
    assert f"`org/model` on the hub, revision `{'0' * 40}`, fingerprint" in model_card(facts)
    assert "the target's licence (llama3.1)" in model_card(facts)


def test_what_is_not_known_is_left_out(served_run: Run) -> None:
    data = ModelCard.load(served_run.path / "export" / "README.md").data.to_dict()
    assert data == {
        "library_name": "vllm",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "eagle3", "vllm"],
    }


def test_a_target_is_known_by_its_folder_and_its_own_card(tmp_path: Path) -> None:
    stored = tmp_path / "models--org--model" / "snapshots" / ("a" * 40)
    stored.mkdir(parents=True)
    (stored / "README.md").write_text(
        "---\nlicense: [other]\nlicense_name: my-terms\nlicense_link: LICENSE\n---\n# Model\n"
    )
    base = BaseModel(
        hub_id="org/model", revision="a" * 40, license="other", license_name="my-terms", license_link="LICENSE"
    )
    assert describe_base(str(stored), stored) == describe_base("org/model", stored) == base
    for text in ("---\n- a: [\n---\n", "---\nlicense:\n---\n", "no metadata", "---\n- list\n---\n"):
        (stored / "README.md").write_text(text)
        assert describe_base("org/model", stored) == BaseModel(hub_id="org/model", revision="a" * 40)
    assert describe_base(str(tmp_path), tmp_path) == BaseModel()
    assert describe_base("builtin:smollm2-135m-instruct", tmp_path).license == "apache-2.0"


# ---- what else it says -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("head", "title"), [("eagle3", "EAGLE-3"), ("medusa", "Medusa"), ("mtp", "multi-token")])
def test_the_card_names_the_kind_of_head(facts: dict[str, Any], head: str, title: str) -> None:
    card = model_card({**facts, "head": head})
    assert ModelCard(card).data.tags[1] == head
    assert title in card.split("## ")[0]


def test_the_card_labels_trees_and_typical_acceptance(facts: dict[str, Any]) -> None:
    assert "Other drafts" not in model_card(facts)
    tree = {"nodes": 63, "depth": 4, "rounds": 3, "mean_acceptance_length": 2.5}
    facts["eval"]["tree"] = tree
    card = model_card(facts)
    assert "| tree of 63 nodes, depth 4 | lossless | 3 | 2.500 |" in card
    assert "NOT lossless" not in card
    facts["eval"]["dynamic_tree"] = {**tree, "rounds": 2}
    assert "| tree grown in each round of 63 nodes, depth 4 | lossless | 2 | 2.500 |" in model_card(facts)
    chain = {"k": 2, "drafts": 4, "mean_acceptance_length": 1.75}
    facts["eval"]["typical"] = {"epsilon": 0.09, "delta": 0.3, "chain": chain, "tree": tree}
    card = model_card(facts)
    assert "| chain of 2 | NOT lossless (typical, epsilon 0.09, delta 0.3) | 4 | 1.750 |" in card
    assert card.count("| tree of 63 nodes, depth 4 |") == 2


def test_the_card_says_what_was_not_seen(facts: dict[str, Any]) -> None:
    facts["serve_check"]["ok"] = False
    assert "vLLM served the head NOT as predicted" in model_card(facts)
    assert "Positions up to 2048 are served." in model_card(facts)
    facts |= {"serve_check": None, "advice": "stage serve-check has not finished", "quantization": "awq"}
    facts["position_limit"] = None
    facts["eval"] |= {"temperature": 0.7, "identical_to_plain": None}
    card = model_card(facts)
    assert "## Served by vLLM" not in card
    for text in ("Served by: no server yet", "Not known yet (stage serve-check", "quantised (awq)", "measured at 0.7."):
        assert text in card
    assert "are accepted less" not in card
    assert "Positions" not in card


def test_a_domain_cannot_break_the_tables(facts: dict[str, Any]) -> None:
    facts["eval"]["by_domain"] = {"a|b": next(iter(facts["eval"]["by_domain"].values()))}
    assert r"| a\|b | " in model_card(facts)


# ---- never stale -----------------------------------------------------------------------------------------


def moved(run: Run, folder: Path) -> Run:
    """A copy of a run that a test may change."""
    shutil.copytree(run.path, folder, symlinks=True)
    return open_run(folder, run.stages, [])


def test_a_new_evaluation_or_served_check_is_on_the_card_at_once(served_run: Run, cache: Path, tmp_path: Path) -> None:
    run = moved(served_run, tmp_path / "tiny")
    assert stage.write_card(run), "the serve command names the folder where the run lies now"
    assert not stage.write_card(run)
    report = run.report("eval")
    write_json(run.path / "eval" / "report.json", {**report, "mean_acceptance_length": 3.125})
    assert stage.write_card(run)
    assert "| 3.125 |" in (run.path / "export" / "README.md").read_text()
    shutil.rmtree(run.path / "serve-check")
    assert stage.write_card(run)
    assert "Served by vLLM" not in (run.path / "export" / "README.md").read_text()
    run.run_stage("serve-check")
    assert stage.write_card(run)
    assert run.is_finished("export"), "the card may change, the folder stays finished"


def test_a_kill_while_the_card_is_written_leaves_a_run_that_goes_on(
    served_run: Run, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = moved(served_run, tmp_path / "tiny")
    shutil.rmtree(run.path / "export")
    run.run_stage("export")
    manifest = json.loads((run.path / "export" / "manifest.json").read_text())
    assert "README.md" in manifest["files"]
    (run.path / "eval" / "report.json").write_text(json.dumps({**run.report("eval"), "mean_acceptance_length": 9.75}))

    def killed(path: Path, text: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stage, "write_text", killed)
        with pytest.raises(KeyboardInterrupt):
            stage.write_card(run)
    assert run.is_finished("export")
    assert stage.write_card(run)
    assert run.is_finished("export")


def test_the_export_stage_alone_writes_a_card_without_a_server(tiny_run: Run) -> None:
    card = (tiny_run.path / "export" / "README.md").read_text()
    assert "## Served by vLLM" not in card
    assert "stage serve-check has not finished" in card
