"""k by batch size: the schedule is what vLLM makes of it, and off where it loses."""

import ast
import importlib.util
import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from drafthead.data.errors import InputError
from drafthead.eval.economics import LinearCost, Rates, choose_k
from drafthead.eval.plan import BatchPlan, MeasuredCost, RooflineCost, plan_by_batch, static_break_even
from drafthead.eval.roofline import DEVICES, ModelSize, Roofline
from pydantic import TypeAdapter

from tests.eval.vllm_source import vllm_folder

RATES = Rates(conditional=(0.8, 0.6, 0.5))
ROWS = {1: 0.02, 8: 0.1, 64: 1.0}
COST = MeasuredCost.of_rows(0.05, row_by_batch=ROWS)


def planned() -> BatchPlan:
    return plan_by_batch(RATES, COST, list(ROWS), 3)


def test_every_batch_size_has_its_own_best_k() -> None:
    plan = planned()
    for batch, row in ROWS.items():
        assert plan.choices[batch].k == choose_k(RATES, LinearCost(draft=0.05, row=row), 3).k
    assert [plan.choices[batch].k for batch in ROWS] == [3, 2, 0]


def test_row_costs_are_linear_between_batch_sizes_and_held_outside() -> None:
    assert COST.row(4) == pytest.approx(0.02 + 3 / 7 * 0.08)
    assert COST.row(8) == 0.1
    assert COST.row(500) == 1.0
    assert MeasuredCost.of_rows(0, row_by_batch={4: 0.3, 8: 0.5}).row(1) == 0.3


def test_the_schedule_covers_every_batch_size_once_with_its_best_k() -> None:
    plan = planned()
    seen = []
    for first, last, k in plan.schedule:
        for batch in range(first, last + 1):
            seen.append(batch)
            assert k == choose_k(RATES, LinearCost(draft=0.05, row=COST.row(batch)), 3).k
    assert seen == list(range(1, 65))
    assert all(one[2] != other[2] for one, other in zip(plan.schedule, plan.schedule[1:], strict=False))


def test_vllm_reads_the_schedule_as_meant() -> None:
    """With vLLM's own code, which is not imported whole."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    theirs = runpy.run_path(str(Path(spec.origin).parent / "v1" / "spec_decode" / "dynamic" / "utils.py"))
    settings = planned().vllm_settings()
    assert settings is not None
    by_batch = theirs["build_dynamic_sd_schedule_lookup"](
        settings["num_speculative_tokens_per_batch_size"], 100, settings["num_speculative_tokens"]
    )
    ours = [choose_k(RATES, LinearCost(draft=0.05, row=COST.row(batch)), 3).k for batch in range(1, 101)]
    assert by_batch[1:] == ours


def test_break_even_is_where_the_first_batch_is_off() -> None:
    """One draft token of rate .8 pays while .05 + row < .8; row(b) = .1 + .9 (b - 8) / 56 reaches .75 at 48.4."""
    assert planned().break_even_batch == 49
    assert planned().schedule[-1] == (49, 64, 0)
    assert static_break_even(RATES, COST, 1, 64) == 49
    assert static_break_even(RATES, COST, 3, 64) == 31
    assert static_break_even(RATES, COST, 1, 40) is None


def test_a_k_that_only_breaks_even_has_stopped_paying() -> None:
    """1.8 tokens for .1 + .7 more, which floating point makes .7999..."""
    rates, cost = Rates(conditional=(0.8,)), MeasuredCost.of_rows(0.1, row_by_batch={1: 0.7})
    assert static_break_even(rates, cost, 1, 4) == plan_by_batch(rates, cost, [4], 1).break_even_batch == 1


def test_what_pays_everywhere_has_no_break_even_and_what_never_does_no_config() -> None:
    cheap = plan_by_batch(RATES, MeasuredCost.of_rows(0, row_by_batch={1: 0, 16: 0.1}), [1, 16], 3)
    assert cheap.break_even_batch is None
    dear = plan_by_batch(RATES, MeasuredCost.of_rows(2, row_by_batch={1: 0, 16: 0.1}), [1, 16], 3)
    assert (dear.break_even_batch, dear.schedule, dear.vllm_settings()) == (1, [(1, 16, 0)], None)


def test_a_device_that_computes_switches_off() -> None:
    """An 8 B target on one H100 with k up to 4 at .7: more than twice as fast at batch 1, off long before 512."""
    roofline = Roofline(model=ModelSize(dense_parameters=8e9), device=DEVICES["h100-sxm"])
    rates, cost = Rates(conditional=(0.7,) * 4), RooflineCost(draft=0.05, roofline=roofline)
    plan = plan_by_batch(rates, cost, [1, 512], 4)
    assert f"{plan.choices[1].speedup:.2f}" == "2.31"
    assert plan.choices[512].k == 0
    ks = [k for _, _, k in plan.schedule]
    assert ks == sorted(ks, reverse=True) == [4, 3, 2, 1, 0]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({}, "row-cost-by-batch: empty"),
        ({0: 0.1}, "row-cost-by-batch: batch size 0"),
        ({10**6: 0.1}, "row-cost-by-batch: batch size 1000000"),
        ({4: -0.1}, "row-cost-by-batch at batch 4: -0.1"),
    ],
    ids=["none", "no requests", "too many", "negative"],
)
def test_impossible_row_costs_are_refused(rows: dict[int, float], said: str) -> None:
    with pytest.raises(InputError, match=said):
        MeasuredCost.of_rows(0, row_by_batch=rows)


def test_draft_costs_may_differ_by_batch_too() -> None:
    cost = MeasuredCost(draft_by_batch={1: 0.2, 5: 0.1}, row_by_batch={1: 0.0, 9: 0.8})
    assert (cost.draft(3), cost.row(3)) == pytest.approx((0.15, 0.2))
    assert cost(3, 2) == pytest.approx(1 + 2 * 0.35)
    assert cost(9, 1) == pytest.approx(1.9)


def test_the_schedule_has_the_type_of_vllms_setting() -> None:
    """The annotation that vLLM's own configuration is validated with, for what its command line gets as JSON."""
    tree = ast.parse((vllm_folder() / "config" / "speculative.py").read_text(encoding="utf-8"))
    (config,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "SpeculativeConfig"]
    types = {
        node.target.id: ast.unparse(node.annotation)
        for node in config.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    settings = planned().vllm_settings()
    assert settings is not None
    assert settings.keys() <= types.keys()
    for name, value in settings.items():
        adapter: TypeAdapter[Any] = TypeAdapter(eval(types[name]))
        parsed = adapter.validate_json(json.dumps(value))
        assert json.loads(adapter.dump_json(parsed)) == value
