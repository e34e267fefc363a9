"""`drafthead cost` over a finished tiny run: what it measures, keeps and hands to `drafthead plan`."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from drafthead.data.errors import InputError
from drafthead.data.files import read_json, write_json
from drafthead.eval.engine import is_available
from drafthead.eval.served_cost import ServedSteps, num_answers
from drafthead.pipeline import cost
from drafthead.pipeline.arguments import parse
from drafthead.pipeline.cost import CostOptions, choose_ks, contexts_of, measure_cost
from drafthead.pipeline.cost_table import render_cost
from drafthead.pipeline.recipe import load_recipe
from drafthead.pipeline.run_dir import Run, open_run
from drafthead.pipeline.stages import STAGES

SMALL = CostOptions(batches=(2, 1), k=(3, 1), context=24)
TOKENS = {None: 1.0, 1: 1.5, 3: 1.75}
STEP_S = {None: 0.1, 1: 0.12, 3: 0.16}


@pytest.fixture
def run(tiny_run: Run, tmp_path: Path, cache: Path) -> Run:
    """The finished run at a place of its own."""
    path = tmp_path / "runs" / "tiny"
    shutil.copytree(tiny_run.path, path, symlinks=True)
    return open_run(path, STAGES, [])


@pytest.fixture
def steps_of_vllm(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The engines that were asked for, by k; their steps are those of `STEP_S`."""
    asked: list[int | None] = []

    def measure_steps(config: Any, requests: Sequence[Any], batches: Sequence[int], log: Path, told: Any) -> Any:
        speculative = config.speculative_config
        k = None if speculative is None else speculative["num_speculative_tokens"]
        asked.append(k)
        assert config.max_num_seqs == max(batches), "the engine has room for the largest batch"
        for _ in range(num_answers(len(requests), batches)):
            told()
        return [
            ServedSteps(
                batch=batch,
                num_steps=9,
                step_s=STEP_S[k],
                tokens_per_step=TOKENS[k],
                tokens_per_s=batch * TOKENS[k] / STEP_S[k],
            )
            for batch in batches
        ]

    monkeypatch.setattr(cost, "measure_steps", measure_steps)
    return asked


def planned(capsys: pytest.CaptureFixture[str], run: Run) -> Any:
    arguments = parse(["plan", str(run.path), "--json"])
    assert arguments.command(arguments) == 0
    return json.loads(capsys.readouterr().out)


def test_the_loop_is_measured_and_the_plan_reads_it(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    report = measure_cost(run, SMALL)
    assert read_json(run.path / "cost.json") == report
    assert [(one["batch"], [row["k"] for row in one["rounds"]]) for one in report["loop"]["by_batch"]] == [
        (1, [1, 3]),
        (2, [1, 3]),
    ]
    assert (report["drafter"], report["served"], report["loop"]["left_out"]) == ("eagle3", None, {})
    found = planned(capsys, run)
    assert found["costs_from"].startswith(f"{run.path / 'cost.json'}: our loop")
    assert report["loop"]["measured"] in found["costs_from"]
    measured = {str(one["batch"]): one["row_cost"] for one in report["loop"]["by_batch"]}
    assert found["row_cost_by_batch"] == measured
    assert [one["batch"] for one in found["by_batch"]] == [1, 2]
    assert "our loop on CPU" in render_cost(report)


def test_vllm_is_timed_plain_with_every_k_and_plain_again(
    run: Run, steps_of_vllm: list[int | None], capsys: pytest.CaptureFixture[str]
) -> None:
    report = measure_cost(run, CostOptions(batches=(1,), k=(1, 3), context=24, serve=(4, 1)))
    assert steps_of_vllm == [None, 1, 3, None]
    served = report["served"]
    assert [one["batch"] for one in served["by_batch"]] == [1, 4]
    for one in served["by_batch"]:
        assert one["cost_per_draft_token"] == pytest.approx(0.2)
        assert [row["speedup"] for row in one["rounds"]] == pytest.approx([1.5 / 1.2, 1.75 / 1.6])
    assert "0.200 plain steps a draft token with its row" in render_cost(report)
    found = planned(capsys, run)
    assert found["cost_per_draft_token_by_batch"] == pytest.approx({"1": 0.2, "4": 0.2})
    assert "steps of vLLM" in found["costs_from"]


def test_what_vllm_was_timed_at_is_kept_for_the_same_head(run: Run, steps_of_vllm: list[int | None]) -> None:
    first = measure_cost(run, CostOptions(batches=(1,), k=(1,), context=24, serve=(1,)))
    assert first["served"] is not None
    assert measure_cost(run, CostOptions(batches=(1,), k=(1,), context=24))["served"] == first["served"]
    manifest = run.path / "train" / "manifest.json"
    write_json(manifest, {**read_json(manifest), "key": "another training"})
    assert measure_cost(run, CostOptions(batches=(1,), k=(1,), context=24))["served"] is None


def test_another_drafter_is_shown_and_not_kept(run: Run) -> None:
    report = measure_cost(run, CostOptions(batches=(1,), k=(2,), context=24, drafter="ngram"))
    assert report["drafter"].startswith("ngram")
    assert [one["k"] for one in report["loop"]["by_batch"][0]["rounds"]] == [2]
    assert not (run.path / "cost.json").exists()
    with pytest.raises(InputError, match="--serve times the run's head"):
        measure_cost(run, CostOptions(drafter="ngram", serve=(1,)))


def test_batches_that_are_too_large_are_left_out(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "BATCH_TOKENS", 24)
    report = measure_cost(run, SMALL)
    assert [one["batch"] for one in report["loop"]["by_batch"]] == [1]
    assert "batch 2 left out: more than 24 tokens of context; give a smaller --context" in render_cost(report)
    monkeypatch.setattr(cost, "BATCH_TOKENS", 1)
    with pytest.raises(InputError, match="no batch size could be measured"):
        measure_cost(run, SMALL)


def test_contexts_are_different_pieces_of_real_text(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = contexts_of(run, 3, 24, 5)
    assert [len(ids) for ids in contexts] == [24] * 3
    assert len({tuple(ids) for ids in contexts}) == 3
    assert len(contexts_of(run, 200, 100, 5)) == 200, "however short the held-out text is"
    with pytest.raises(InputError, match=r"context: 100000; this target has \d+ positions, and the rounds need 5"):
        contexts_of(run, 1, 100_000, 5)
    monkeypatch.setattr(cost, "read_rows", lambda path: [])
    with pytest.raises(InputError, match="no held-out answers"):
        contexts_of(run, 1, 24, 5)


def test_k_goes_as_far_as_the_head(run: Run) -> None:
    assert choose_ks(run, None) == [1, 2, 3, 5]
    assert choose_ks(run, (3, 1, 3)) == [1, 3]
    medusa = Run(path=run.path, recipe=load_recipe("smoke/medusa", []), stages=run.stages)
    assert choose_ks(medusa, None) == [1, 2, 3]
    with pytest.raises(InputError, match="k: 4; this head drafts at most 3 tokens"):
        choose_ks(medusa, (1, 4))


@pytest.fixture
def table() -> dict[str, Any]:
    one = {"k": 1, "target_ms": 15.0, "draft_ms": 2.0, "cost": 1.7, "fitted_cost": 1.3, "error": -0.24}
    return {
        "device": "CPU",
        "dtype": "float32",
        "context": 9,
        "repeats": 7,
        "measured": "today",
        "left_out": {},
        "by_batch": [
            {
                "batch": 8,
                "plain_ms": 10.0,
                "plain_spread": 0.3,
                "draft_cost": 0.1,
                "row_cost": 0.2,
                "largest_error": -0.24,
                "rounds": [one],
            }
        ],
    }


def test_a_poor_fit_and_a_busy_machine_are_said(table: dict[str, Any]) -> None:
    text = render_cost({"drafter": "eagle3", "loop": table, "served": None})
    assert "warning: at batch 8 the fitted cost of a round is off by up to -24%" in text
    assert "warning: at batch 8 plain steps were 30% apart; measure again while nothing else runs" in text
    table["by_batch"][0] |= {"largest_error": 0.14, "plain_spread": 0.1}
    assert "warning" not in render_cost({"drafter": "eagle3", "loop": table, "served": None})


@pytest.mark.serve
@pytest.mark.slow
@pytest.mark.skipif(not is_available(), reason="vllm is not installed")
def test_a_real_vllm_gives_its_steps(run: Run, tmp_path: Path) -> None:
    """Plain decoding of the tiny target: one token of each request a step."""
    from drafthead.eval.engine import Request
    from drafthead.eval.served_cost import measure_steps
    from drafthead.pipeline.serve_check import engine_config

    requests = [Request(key=str(one), prompt_ids=[5 + one, 7, 9], max_new_tokens=12) for one in range(3)]
    found = measure_steps(engine_config(run, None), requests, [1, 3], tmp_path / "vllm.log")
    assert [one.batch for one in found] == [1, 3]
    assert all(one.tokens_per_step == 1 and one.num_steps > 3 and one.step_s > 0 for one in found)
