"""Runs to report on: the served tiny run with everything measured, and one whose data are an attack."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from drafthead.data.files import read_json, write_json
from drafthead.eval.acceptance import RequestRounds, summarize, summarize_tree
from drafthead.eval.cost_grid import BatchTimes, describe_batch
from drafthead.eval.economics import Rates
from drafthead.eval.plan import MeasuredCost
from drafthead.eval.served import compare
from drafthead.eval.served_cost import ServedSteps, describe_served
from drafthead.pipeline.report.page import write_report
from drafthead.pipeline.run_dir import Run, open_run
from drafthead.pipeline.stages import STAGES

ATTACK = (
    "</title></style><script>window.attacked = 1</script><img src=x onerror=window.attacked=1> "
    "a/b~c \"d\" 'e' {{ 7 * 7 }}"
)


def judge(report: dict[str, Any], tolerance: float) -> None:
    """Say of a served check's made-up numbers what the check itself would; the first position is as predicted."""
    first = report["by_k"]["3"]
    first["predicted"]["per_position"][0] = first["served"]["per_position"][0]
    for one in report["by_k"].values():
        verdict = compare(one["predicted"], one["served"], 3, 3, tolerance)
        one.update(ok=verdict.ok, failures=verdict.failures)
    report["failures"] = [failure for one in report["by_k"].values() for failure in one["failures"]]
    report["ok"] = not report["failures"]


def further_numbers() -> dict[str, Any]:
    """What an evaluation has where more was asked for: lengths, temperatures, trees, typical acceptance."""

    def rounds(accepted: list[int]) -> list[RequestRounds]:
        return [RequestRounds(domain="code", accepted=accepted, num_tokens=len(accepted) + sum(accepted))]

    chain = summarize(rounds([0, 1, 3, 2, 0, 0, 1]), 3)
    tree = summarize_tree(rounds([1, 1, 4, 2, 0, 3, 1]), 15, 4) | {"identical_to_plain": "4/4"}
    part = {name: chain[name] for name in ("drafts", "mean_acceptance_length", "per_position")}
    interval = {"mean_acceptance_length_interval": [1.5000123, 2.74999]}
    return {
        **interval,
        "tokens_per_pass": 1.9,
        "tokens_per_pass_interval": [1.4, 2.6],
        "by_context_length": [
            {"from": 0, "to": 31, "prompts": 1, **part, **interval},
            {"from": 1024, "to": 2047, "prompts": 3, **part, "mean_acceptance_length_interval": None},
        ],
        "by_temperature": [{"temperature": 0.0, **part, **interval}, {"temperature": 0.7, **part, **interval}],
        "tree": {**tree, "expected_acceptance_length": 2.7001},
        "dynamic_tree": tree,
        "typical": {"epsilon": 0.09, "delta": 0.3, "temperature": 0.7, "chain": chain, "tree": tree},
    }


def measured_cost(head_key: str) -> dict[str, Any]:
    """What `drafthead cost --serve` writes, of made-up times."""

    def steps(batch: int, k: int) -> ServedSteps:
        step_s, tokens = 0.03 * (1 + batch / 20) * (1 + 0.07 * k), 1.9 if k else 1.0
        return ServedSteps(
            batch=batch, num_steps=40, step_s=step_s, tokens_per_step=tokens, tokens_per_s=batch * tokens / step_s
        )

    times = [
        BatchTimes(
            batch=batch,
            plain_s=0.031 + batch / 900,
            plain_spread=batch / 30,
            target_s={k: 0.032 + batch * (k + 1) / 800 for k in (1, 3)},
            draft_s={k: 0.0023 * k for k in (1, 3)},
        )
        for batch in (1, 8)
    ]
    loop = MeasuredCost(draft_by_batch={1: 0.05}, row_by_batch={1: 0.04, 8: 0.2})
    served = [
        describe_served(
            (steps(batch, 0), steps(batch, 0)),
            {k: steps(batch, k) for k in (1, 3)},
            Rates(conditional=(0.45, 0.3)),
            loop,
        )
        for batch in (1, 8)
    ]
    when = "2026-11-30T20:00:00+00:00"
    return {
        "head": "eagle3",
        "head_key": head_key,
        "loop": {
            "measured": when,
            "device": "CPU, 1 threads",
            "dtype": "float32",
            "context": 256,
            "repeats": 7,
            "left_out": {"64": "out of memory"},
            "by_batch": [describe_batch(one) for one in times],
        },
        "served": {
            "measured": when,
            "dtype": "float32",
            "prompts": 16,
            "max_new_tokens": 64,
            "rates_from": "eval/report.json",
            "by_batch": served,
        },
    }


def reported(path: Path) -> Path:
    write_report(open_run(path, STAGES, []))
    return path


@pytest.fixture(scope="module")
def finished_run(served_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reported; everything was measured, and it is not served as predicted."""
    path = Path(shutil.copytree(served_run.path, tmp_path_factory.mktemp("runs") / "tiny", symlinks=True))
    evaluated, checked = (path / name / "report.json" for name in ("eval", "serve-check"))
    write_json(evaluated, read_json(evaluated) | further_numbers())
    report = read_json(checked)
    judge(report, served_run.recipe.serve_check.tolerance)
    write_json(checked, report)
    write_json(path / "cost.json", measured_cost(read_json(path / "train" / "manifest.json")["key"]))
    return reported(path)


@pytest.fixture(scope="module")
def hostile_run(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reported; domains, sources, reasons and warnings try to break out of the page."""
    path = Path(shutil.copytree(finished_run, tmp_path_factory.mktemp("hostile") / "tiny"))
    for name in ("eval", "prompts", "encode", "serve-check", "draft-vocab", "respond"):
        report = read_json(path / name / "report.json")
        write_json(path / name / "report.json", attacked(report))
    manifest = read_json(path / "capture" / "manifest.json")
    manifest["counts"]["on_policy"] = {
        "sources": renamed(manifest["counts"]["on_policy"]["sources"]),
        "warnings": [ATTACK],
    }
    write_json(path / "capture" / "manifest.json", manifest)
    record = read_json(path / "run.json")
    write_json(path / "run.json", {**record, "commit": ATTACK, "target_path": f"/models/{ATTACK}"})
    return reported(path)


def renamed(values: dict[str, Any]) -> dict[str, Any]:
    return {f"{ATTACK} {number}": one for number, one in enumerate(values.values())}


def attacked(report: dict[str, Any]) -> dict[str, Any]:
    """A report with an attack in the place of every name and text that comes from a user's data."""
    named = {"by_domain", "domains", "sources", "requested", "dropped", "left_out", "skipped", "coverage_by_domain"}
    found: dict[str, Any] = {}
    for key, value in report.items():
        if key in named and isinstance(value, dict):
            found[key] = renamed(value or {"": 7})
        elif key == "warnings":
            found[key] = [ATTACK]
        elif isinstance(value, dict):
            found[key] = attacked(value)
        else:
            found[key] = value
    return found
