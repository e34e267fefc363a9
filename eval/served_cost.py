"""How long vLLM's own steps take by batch size, plain and with drafts, while exactly so many answers are being written.

Answers that end are followed by others, so that the batch stays as large as it is said to be. A step counts if it and
its two neighbours gave tokens to as many requests as the batch has and ran no prompt; all others (prompts, the last
answers of a batch) are left out.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from drafthead.data.errors import InputError
from drafthead.eval.cost_fit import MeasuredRound, fit_costs
from drafthead.eval.economics import Rates
from drafthead.eval.engine import Engine, EngineConfig, Request, Step
from drafthead.eval.plan import BatchCost

OnAnswer = Callable[[], None]
"""Called after every answer."""


@dataclass(frozen=True, kw_only=True)
class ServedSteps:
    """Steps of one engine over `batch` requests at a time."""

    batch: int
    num_steps: int
    step_s: float
    """Median."""
    tokens_per_step: float
    """Of one request."""
    tokens_per_s: float
    """Of all requests, over the whole of these steps."""


def measure_steps(
    config: EngineConfig,
    requests: Sequence[Request],
    batches: Sequence[int],
    log_path: Path,
    on_answer: OnAnswer = lambda: None,
) -> list[ServedSteps]:
    """Start an engine, write one answer for warm-up, then answers at every batch size.

    `on_answer` is told as often as `num_answers` says.

    Raises:
        InputError: vLLM is not installed or stopped, or a batch size had no full step.
    """
    found = []
    with Engine(config, log_path) as engine:
        for _ in engine.generate([replace(requests[0], key="warm-up")]):
            on_answer()
        engine.steps()
        for batch in batches:
            answer_at_batch(engine, requests, batch, on_answer)
            found.append(summarize_steps(engine.steps(), batch))
    return found


def num_answers(requests: int, batches: Sequence[int]) -> int:
    """Answers that `measure_steps` has an engine write."""
    return 1 + sum(_answers_at(requests, batch) for batch in batches)


def answer_at_batch(engine: Engine, requests: Sequence[Request], batch: int, on_answer: OnAnswer) -> None:
    """Keep `batch` requests going until all, and twice as many as the batch has, are answered."""
    waiting = _numbered(requests, batch)
    for request in islice(waiting, batch):
        engine.submit(request)
    for _ in engine.results():
        on_answer()
        for request in islice(waiting, 1):
            engine.submit(request)


def summarize_steps(steps: Sequence[Step], batch: int) -> ServedSteps:
    """The numbers of the steps that count.

    Raises:
        InputError: None does.
    """
    is_full = [one.num_requests == batch and not one.num_first for one in steps]
    kept = [one for place, one in enumerate(steps) if all(is_full[max(0, place - 1) : place + 2])]
    if not kept:
        raise InputError(f"cost --serve: no step of vLLM had {batch} answers going on; give a smaller batch size")
    tokens = sum(one.num_tokens for one in kept)
    return ServedSteps(
        batch=batch,
        num_steps=len(kept),
        step_s=statistics.median(one.seconds for one in kept),
        tokens_per_step=tokens / (batch * len(kept)),
        tokens_per_s=tokens / sum(one.seconds for one in kept),
    )


def describe_served(
    plain: tuple[ServedSteps, ServedSteps], drafted: Mapping[int, ServedSteps], rates: Rates, loop: BatchCost
) -> dict[str, Any]:
    """For `cost.json`: one batch size of vLLM beside what two cost models predict for it.

    Args:
        plain: Steps of the target alone, before and after the others.
        drafted: Steps by k.
        rates: Measured conditional rates, from which tokens are predicted.
        loop: What our own loop's rounds cost.

    Returns:
        `batch`; `plain_ms`, the mean of the two medians, and `plain_drift`, the later over the earlier, less 1;
        `cost_per_draft_token` (plain steps, drafting and its row together), fitted to vLLM's own rounds, and
        `largest_error` (fitted / measured - 1, of the greatest size); `rounds`, of every k: `round_ms`, `steps`,
        `cost`, `fitted_cost`, `error`, `tokens_per_round` and `expected_tokens` of one request, `extrapolated` (whether
        the latter rests on positions without a measured rate), `speedup` (tokens a second over those of plain steps),
        `predicted_by_served` and `predicted_by_loop` (expected tokens over the fitted cost, and over the loop's).
    """
    before, after = plain
    plain_s = (before.step_s + after.step_s) / 2
    plain_tokens_per_s = (before.tokens_per_s + after.tokens_per_s) / 2
    fit = fit_costs([MeasuredRound(k=k, target=steps.step_s / plain_s) for k, steps in drafted.items()])
    described = []
    for one in fit.rounds:
        steps, expected = drafted[one.k], rates.tokens(one.k)
        described.append(
            {
                "k": one.k,
                "round_ms": 1e3 * steps.step_s,
                "steps": steps.num_steps,
                "cost": one.cost,
                "fitted_cost": fit.cost(one.k),
                "error": fit.error(one),
                "tokens_per_round": steps.tokens_per_step,
                "expected_tokens": expected,
                "extrapolated": one.k > rates.num_measured,
                "speedup": steps.tokens_per_s / plain_tokens_per_s,
                "predicted_by_served": expected / fit.cost(one.k),
                "predicted_by_loop": expected / loop(before.batch, one.k),
            }
        )
    return {
        "batch": before.batch,
        "plain_ms": 1e3 * plain_s,
        "plain_drift": after.step_s / before.step_s - 1,
        "cost_per_draft_token": fit.cost.row,
        "largest_error": fit.largest_error,
        "rounds": described,
    }


def _answers_at(requests: int, batch: int) -> int:
    return max(requests, 2 * batch)


def _numbered(requests: Sequence[Request], batch: int) -> Iterator[Request]:
    """The requests over and over, under keys of their own."""
    for number, request in enumerate(islice(cycle(requests), _answers_at(len(requests), batch))):
        yield replace(request, key=f"{batch}-{number}")
