"""The comparison after equal minutes: what it takes from a run, whom it serves, and what it says of the two."""

import argparse
import json
from pathlib import Path
from types import ModuleType

import pytest
from drafthead.data.errors import InputError
from drafthead.data.files import read_jsonl, write_json
from drafthead.pipeline.recipe import load_recipe
from drafthead.pipeline.run_dir import Run, create_run
from drafthead.pipeline.stages import STAGES
from drafthead.pipeline.train_inputs import Inputs

from tests.bench_module import load_bench


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_bench("equal_minutes")


def test_the_minutes_are_those_of_the_steps(bench: ModuleType, tiny_run: Run) -> None:
    tokens, seconds = bench.trained(tiny_run)
    rows = [row for row in read_jsonl(tiny_run.path / "train" / "log.jsonl") if "step_ms" in row]
    assert tokens == tiny_run.report("train")["tokens"]
    steps = [row["step"] - before for row, before in zip(rows, [0, *(row["step"] for row in rows)], strict=False)]
    assert seconds == pytest.approx(sum(count * row["step_ms"] for count, row in zip(steps, rows, strict=True)) / 1e3)


def test_speculators_sees_the_rows_of_a_run_in_steps_of_its_size(bench: ModuleType, tiny_run: Run, cache: Path) -> None:
    inputs = Inputs.open(tiny_run)
    packs = list(bench.whole_steps(tiny_run, inputs, None, 3_000))
    sizes = [len(pack.tokens_T) for pack in packs]
    assert sum(sizes) - sizes[-1] < 3_000 <= sum(sizes)
    assert max(sizes) <= tiny_run.recipe.train.batch_tokens * tiny_run.recipe.train.accumulation
    rows = {tuple(row.input_ids) for row in inputs.rows}
    assert all(
        tuple(pack.tokens_T[start : start + length].tolist()) in rows
        for pack in packs
        for start, length in pack.documents
    )


def test_the_walk_of_a_checkpoint_is_that_of_its_head(bench: ModuleType, tiny_run: Run, cache: Path) -> None:
    inputs = Inputs.open(tiny_run)
    walked = bench.walk_peer(tiny_run, inputs, tiny_run.folder("export"))
    assert walked["per_position"] == pytest.approx(tiny_run.report("train")["walk"]["per_position"])


def test_short_first_turns_of_all_domains_in_turn(bench: ModuleType, tiny_run: Run, tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    questions = [
        {"id": number, "category": domain, "turns": [f"Question {number} {'x' * size}", "And then?"]}
        for number, (domain, size) in enumerate([("a", 1), ("a", 3000), ("a", 1), ("a", 1), ("b", 1), ("b", 1)])
    ]
    path.write_text("".join(json.dumps(one) + "\n" for one in questions))
    chosen = bench.choose_prompts(tiny_run, argparse.Namespace(prompts=path, limit=4))
    assert [one.domain for one in chosen.prompts] == ["a", "b", "a", "b"]
    texts = [tiny_run.target.tokenizer.decode(one.ids) for one in chosen.prompts]
    assert [text.count("Question") for text in texts] == [1] * 4
    assert not any("And then" in text or "xxx" in text for text in texts)


def test_the_table_waits_for_what_is_missing(bench: ModuleType, tmp_path: Path) -> None:
    walk = {"per_position": [0.4, 0.2, 0.1], "mean_acceptance_length": 1.7}
    row = {"seconds": 60.0, "steps": 10, "tokens": 600, "loss": 2.5, "walk": walk, "checkpoint": "x"}
    write_json(tmp_path / "ours.json", row)
    assert "ratio" not in bench.read_report(tmp_path, 3)
    write_json(tmp_path / "speculators.json", row)
    rounds = {"ours": [[1, 1, 0], [2, 0]], "speculators": [[1, 0, 0], [2, 0, 0]]}
    for name, length in (("ours", 1.8), ("speculators", 1.5)):
        served = {"per_position": [0.4, 0.2, None], "mean_acceptance_length": length}
        answers = {"texts": [[1, 2], [3]], "accepted": rounds[name]}
        write_json(tmp_path / f"served-{name}-k3.json", {"served": served, **answers})
    report = bench.read_report(tmp_path, 3)
    assert report["ratio"] == pytest.approx(1.2)
    low, high = report["interval"]
    assert (low + high) / 2 == pytest.approx(1.2)
    assert low < 1.19
    assert report["equal_texts"] == "2/2"
    table = bench.render(report)
    assert "| speculators | 1.0 | 10 | 600 | 10 | 2.500 | 0.400 0.200 0.100 | 1.700 | 0.400 0.200 - | 1.500 |" in table
    assert f"ours / speculators: 1.200 ({low:.3f} to {high:.3f} by the choice of prompts, 95 %; bar: 1.2)" in table
    assert "equal texts: 2/2" in table


def test_states_of_another_version_are_refused(
    bench: ModuleType, tiny_run: Run, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = iter(["one", "another"])
    monkeypatch.setattr(Run, "key", lambda run, name: next(keys))
    with pytest.raises(InputError, match="stage prompts was made by another version"):
        bench.through(tiny_run, tmp_path, "again", 100, "train")


def test_the_other_run_of_speculators_has_the_same_states(
    bench: ModuleType, tiny_run: Run, cache: Path, tmp_path: Path
) -> None:
    def other(*settings: str) -> Run:
        own = [f"run.dir={tmp_path}", f"run.name={settings[0]}", *settings]
        return create_run(load_recipe(str(tiny_run.path / "recipe.yaml"), own), STAGES)

    wider = other("draft_vocab.size=200")
    assert wider.key("draft-vocab") != tiny_run.key("draft-vocab")
    assert bench.same_states(tiny_run, wider.path).path == wider.path
    for settings, stage in (("encode.max_length=100", "encode"), ("capture.aux_layers=[1]", "capture")):
        with pytest.raises(InputError, match=f"stage {stage} is not that of"):
            bench.same_states(tiny_run, other(settings).path)
