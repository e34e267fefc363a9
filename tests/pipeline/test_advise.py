"""`drafthead plan`: rates and costs as typed or as a run has them, and the one line where they cannot be used."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from drafthead.data.files import write_json
from drafthead.eval.acceptance import RequestRounds
from drafthead.pipeline.arguments import parse
from drafthead.pipeline.cli import report_errors
from drafthead.pipeline.rounds import write_rounds

Captured = pytest.CaptureFixture[str]
GIVEN = ("--conditional", "0.8,0.6,0.5", "--draft-cost", "0.1", "--row-cost", "0.35")
EVAL = {
    "k": 3,
    "drafts": 1000,
    "conditional": [0.8, 0.6, 0.5],
    "temperature": 0.0,
    "by_domain": {
        "code": {"conditional": [0.95, 0.9, 0.9]},
        "writing": {"conditional": [0.1, 0.0, None]},
        "unseen": {"conditional": [None, None, None]},
    },
}


def plan(*words: object) -> int:
    """Run the command in this process; returns its exit code."""
    arguments = parse(["plan", *map(str, words)])
    try:
        with report_errors():
            return int(arguments.command(arguments))
    except SystemExit as stop:
        return int(stop.code or 0)


def advice(capsys: Captured, *words: object) -> dict[str, Any]:
    assert plan(*words, "--json") == 0
    value = json.loads(capsys.readouterr().out)
    assert isinstance(value, dict)
    return value


def run_folder(folder: Path, **changes: Any) -> Path:
    path = folder / "runs" / "small"
    path.mkdir(parents=True)
    recipe = {
        "target": "builtin:tiny-random",
        "prompts": {"sources": [{"source": "builtin", "limit": 6}], "heldout": [{"source": "builtin", "limit": 2}]},
        "train": {"tokens": "1k", "depth": 3},
        "run": {"name": "small", "dir": str(folder / "runs")},
        **changes,
    }
    (path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    finish(path / "eval", EVAL)
    return path


def finish(stage: Path, report: dict[str, Any]) -> None:
    stage.mkdir()
    write_json(stage / "report.json", report)
    write_json(stage / "manifest.json", {"sha256": {}})


def served(k: int, length: float, ms: float | None) -> dict[str, Any]:
    return {"k": k, "ms_per_token": ms, "served": {"mean_acceptance_length": length}}


# ---- typed values


def test_the_contract(capsys: Captured) -> None:
    found = advice(capsys, *GIVEN)
    assert (found["k"], found["speedup"]) == (1, pytest.approx(1.8 / 1.45))
    assert [row["k"] for row in found["table"]] == [0, 1, 2, 3]
    assert [row["expected_tokens"] for row in found["table"]] == pytest.approx([1, 1.8, 2.28, 2.52])
    assert [row["cost"] for row in found["table"]] == pytest.approx([1, 1.45, 1.9, 2.35])
    assert (found["draft_cost"], found["row_cost"]) == (0.1, 0.35)


def test_a_losing_case_is_off(capsys: Captured) -> None:
    losing = ("--conditional", "0.3,0.2", "--draft-cost", "0.1", "--row-cost", "0.35")
    found = advice(capsys, *losing)
    assert (found["k"], found["speedup"]) == (0, 1.0)
    plan(*losing)
    assert "off (k=0): every k costs more than it gains" in capsys.readouterr().out


def test_max_k_limits_and_goes_on_with_the_last_rate_said_to_be_held(capsys: Captured) -> None:
    cheap = ("--conditional", "0.9,0.9", "--draft-cost", "0.01", "--row-cost", "0")
    assert advice(capsys, *cheap, "--max-k", 1)["k"] == 1
    assert advice(capsys, *cheap)["k"] == 2
    further = advice(capsys, *cheap, "--max-k", 4)
    assert (further["k"], further["extrapolated"], further["max_k"]) == (4, True, 4)
    assert [row["extrapolated"] for row in further["table"]] == [False, False, False, True, True]
    plan(*cheap, "--max-k", 4)
    said = capsys.readouterr().out
    assert said.count("not measured: last rate held") == 2
    assert "evaluate with that k before serving" in said


def test_the_table_shows_what_one_rate_would_say(capsys: Captured) -> None:
    found = advice(capsys, "--conditional", "0.9,0.1,0.1", "--draft-cost", "0.05", "--row-cost", "0.05")
    assert (found["k"], found["geometric"]["k"]) == (1, 2)
    plan("--conditional", "0.9,0.1,0.1", "--draft-cost", "0.05", "--row-cost", "0.05")
    assert "one rate for all positions would say k=2" in capsys.readouterr().out


def test_row_costs_by_batch_give_vllms_schedule(capsys: Captured) -> None:
    words = ("--conditional", "0.8,0.6,0.5", "--draft-cost", "0.05", "--row-cost-by-batch", "64:1.0, 1:0.02, 8:0.1")
    found = advice(capsys, *words)
    assert [(one["batch"], one["k"]) for one in found["by_batch"]] == [(1, 3), (8, 2), (64, 0)]
    assert (found["k"], found["speedup"]) == (3, found["by_batch"][0]["speedup"])
    assert found["break_even_batch"] == 49
    assert [one["break_even_batch"] for one in found["static"]] == [49, 39, 31]
    schedule = [[1, 6, 3], [7, 21, 2], [22, 48, 1], [49, 64, 0]]
    assert found["num_speculative_tokens_per_batch_size"] == schedule
    assert found["speculative_config"] == {
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": schedule,
    }
    plan(*words)
    said = capsys.readouterr().out
    assert "off from batch 49 on" in said
    assert "k=1 from batch 49, k=2 from batch 39, k=3 from batch 31" in said


def test_batch_sizes_that_lose_before_others_gain_are_said(capsys: Captured) -> None:
    """A device whose rows are dear alone and cheap in company: .6 pays while .05 + row is below it."""
    plan("--conditional", "0.6", "--draft-cost", "0.05", "--row-cost-by-batch", "1:0.7,4:0.1")
    said = capsys.readouterr().out
    assert "off from batch 1 to 1\n" in said
    assert "pays at batch 4, the largest asked for" in said
    assert "pays up to" not in said


def test_a_trace_gives_rates_and_a_simulation(capsys: Captured, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"k": 3, "accepted": [3, 0, 1, 3]}\n\n{"k": 3, "accepted": [2, 0, 1, 0]}\n')
    found = advice(capsys, "--trace", trace, "--draft-cost", 0.1, "--row-cost", 0)
    assert found["conditional"] == pytest.approx([5 / 8, 3 / 5, 2 / 3])
    assert found["adaptive"]["rounds"] == 8
    assert found["adaptive"]["static_k"] == found["k"]


# ---- a run


def test_a_runs_rates_and_its_served_times(capsys: Captured, tmp_path: Path) -> None:
    """2.4 tokens at 10 ms each are 2.4 / 2 plain steps of 20 ms for k = 3; 1.8 at 13 are 1.17 for k = 1."""
    run = run_folder(tmp_path)
    by_k = {"3": served(3, 2.4, 10.0), "1": served(1, 1.8, 13.0), "2": served(2, 2.0, None)}
    finish(run / "serve-check", {"plain_ms_per_token": 20.0, "by_k": by_k})
    found = advice(capsys, run)
    per_token = (3 * 0.2 + 1 * 0.17) / (9 + 1)
    assert found["cost_per_draft_token"] == pytest.approx(per_token)
    assert found["conditional"] == EVAL["conditional"]
    assert found["table"][3]["cost"] == pytest.approx(1 + 3 * per_token)
    assert found["by_domain"] == {
        "code": {"k": 3, "speedup": pytest.approx((1 + 0.95 + 0.855 + 0.7695) / (1 + 3 * per_token))},
        "writing": {"k": 1, "speedup": pytest.approx(1.1 / (1 + per_token))},
    }
    plan(run)
    assert "vLLM at batch 1" in capsys.readouterr().out


def test_rounds_that_were_timed_cost_what_they_took(capsys: Captured, tmp_path: Path) -> None:
    """26 ms a pass over drafts of 3 beside 20 ms a plain one, however many tokens others got of a round."""
    run = run_folder(tmp_path)
    by_k = {"3": {**served(3, 2.4, 10.0), "ms_per_pass": 26.0}}
    finish(run / "serve-check", {"plain_ms_per_token": 20.0, "by_k": by_k})
    found = advice(capsys, run)
    assert found["cost_per_draft_token"] == pytest.approx(0.1)
    assert found["table"][3]["cost"] == pytest.approx(1.3)


def test_a_runs_schedule_is_ready_to_serve(capsys: Captured, tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    (run / "export").mkdir()
    write_json(
        run / "export" / "speculative_config.json", {"method": "eagle3", "model": "/e", "num_speculative_tokens": 9}
    )
    found = advice(capsys, run, "--draft-cost", 0.05, "--row-cost-by-batch", "1:0,8:0.1")
    assert found["speculative_config"] == {
        "method": "eagle3",
        "model": "/e",
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": found["num_speculative_tokens_per_batch_size"],
    }


def test_medusa_has_one_k_in_vllm_and_no_more_than_heads(capsys: Captured, tmp_path: Path) -> None:
    run = run_folder(tmp_path, head={"type": "medusa", "num_heads": 3}, serve_check={"k": [3]})
    costs = ("--draft-cost", 0.05, "--row-cost-by-batch", "1:0,8:0.1")
    found = advice(capsys, run, *costs)
    assert found["k"] == 3
    assert found["speculative_config"] is None
    assert plan(run, *costs, "--max-k", 4) == 2
    assert "head.num_heads" in capsys.readouterr().err


@pytest.mark.usefixtures("cache")
def test_a_device_that_is_not_at_hand(capsys: Captured, tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    found = advice(capsys, run, "--draft-cost", 0.05, "--device", "h100-sxm")
    assert [one["batch"] for one in found["by_batch"]] == [1, 8, 32, 64, 128, 256]
    assert found["by_batch"][0]["speedup"] == pytest.approx(2.52 / 1.15)
    plan(run, "--draft-cost", 0.05, "--device", "h100-sxm")
    assert "not measured: an upper bound" in capsys.readouterr().out


def test_a_quantised_target_is_said_not_to_have_the_weights_that_are_counted(
    capsys: Captured, tiny_target: Path, tmp_path: Path
) -> None:
    words = ("--conditional", "0.8", "--draft-cost", "0.05", "--device", "l4", "--target")
    assert advice(capsys, *words, tiny_target)["costs_from"].endswith("(not measured: an upper bound)")
    quantised = Path(shutil.copytree(tiny_target, tmp_path / "target"))
    config = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    assert (
        "weights counted as of 16 bits, which this target's are not" in advice(capsys, *words, quantised)["costs_from"]
    )


# ---- what cannot be used


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "plan: no acceptance rates; give RUN_DIR, --conditional"),
        (("--conditional", "", *GIVEN[2:]), "conditional: no rates"),
        (("--conditional", "0.8,1.2", *GIVEN[2:]), "conditional: position 2 is 1.2; a rate lies between 0 and 1"),
        (("--conditional", "-0.1,0.5", *GIVEN[2:]), "conditional: position 1 is -0.1"),
        (("--conditional", "0.8,,0.5", *GIVEN[2:]), "conditional: '' is not a number"),
        (("--conditional", "nan", *GIVEN[2:]), "conditional: 'nan' is not a number"),
        ((*GIVEN[:2], "--draft-cost", "-0.1", "--row-cost", "0"), "draft-cost: -0.1; a cost is a number from 0 on"),
        ((*GIVEN[:2], "--draft-cost", "0", "--row-cost", "-1"), "row-cost: -1; a cost"),
        ((*GIVEN[:2], "--draft-cost", "cheap", "--row-cost", "0"), "draft-cost: 'cheap' is not a number"),
        (GIVEN[:2], "row-cost: missing; give --draft-cost and one of --row-cost"),
        ((*GIVEN[:2], "--row-cost", "0"), "draft-cost: missing"),
        ((*GIVEN[:2], "--draft-cost", "0"), "row-cost: missing"),
        ((*GIVEN, "--device", "h100-sxm"), "--row-cost and --device both say what rows cost"),
        ((*GIVEN, "--target", "x"), "--target and --context describe a --device"),
        ((*GIVEN, "--max-k", "0"), "max-k: '0'; a whole number from 1"),
        ((*GIVEN, "--max-k", "1e9"), "max-k: '1e9'"),
        ((*GIVEN[:4], "--row-cost-by-batch", "8"), "row-cost-by-batch: '8'; give BATCH:COST pairs"),
        ((*GIVEN[:4], "--row-cost-by-batch", ""), "row-cost-by-batch: empty"),
        ((*GIVEN[:4], "--row-cost-by-batch", "8:0.1,8:0.2"), "batch size 8 is given twice"),
        ((*GIVEN[:4], "--row-cost-by-batch", "8:-0.1"), "row-cost-by-batch at batch 8: -0.1; a cost"),
        ((*GIVEN[:4], "--device", "abacus"), "device: 'abacus' is not in the table; one of"),
        ((*GIVEN[:4], "--device", "h100-sxm"), "device: whose cost? give RUN_DIR or --target DIR"),
        ((*GIVEN, "--trace", "no.jsonl"), "trace: no.jsonl: no such text file"),
        (("no/run",), "no/run: not a run directory"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line(capsys: Captured, words: tuple[str, ...], said: str) -> None:
    assert plan(*words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("drafthead: ")
    assert said in line


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "no rounds; record rounds with one k"),
        ('{"k": 3, "accepted": []}\n', "no rounds"),
        ("{\n", "line 1: not a line like"),
        ('{"k": 3, "accepted": [4]}\n', "line 1: not a line like"),
        ('{"k": 3, "accepted": 1}\n', "line 1: not a line like"),
        ('{"k": 3, "accepted": [1]}\n{"k": 2, "accepted": [1]}\n', "k=2, 3; record rounds with one k"),
    ],
    ids=["empty", "no rounds", "torn", "too many", "no list", "two k"],
)
def test_other_traces_are_one_line(capsys: Captured, tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(content)
    assert plan("--trace", path, *GIVEN[2:]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_run_without_costs_says_what_would_give_them(capsys: Captured, tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    assert plan(run) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"run `drafthead serve-check {run}`, or `drafthead cost {run}`, or give --draft-cost and one of" in line
    finish(run / "serve-check", {"plain_ms_per_token": None, "by_k": {"3": served(3, 2.4, None)}})
    assert plan(run) == 2
    assert "timed no prompts" in capsys.readouterr().err
    assert plan(run, *GIVEN) == 2
    assert "has measured rates; give the run or --conditional" in capsys.readouterr().err


def test_help_has_an_example_and_tells_the_two_plans_apart(capsys: Captured) -> None:
    with pytest.raises(SystemExit):
        parse(["plan", "--help"])
    said = capsys.readouterr().out
    assert "drafthead plan --conditional 0.8,0.6,0.5 --draft-cost 0.1 --row-cost 0.35" in said
    assert "drafthead run RECIPE --plan" in said


# ---- what `drafthead cost` measured and `drafthead eval` recorded


def measured(run: Path, served: bool = False, key: str = "k1") -> dict[str, Any]:
    """A `cost.json` of the run's head: rows cost .1 at batch 1 and .9 at batch 8."""
    finish_training(run)
    by_batch = [
        {"batch": batch, "draft_cost": 0.05, "row_cost": row, "largest_error": error}
        for batch, row, error in ((1, 0.1, 0.02), (8, 0.9, -0.2))
    ]
    of_vllm = [{"batch": batch, "cost_per_draft_token": 0.3, "largest_error": 0.01} for batch in (1, 4)]
    found = {
        "head_key": key,
        "loop": {"measured": "2026-11-30T20:00:00+00:00", "device": "CPU, 2 threads", "by_batch": by_batch},
        "served": {"measured": "2026-11-30T21:00:00+00:00", "by_batch": of_vllm} if served else None,
    }
    write_json(run / "cost.json", found)
    return found


def finish_training(run: Path) -> None:
    (run / "train").mkdir(exist_ok=True)
    write_json(run / "train" / "manifest.json", {"key": "k1", "sha256": {}})


def test_measured_costs_are_used_and_said(capsys: Captured, tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    measured(run)
    found = advice(capsys, run)
    assert found["costs_from"] == f"{run}/cost.json: our loop (CPU, 2 threads), measured 2026-11-30T20:00:00+00:00"
    assert found["row_cost_by_batch"] == {"1": 0.1, "8": 0.9}
    assert [(one["batch"], one["k"]) for one in found["by_batch"]] == [(1, 2), (8, 0)]
    assert found["table"][3]["cost"] == pytest.approx(1 + 3 * 0.15)
    # one token of rate .8 pays while .05 + .1 + .8 (b - 1) / 7 is below it: up to batch 6
    assert found["break_even_batch"] == 7
    assert found["num_speculative_tokens_per_batch_size"][-1] == [7, 8, 0]
    assert found["poor_fit_by_batch"] == {"8": -0.2}
    plan(run)
    said = capsys.readouterr().out
    assert "warning: at batch 8 the fitted cost of a round is off by up to -20%" in said
    assert "off from batch 7 on" in said


def test_vllms_own_steps_come_first(capsys: Captured, tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    measured(run, served=True)
    found = advice(capsys, run)
    assert found["costs_from"] == f"{run}/cost.json: steps of vLLM, measured 2026-11-30T21:00:00+00:00"
    assert found["table"][1]["cost"] == pytest.approx(1.3)
    assert [one["batch"] for one in found["by_batch"]] == [1, 4]
    plan(run)
    assert "its row included: 0.3 at batch 1, 0.3 at batch 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "cost_at_8", "source"),
    [
        (("--draft-cost", 0), 1.9, "--draft-cost, "),
        (("--row-cost", 0), 1.05, "--row-cost, "),
        (("--draft-cost", 0.2, "--row-cost", 0.3), None, "--draft-cost, --row-cost"),
        (("--draft-cost", 0.2, "--row-cost-by-batch", "8:0.3"), 1.5, "--draft-cost, --row-cost-by-batch"),
    ],
    ids=["draft", "row", "both", "rows by batch"],
)
def test_costs_that_are_given_win_over_measured_ones(
    capsys: Captured, tmp_path: Path, given: tuple[Any, ...], cost_at_8: float | None, source: str
) -> None:
    run = run_folder(tmp_path)
    measured(run, served=True)
    found = advice(capsys, run, *given)
    assert found["costs_from"].startswith(source)
    if cost_at_8 is None:
        assert "by_batch" not in found
        assert found["table"][1]["cost"] == pytest.approx(1.5)
    else:
        assert found["by_batch"][-1]["batch"] == 8
        assert found["by_batch"][-1]["table"][1]["cost"] == pytest.approx(cost_at_8)


def test_costs_of_another_head_are_left_aside(capsys: Captured, tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    measured(run, key="an earlier training")
    finish(run / "serve-check", {"plain_ms_per_token": 20.0, "by_k": {"3": served(3, 2.4, 10.0)}})
    assert plan(run) == 0
    captured = capsys.readouterr()
    assert "cost.json is of another head; left aside" in captured.err
    assert "vLLM at batch 1" in captured.out


def test_a_file_that_is_none_of_ours_is_one_line(capsys: Captured, tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    finish_training(run)
    for content in ({}, {"head_key": "k1", "loop": {}, "served": None}, []):
        write_json(run / "cost.json", content)
        assert plan(run) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"cost.json: not what `drafthead cost` writes; run `drafthead cost {run}` again" in line


def test_the_evaluations_rounds_are_replayed(capsys: Captured, tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    requests = [RequestRounds(domain="code", accepted=[3, 0, 1], num_tokens=7)] * 2
    write_rounds(run / "eval" / "rounds.jsonl", requests, 3)
    found = advice(capsys, run, *GIVEN[2:])
    assert found["adaptive"]["rounds"] == 6
    assert found["adaptive"]["rounds_from"] == str(run / "eval" / "rounds.jsonl")
    assert found["conditional"] == EVAL["conditional"], "the rates are still the report's"
    other = tmp_path / "other.jsonl"
    other.write_text('{"k": 3, "accepted": [3]}\n')
    assert advice(capsys, run, *GIVEN[2:], "--trace", other)["adaptive"]["rounds"] == 1
