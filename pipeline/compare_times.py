"""Times of a comparison: plain decoding and every contestant in turn, prompt by prompt: all see the same machine.

Batch 1, our own loop in transformers; a server's times are others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drafthead.eval.bootstrap import Quotient, interval, listed
from drafthead.eval.cost import Cost, Timing, time_answer
from drafthead.eval.decode import DecodeOptions
from drafthead.pipeline.compare_contestants import Contestant, Settings
from drafthead.pipeline.loop import Prompt
from drafthead.pipeline.progress import progress

TIMED_PROMPTS = 8
"""Prompts decoded one by one, after one that is not counted."""
Timings = list[Timing | None]
"""Of each timed prompt; None where the answer was one token."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """What was timed; `drafted` in the order of the contestants."""

    plain: Timings
    drafted: list[Timings]


def measure_times(
    contestants: Sequence[Contestant], prompts: Sequence[Prompt], settings: Settings, temperature: float
) -> Times:
    """Decode the first prompts one by one; a drafter that remembers answers begins with none."""
    timed = prompts[:TIMED_PROMPTS]
    first = contestants[0].loop
    plain: Timings = []
    drafted: list[Timings] = [[] for _ in contestants]
    with progress((1 + len(timed)) * (1 + len(contestants)), "time at batch 1", "answer") as bar:
        drafters = [one.loop.drafter for one in contestants]
        for number, prompt in enumerate([timed[0], *timed]):
            options = DecodeOptions(
                max_new_tokens=settings.max_new_tokens,
                end_ids=first.end_ids,
                temperature=temperature,
                seed=first.seed + max(0, number - 1),  # as `generate` seeds it
            )
            plain.append(time_answer(first.target, None, prompt.ids, settings.k, options))
            bar.update()
            for one, drafter, taken in zip(contestants, drafters, drafted, strict=True):
                taken.append(time_answer(one.loop.target, drafter, prompt.ids, settings.k, options))
                bar.update()
            if not number:  # that was to warm up
                plain, drafted = [], [[] for _ in contestants]
                drafters = [one.loop.drafter for one in contestants]
    return Times(plain=plain, drafted=drafted)


def cost_of(timings: Timings) -> Cost:
    return Cost.of([one for one in timings if one is not None])


def ms_per_token(timings: Timings) -> Quotient:
    """Mean over the timed prompts."""
    return Quotient.of([(0, 0) if one is None else (one.ms_per_token, 1) for one in timings])


def describe_times(drafted: Timings, plain: Timings) -> dict[str, Any]:
    """The report's numbers of one contestant: medians, then means with intervals."""
    cost, alone = cost_of(drafted), cost_of(plain)
    mean, speedup = ms_per_token(drafted), mean_speedup(drafted, plain)
    return {
        "draft_s": cost.draft_s,
        "verify_s": cost.target_s,
        "draft_cost": cost.ratio,
        "plain_ms_per_token": alone.ms_per_token,
        "speculative_ms_per_token": cost.ms_per_token,
        "speedup": alone.ms_per_token / cost.ms_per_token if alone.ms_per_token and cost.ms_per_token else None,
        "mean_ms_per_token": mean.value,
        "mean_ms_per_token_interval": listed(interval(mean)),
        "mean_speedup": speedup.value,
        "mean_speedup_interval": listed(interval(speedup)),
    }


def mean_speedup(drafted: Timings, plain: Timings) -> Quotient:
    """Plain time per token over the contestant's, means over the prompts that both have; paired."""
    return Quotient.of(
        [
            (0, 0) if one is None or alone is None else (alone.ms_per_token, one.ms_per_token)
            for one, alone in zip(drafted, plain, strict=True)
        ]
    )
