"""Rounds that the evaluation records are those of its report."""

from collections import Counter

import pytest
from drafthead.data.files import read_jsonl
from drafthead.eval.adaptive_k import rates_of
from drafthead.pipeline.advise import AdviceOptions, advise, judged
from drafthead.pipeline.rounds import ROUNDS_FILE, read_trace
from drafthead.pipeline.run_dir import Run


def test_the_evaluations_rounds_are_its_reports(tiny_run: Run) -> None:
    report, trace = tiny_run.report("eval"), read_trace(tiny_run.path / "eval" / ROUNDS_FILE)
    assert (trace.k, len(trace.kept)) == (report["k"], report["drafts"])
    rates = rates_of(trace.kept, trace.k).conditional
    assert rates == pytest.approx(judged(report["conditional"])[: len(rates)])
    rounds = Counter[str]()
    for one in read_jsonl(trace.path):
        rounds[one["domain"]] += len(one["accepted"])
    assert rounds == {domain: one["drafts"] for domain, one in report["by_domain"].items()}


def test_the_plan_replays_them_unasked(tiny_run: Run) -> None:
    found = advise(AdviceOptions(draft_cost="0.05", row_cost="0.01"), tiny_run)
    assert found["adaptive"]["rounds"] == tiny_run.report("eval")["drafts"]
    assert found["adaptive"]["rounds_from"] == str(tiny_run.path / "eval" / ROUNDS_FILE)
