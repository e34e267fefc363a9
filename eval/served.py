"""What a real vLLM counted and how long it took, and whether that is what was predicted (`ServedGate`)."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drafthead.eval.acceptance import from_counters
from drafthead.eval.engine import DraftCounters, Engine, EngineConfig, Request, Result

Progress = Callable[[int, int], None]
"""Called with how many of how many requests are finished."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """One engine's answers, counters and batch-1 time."""

    results: dict[str, Result]
    """By the request's key; the timed ones are not among them."""
    counters: DraftCounters
    """Of `results` alone."""
    median_ms_per_token: float | None
    """Over the timed requests, prefill included; None if there were none."""
    median_ms_per_pass: float | None = None
    """The same by passes of the target: the prompt's and every round. Known where every pass had a draft, as a head's
    have."""

    def rates(self) -> dict[str, Any]:
        """The counters as `acceptance.from_counters` gives them."""
        counted = self.counters
        return from_counters(
            counted.num_drafts, counted.num_accepted_tokens_per_pos, num_draft_tokens=counted.num_draft_tokens
        )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Whether serving did what was predicted."""

    ok: bool
    failures: list[dict[str, str]]
    """`gate`, `field` and `message` of each."""


def measure(
    config: EngineConfig,
    requests: Sequence[Request],
    timed: Sequence[Request],
    log_path: Path,
    progress: Progress | None = None,
    ordered: bool = False,
) -> Served:
    """Serve `requests` all at once (`ordered`: one after the other) and count; then `timed` ones, and time them.

    The timed ones are served one by one, after a warm-up.

    Raises:
        InputError: vLLM is not installed or stopped; the message names `log_path`.
    """
    total = len(requests) + len(timed)
    with Engine(config, log_path) as engine:
        before = engine.counters()
        results: dict[str, Result] = {}
        for result in engine.generate_one_by_one(requests) if ordered else engine.generate(requests):
            results[result.key] = result
            _report(progress, len(results), total)
        counters = engine.counters().since(before)
        alone = _serve_one_by_one(engine, timed, progress, total)
    return Served(
        results=results,
        counters=counters,
        median_ms_per_token=_median_ms(alone, lambda one: len(one.token_ids)),
        median_ms_per_pass=_median_ms([one for one in alone if one.accepted], lambda one: 1 + len(one.accepted)),
    )


def compare(
    predicted: dict[str, Any], served: dict[str, Any], identical: int, total: int, tolerance: float
) -> Comparison:
    """Hold `served` against `predicted` (`ServedGate`).

    Args:
        predicted: An object of `acceptance.summarize`.
        served: One of `acceptance.from_counters`.
        identical: Answers whose tokens equal plain greedy decoding's.
        total: Answers compared.
        tolerance: Largest |served - predicted| of any position.
    """
    failures = _texts(identical, total)
    if predicted["k"] != served["k"]:
        failures.append(_failure("k", f"predicted with k={predicted['k']}, served with k={served['k']}"))
    else:
        failures += _positions(predicted["per_position"], served["per_position"], tolerance)
    return Comparison(ok=not failures, failures=failures)


def _serve_one_by_one(engine: Engine, timed: Sequence[Request], progress: Progress | None, total: int) -> list[Result]:
    """Each request alone; the first runs once before, unmeasured."""
    if not timed:
        return []
    warm_up = replace(timed[0], key="warm-up")
    for _ in engine.generate_one_by_one([warm_up]):
        pass
    results = []
    for result in engine.generate_one_by_one(replace(one, key=f"timed-{one.key}") for one in timed):
        results.append(result)
        _report(progress, total - len(timed) + len(results), total)
    return results


def _median_ms(results: Sequence[Result], count: Callable[[Result], int]) -> float | None:
    """Milliseconds of each request over what is counted of it."""
    return statistics.median(1000 * one.seconds / max(count(one), 1) for one in results) if results else None


def _texts(identical: int, total: int) -> list[dict[str, str]]:
    if total == 0:
        return [_failure("identical_to_plain", "no answer was compared")]
    if identical != total:
        message = f"{total - identical} of {total} answers differ from plain greedy decoding"
        return [_failure("identical_to_plain", message)]
    return []


def _positions(
    predicted: Sequence[float | None], served: Sequence[float | None], tolerance: float
) -> list[dict[str, str]]:
    failures = []
    for position, (expected, counted) in enumerate(zip(predicted, served, strict=True)):
        field = f"per_position[{position}]"
        if expected is None or counted is None:
            side = "predicted" if expected is None else "served"
            failures.append(_failure(field, f"nothing was drafted in the {side} run"))
        # an error of exactly the tolerance passes; the rounding of the difference must not decide
        elif abs(counted - expected) > tolerance + 1e-9:
            message = f"served {counted:.4f}, predicted {expected:.4f}: further apart than {tolerance}"
            failures.append(_failure(field, message))
    return failures


def _failure(field: str, message: str) -> dict[str, str]:
    return {"gate": "ServedGate", "field": field, "message": message}


def _report(progress: Progress | None, done: int, total: int) -> None:
    if progress is not None:
        progress(done, total)
