"""`drafthead plan`: how many draft tokens to serve with, from measured acceptance and costs, or that it does not pay.

    drafthead plan --conditional 0.8,0.6,0.5 --draft-cost 0.1 --row-cost 0.35
    drafthead cost runs/eagle3 && drafthead plan runs/eagle3

Not what a run would do: that is `drafthead run RECIPE --plan` (plan.py beside this file).
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from drafthead.data.errors import InputError
from drafthead.data.files import read_json
from drafthead.eval.adaptive_k import rates_of, replay_adaptive, replay_static
from drafthead.eval.economics import LinearCost, Rates, RoundCost, check_cost, choose_k, choose_k_geometric
from drafthead.eval.plan import MeasuredCost, RooflineCost, plan_by_batch, static_break_even
from drafthead.eval.roofline import ModelSize, Roofline, find_device
from drafthead.pipeline.measured_costs import Costs, measured_costs
from drafthead.pipeline.recipe import MedusaConfig, load_recipe
from drafthead.pipeline.rounds import ROUNDS_FILE, Trace, read_trace
from drafthead.pipeline.run_dir import Run
from drafthead.pipeline.target import open_target

MOST_K = 64
ROOFLINE_BATCHES = (1, 8, 32, 64, 128, 256)
COSTS_REMEDY = (
    "give --draft-cost and one of --row-cost, --row-cost-by-batch and --device (in units of one plain target step)"
)


@dataclass(frozen=True, kw_only=True)
class AdviceOptions:
    """What was typed; None is what was not."""

    conditional: str | None = None
    draft_cost: str | None = None
    row_cost: str | None = None
    row_cost_by_batch: str | None = None
    device: str | None = None
    target: str | None = None
    context: str | None = None
    max_k: str | None = None
    trace: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Measured rates and where they are from."""

    rates: Rates
    source: str
    by_domain: dict[str, Rates]


def advise(options: AdviceOptions, run: Run | None) -> dict[str, Any]:
    """The object of `drafthead plan --json`; `k`, `speedup` and `table` are those of the smallest batch.

    Raises:
        InputError: A value cannot be used or is missing; names the option or the file.
    """
    trace = find_trace(options.trace, run)
    acceptance = find_acceptance(options, run, trace)
    costs = find_costs(options, run)
    rates = acceptance.rates
    max_k = find_max_k(options.max_k, rates, run)
    batch = min(costs.batches or [1])
    cost = partial(costs.cost, batch)
    choice = choose_k(rates, cost, max_k)
    geometric_k, geometric_speedup = choose_k_geometric(rates.alpha, cost, max_k)
    report = {
        "k": choice.k,
        "speedup": choice.speedup,
        "table": [asdict(row) for row in choice.table],
        "max_k": max_k,
        "conditional": list(rates.conditional),
        "rates_from": acceptance.source,
        "extrapolated": choice.k > rates.num_measured,
        "geometric": {"alpha": rates.alpha, "k": geometric_k, "speedup": geometric_speedup},
        **costs.says,
        "by_domain": {
            name: choose_briefly(of_domain, cost, min(max_k, of_domain.num_measured))
            for name, of_domain in acceptance.by_domain.items()
        },
    }
    if costs.batches is not None:
        report |= advise_by_batch(rates, costs, max_k, run)
    if trace is not None:
        report["adaptive"] = simulate(trace, cost)
    return report


def choose_briefly(rates: Rates, cost: RoundCost, max_k: int) -> dict[str, Any]:
    choice = choose_k(rates, cost, max_k)
    return {"k": choice.k, "speedup": choice.speedup}


def advise_by_batch(rates: Rates, costs: Costs, max_k: int, run: Run | None) -> dict[str, Any]:
    """Best k at each batch size, vLLM's schedule, and the batch size at which each k kept throughout stops paying."""
    assert costs.batches is not None
    plan = plan_by_batch(rates, costs.cost, costs.batches, max_k)
    largest = max(costs.batches)
    settings = plan.vllm_settings()
    if settings is not None and run is not None and isinstance(run.recipe.head, MedusaConfig):
        settings = None  # vLLM asserts one k for Medusa
    return {
        "by_batch": [
            {"batch": batch, "k": choice.k, "speedup": choice.speedup, "table": [asdict(row) for row in choice.table]}
            for batch, choice in plan.choices.items()
        ],
        "break_even_batch": plan.break_even_batch,
        "static": [
            {"k": k, "break_even_batch": static_break_even(rates, costs.cost, k, largest)} for k in range(1, max_k + 1)
        ],
        "num_speculative_tokens_per_batch_size": [list(part) for part in plan.schedule],
        "speculative_config": None if settings is None else {**exported_config(run), **settings},
    }


def exported_config(run: Run | None) -> dict[str, Any]:
    """What the run's export says to vLLM; nothing where there is none yet."""
    path = None if run is None else run.path / "export" / "speculative_config.json"
    return dict(read_json(path)) if path is not None and path.is_file() else {}


def simulate(trace: Trace, cost: RoundCost) -> dict[str, Any]:
    """Adaptive k over the recorded rounds, beside the best k kept throughout."""
    adaptive, static = replay_adaptive(trace.kept, cost, trace.k), replay_static(trace.kept, cost, trace.k)
    return {
        "rounds": len(trace.kept),
        "rounds_from": str(trace.path),
        "k": trace.k,
        "speedup": adaptive.speedup,
        "settled_k": adaptive.settled_k,
        "static_k": static.ks[0],
        "static_speedup": static.speedup,
    }


# ---- acceptance ------------------------------------------------------------------------------------------


def find_trace(given: Path | None, run: Run | None) -> Trace | None:
    """The rounds of the given file, else those that the run's evaluation recorded."""
    if given is not None or run is None:
        return None if given is None else read_trace(given)
    recorded = run.path / "eval" / ROUNDS_FILE
    # evaluations made before there was this file have none
    return read_trace(recorded) if recorded.is_file() else None


def find_acceptance(options: AdviceOptions, run: Run | None, trace: Trace | None) -> Acceptance:
    """Rates that were given, else the run's, else the trace's.

    Raises:
        InputError: There are none.
    """
    if options.conditional is not None:
        if run is not None:
            raise InputError(f"conditional: {run.path} has measured rates; give the run or --conditional, not both")
        rates = Rates(conditional=parse_numbers("conditional", options.conditional))
        return Acceptance(rates=rates, source="--conditional", by_domain={})
    if run is not None:
        return of_run(run)
    if trace is not None:
        return Acceptance(rates=rates_of(trace.kept, trace.k), source=str(trace.path), by_domain={})
    raise InputError("plan: no acceptance rates; give RUN_DIR, --conditional 0.8,0.6,0.5 or --trace FILE")


def of_run(run: Run) -> Acceptance:
    report = run.report("eval")
    path = run.folder("eval") / "report.json"
    by_domain = {
        name: Rates(conditional=judged(one["conditional"]), field=f"{path}: {name}")
        for name, one in report["by_domain"].items()
        if judged(one["conditional"])
    }
    source = f"{path} ({report['drafts']} rounds, temperature {report['temperature']:g})"
    rates = Rates(conditional=judged(report["conditional"]), field=str(path))
    return Acceptance(rates=rates, source=source, by_domain=by_domain)


def judged(conditional: Sequence[float | None]) -> tuple[float, ...]:
    """Rates up to the first position that no round came to."""
    known = []
    for rate in conditional:
        if rate is None:
            break
        known.append(rate)
    return tuple(known)


# ---- costs -----------------------------------------------------------------------------------------------


def find_costs(options: AdviceOptions, run: Run | None) -> Costs:
    """Costs that were given, else those that were measured for the run, else what its served check timed.

    Raises:
        InputError: One is missing, or two contradict each other.
    """
    of_rows = {
        name: value
        for name, value in (
            ("--row-cost", options.row_cost),
            ("--row-cost-by-batch", options.row_cost_by_batch),
            ("--device", options.device),
        )
        if value is not None
    }
    if len(of_rows) > 1:
        raise InputError(f"plan: {' and '.join(of_rows)} both say what rows cost; give one")
    if options.device is None and (options.target is not None or options.context is not None):
        raise InputError("plan: --target and --context describe a --device; give that too")
    draft, row = parse_cost("draft-cost", options.draft_cost), parse_cost("row-cost", options.row_cost)
    if run is not None and of_rows.keys() <= {"--row-cost"} and (not of_rows or draft is None):
        found = measured_costs(run, draft, row)
        if found is not None:
            return found
    if not of_rows and options.draft_cost is None and run is not None:
        return served_costs(run)
    if not of_rows or draft is None:
        raise InputError(f"{'draft-cost' if of_rows else 'row-cost'}: missing; {COSTS_REMEDY}")
    if row is not None:
        linear = LinearCost(draft=draft, row=row)
        says = {"costs_from": "--draft-cost, --row-cost", "draft_cost": linear.draft, "row_cost": linear.row}
        return Costs(cost=lambda batch, k: linear(k), batches=None, says=says)
    if options.row_cost_by_batch is not None:
        measured = MeasuredCost.of_rows(draft, parse_row_costs(options.row_cost_by_batch))
        by_batch = {str(batch): cost for batch, cost in sorted(measured.row_by_batch.items())}
        says = {"costs_from": "--draft-cost, --row-cost-by-batch", "draft_cost": draft, "row_cost_by_batch": by_batch}
        return Costs(cost=measured, batches=sorted(measured.row_by_batch), says=says)
    return device_costs(options, run, draft)


def device_costs(options: AdviceOptions, run: Run | None, draft: float) -> Costs:
    """By the roofline model, for the run's target or the one given."""
    assert options.device is not None
    device = find_device(options.device)
    if (run is None) == (options.target is None):
        raise InputError("device: whose cost? give RUN_DIR or --target DIR, one of them")
    context = 1024 if options.context is None else parse_whole("context", options.context, 0, 10**8)
    target = run.served_target if run is not None else open_target(str(options.target))
    roofline = Roofline(model=ModelSize.of_config(target.config.to_dict()), device=device, context=context)
    of_weights = "; weights counted as of 16 bits, which this target's are not" if target.is_quantised else ""
    says = {
        "costs_from": f"--draft-cost, roofline model of {options.device} (not measured: an upper bound{of_weights})",
        "draft_cost": draft,
        "device": options.device,
        "context": context,
        "compute_bound_tokens": roofline.compute_bound_tokens(),
        "plain_step_ms_by_batch": {str(batch): 1e3 * roofline.step_s(batch) for batch in ROOFLINE_BATCHES},
    }
    return Costs(cost=RooflineCost(draft=draft, roofline=roofline), batches=ROOFLINE_BATCHES, says=says)


def served_costs(run: Run) -> Costs:
    """What a draft token costs in the vLLM that the served check timed at batch 1, drafting and its row together.

    A pass over drafts, by the ms of a plain one, of the same prompts; 1 + k c is fitted to every k served. Checks of
    before passes were timed have the ms m of a token: a round of L tokens costs L m, with L of all served prompts.

    Raises:
        InputError: The check has not run, or timed nothing.
    """
    try:
        report = run.report("serve-check")
    except InputError as error:
        measure = f"or `drafthead cost {run.path}`, or"
        raise InputError(f"{error}, {measure} {COSTS_REMEDY}") from None
    plain_ms = report["plain_ms_per_token"]
    extra = {
        one["k"]: (one.get("ms_per_pass") or one["served"]["mean_acceptance_length"] * one["ms_per_token"]) / plain_ms
        - 1
        for one in report["by_k"].values()
        if plain_ms and one["ms_per_token"] and one["served"]["mean_acceptance_length"]
    }
    if not extra:
        raise InputError(f"{run.path}: the served check timed no prompts (serve_check.timed_prompts); {COSTS_REMEDY}")
    fitted = sum(k * steps for k, steps in extra.items()) / sum(k * k for k in extra)
    linear = LinearCost(draft=max(0.0, fitted), row=0)
    says = {
        "costs_from": f"{run.path / 'serve-check' / 'report.json'}: vLLM at batch 1, prompts' passes included",
        "cost_per_draft_token": linear.draft,
    }
    return Costs(cost=lambda batch, k: linear(k), batches=None, says=says)


# ---- values ----------------------------------------------------------------------------------------------


def find_max_k(text: str | None, rates: Rates, run: Run | None) -> int:
    """The largest k to consider: as many as there are rates, unless another is given.

    Raises:
        InputError: It is no such number, or the run's head cannot draft as many.
    """
    if text is None:
        return rates.num_measured
    max_k = parse_whole("max-k", text, 1, MOST_K)
    if run is not None:
        load_recipe(str(run.path / "recipe.yaml"), [f"eval.k={max_k}"])
    return max_k


def parse_numbers(field: str, text: str) -> tuple[float, ...]:
    return tuple(parse_number(field, part) for part in text.split(",")) if text.strip() else ()


def parse_number(field: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InputError(f"{field}: {text.strip()!r} is not a number")
    return value


def parse_cost(field: str, text: str | None) -> float | None:
    """A cost, where one was given."""
    if text is None:
        return None
    value = parse_number(field, text)
    check_cost(field, value)
    return value


def parse_whole(field: str, text: str, least: int, most: int) -> int:
    if not text.isdecimal() or not least <= int(text) <= most:
        raise InputError(f"{field}: {text!r}; a whole number from {least} to {most}")
    return int(text)


def parse_row_costs(text: str) -> dict[int, float]:
    """`1:0.02,8:0.1` by batch size."""
    field = "row-cost-by-batch"
    costs: dict[int, float] = {}
    for part in text.split(",") if text.strip() else ():
        batch, colon, cost = part.strip().partition(":")
        if not colon or not batch.isdecimal():
            raise InputError(f"{field}: {part.strip()!r}; give BATCH:COST pairs, for instance 1:0.02,8:0.1,64:0.6")
        if int(batch) in costs:
            raise InputError(f"{field}: batch size {int(batch)} is given twice")
        costs[int(batch)] = parse_number(f"{field} at batch {batch}", cost)
    return costs
