"""Costs by batch size as `drafthead cost` measured them: `cost.json` of a run, for the head that the run has now."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drafthead.data.errors import InputError
from drafthead.data.files import read_json
from drafthead.eval.cost_fit import POOR_FIT
from drafthead.eval.plan import BatchCost, MeasuredCost
from drafthead.pipeline.run_dir import MANIFEST, Run

COST_FILE = "cost.json"


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What rounds cost and where that is from; `batches` is None where one cost was given for no batch size."""

    cost: BatchCost
    batches: Sequence[int] | None
    says: dict[str, Any]


def head_key(run: Run) -> str:
    """Of the head that was trained: another training has another one.

    Raises:
        InputError: There is none yet.
    """
    return str(read_json(run.input("train") / MANIFEST)["key"])


def loop_cost(loop: Mapping[str, Any]) -> MeasuredCost:
    """The model that was fitted to our own loop."""
    return MeasuredCost(
        draft_by_batch={one["batch"]: one["draft_cost"] for one in loop["by_batch"]},
        row_by_batch={one["batch"]: one["row_cost"] for one in loop["by_batch"]},
    )


def served_cost(served: Mapping[str, Any]) -> MeasuredCost:
    """The model that was fitted to vLLM's steps: a draft token with its row."""
    both = {one["batch"]: one["cost_per_draft_token"] for one in served["by_batch"]}
    return MeasuredCost(draft_by_batch=dict.fromkeys(both, 0.0), row_by_batch=both)


def measured_costs(run: Run, draft: float | None = None, row: float | None = None) -> Costs | None:
    """Those of vLLM's steps where they were timed and none is given, else those of our loop; None without either.

    Args:
        run: Whose `cost.json` is read.
        draft: Taken in place of the measured draft costs.
        row: Taken in place of the measured row costs.

    Raises:
        InputError: The file is not one that `drafthead cost` wrote.
    """
    path = run.path / COST_FILE
    if not path.is_file():
        return None
    found = read_json(path)
    try:
        if found["head_key"] != head_key(run):
            print(f"{path} is of another head; left aside: run `drafthead cost {run.path}` again", file=sys.stderr)
            return None
        if found["served"] is not None and draft is None and row is None:
            return _served(str(path), found["served"])
        return _loop(str(path), found["loop"], draft, row)
    except (KeyError, TypeError, AttributeError):
        raise InputError(f"{path}: not what `drafthead cost` writes; run `drafthead cost {run.path}` again") from None


def _served(path: str, served: Mapping[str, Any]) -> Costs:
    cost = served_cost(served)
    says = {
        "costs_from": f"{path}: steps of vLLM, measured {served['measured']}",
        "cost_per_draft_token_by_batch": _by_batch(cost.row_by_batch),
        **_misfits(served),
    }
    return Costs(cost=cost, batches=sorted(cost.row_by_batch), says=says)


def _loop(path: str, loop: Mapping[str, Any], draft: float | None, row: float | None) -> Costs:
    cost = loop_cost(loop)
    batches = sorted(cost.row_by_batch)
    if draft is not None:
        cost = MeasuredCost(draft_by_batch=dict.fromkeys(batches, draft), row_by_batch=cost.row_by_batch)
    if row is not None:
        cost = MeasuredCost(draft_by_batch=cost.draft_by_batch, row_by_batch=dict.fromkeys(batches, row))
    given = ["--draft-cost"] * (draft is not None) + ["--row-cost"] * (row is not None)
    says = {
        "costs_from": ", ".join([*given, f"{path}: our loop ({loop['device']}), measured {loop['measured']}"]),
        "draft_cost_by_batch": _by_batch(cost.draft_by_batch),
        "row_cost_by_batch": _by_batch(cost.row_by_batch),
        **({} if given else _misfits(loop)),
    }
    return Costs(cost=cost, batches=batches, says=says)


def _by_batch(costs: Mapping[int, float]) -> dict[str, float]:
    return {str(batch): cost for batch, cost in sorted(costs.items())}


def _misfits(part: Mapping[str, Any]) -> dict[str, Any]:
    """Batch sizes whose rounds the two-parameter model does not give, with its largest error there."""
    errors = {str(one["batch"]): one["largest_error"] for one in part["by_batch"]}
    poor = {batch: error for batch, error in errors.items() if abs(error) > POOR_FIT}
    return {"poor_fit_by_batch": poor} if poor else {}
