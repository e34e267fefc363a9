"""Answers that come with the built-in prompts: taken only where the target would be asked for just these."""

import json
from pathlib import Path
from typing import Any

import pytest
from drafthead.data.files import digest, read_json, read_jsonl
from drafthead.data.sources import PROMPTS, SELF_WRITTEN
from drafthead.data.template import Template
from drafthead.pipeline import shipped
from drafthead.pipeline.respond import respond
from drafthead.pipeline.run_dir import Run
from drafthead.pipeline.shipped import ShippedAnswers, write_shipped
from drafthead.pipeline.target import open_target

MakeRun = Any
SMOLLM2 = "smollm2-135m-instruct"


@pytest.fixture
def run(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run whose target has answered; what it answered to two of the three prompts is shipped."""
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps({"id": name, "prompt": f"What is a {name}?"}) + "\n" for name in ("weir", "lock", "dam"))
    )
    (tmp_path / "held.jsonl").write_text(json.dumps({"id": "held", "prompt": "What is a quay?"}) + "\n")
    prompts = {"sources": [{"source": f"{tmp_path}/train.jsonl"}], "heldout": [{"source": f"{tmp_path}/held.jsonl"}]}
    made: Run = make_run("r", f"prompts={json.dumps(prompts)}", "respond.max_new_tokens=8")
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "answers")
    for name in ("prompts", "respond"):
        made.run_stage(name)
    assert write_shipped(made, f"{tmp_path}/train.jsonl", tmp_path / "answers") == 3
    path = tmp_path / "answers" / "tiny-random.jsonl"
    kept = [row for row in read_jsonl(path) if row["id"] != "dam"]
    kept[0]["completion_ids"] = [7, 8, 9]  # what no engine would write
    path.write_text("".join(json.dumps(row) + "\n" for row in kept))
    return made


def answer_again(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], dict[str, Any]]:
    real = Run.folder
    monkeypatch.setattr(Run, "folder", lambda self, name: folder if name == "respond" else real(self, name))
    report = respond(run)
    return report, {row["id"]: row for row in read_jsonl(folder / "answers.jsonl")}


def test_shipped_answers_are_taken_and_the_rest_is_written(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {row["id"]: row for row in read_jsonl(run.input("respond") / "answers.jsonl")}
    report, answers = answer_again(run, tmp_path / "again", monkeypatch)
    assert (report["answers"], report["shipped"]) == (4, 2)
    altered = [name for name, row in answers.items() if row["completion_ids"] != before[name]["completion_ids"]]
    assert len(altered) == 1
    assert answers[altered[0]]["completion_ids"] == [7, 8, 9]
    assert answers[altered[0]]["finish_reason"] == "length"
    assert {name: row["context_ids"] for name, row in answers.items()} == {
        name: row["context_ids"] for name, row in before.items()
    }


@pytest.mark.parametrize("change", ["fingerprint", "temperature", "max_new_tokens", "off"])
def test_other_targets_and_settings_are_asked(
    change: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "answers" / "tiny-random.json"
    made = read_json(path)
    if change == "fingerprint":
        made["fingerprint"] = "0" * 16
    elif change == "off":
        settings = run.recipe.respond.model_copy(update={"shipped_answers": False})
        run.recipe = run.recipe.model_copy(update={"respond": settings})
    else:
        made["settings"][change] += 1
    path.write_text(json.dumps(made))
    assert answer_again(run, tmp_path / "again", monkeypatch)[0]["shipped"] == 0


def test_the_shipped_answers_are_whole() -> None:
    prompts = {row["id"] for row in read_jsonl(PROMPTS / "train" / SELF_WRITTEN)}
    rows = read_jsonl(shipped.FOLDER / f"{SMOLLM2}.jsonl")
    longest = read_json(shipped.FOLDER / f"{SMOLLM2}.json")["settings"]["max_new_tokens"]
    assert {row["id"] for row in rows} == prompts
    assert len({row["context"] for row in rows}) == len(rows)
    assert all(0 < len(row["completion_ids"]) <= longest for row in rows)


@pytest.mark.slow
def test_the_shipped_answers_are_those_of_the_built_in_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fingerprint and rendered contexts of this installation; if one differs, the target is asked instead."""
    target = open_target(f"builtin:{SMOLLM2}")
    assert read_json(shipped.FOLDER / f"{SMOLLM2}.json")["fingerprint"] == target.fingerprint
    template = Template.load(target.path, template_kwargs={})
    known = ShippedAnswers(
        {row["context"]: row["completion_ids"] for row in read_jsonl(shipped.FOLDER / f"{SMOLLM2}.jsonl")}
    )
    for row in read_jsonl(PROMPTS / "train" / SELF_WRITTEN)[::300]:
        context = template.render_prompt([{"role": "user", "content": row["turns"][0]}], None)
        found = known.find(context)
        assert found is not None, row["id"]
        assert found[-1] in template.end_of_turn_ids or len(found) == 96
        assert digest(context) in known.completions
