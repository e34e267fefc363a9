"""What drafting costs: seconds of a round's draft and of its verification, measured inside the real loop at batch 1.

A round is draft, one pass of the target over k + 1 tokens, and the drafter's taking in of what was verified; the last
belongs to drafting, for EAGLE-3 and MTP do a step of their own there. The prompt's pass is counted apart.

Shapes: B requests, Q new tokens of a pass, K draft tokens.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from drafthead.eval.decode import DecodeOptions, decode
from drafthead.eval.protocols import Drafter, TargetModel, TargetPass
from torch import Tensor

Value = TypeVar("Value")


def timed(seconds: list[float], work: Callable[[], Value]) -> Value:
    """Do `work` and append how long it took, the device's share included."""
    start = now()
    value = work()
    seconds.append(now() - start)
    return value


def now() -> float:
    """Seconds on a clock that waits for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@dataclass
class TimedTarget:
    """A target that notes how long its passes take."""

    target: TargetModel
    prompt_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)

    def start(self, prompts: list[list[int]], max_length: int) -> TargetPass:
        return timed(self.prompt_s, lambda: self.target.start(prompts, max_length))

    def step(self, tokens_BQ: Tensor, position_BQ: Tensor) -> TargetPass:
        return timed(self.step_s, lambda: self.target.step(tokens_BQ, position_BQ))

    def select(self, rows: Tensor) -> None:
        self.target.select(rows)


@dataclass
class TimedDrafter:
    """A drafter that notes how long it drafts and takes in; the first entry of `observe_s` is the prompt's."""

    drafter: Drafter
    draft_s: list[float] = field(default_factory=list)
    observe_s: list[float] = field(default_factory=list)

    def start(self, prompts: list[list[int]], max_length: int) -> None:
        self.drafter.start(prompts, max_length)

    def observe(self, next_BQ: Tensor, states: TargetPass, position_BQ: Tensor, count_B: Tensor) -> None:
        timed(self.observe_s, lambda: self.drafter.observe(next_BQ, states, position_BQ, count_B))

    def draft(self, k: int) -> Tensor:
        return timed(self.draft_s, lambda: self.drafter.draft(k))

    def select(self, rows: Tensor) -> None:
        self.drafter.select(rows)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One answer, decoded alone."""

    ms_per_token: float
    """Of the tokens after the first, without the prompt's pass."""
    draft_s: list[float]
    """Of each round: k draft tokens, and taking in what was verified; empty for plain decoding."""
    target_s: list[float]
    """Of each pass of the target after the prompt's."""


def time_answer(
    target: TargetModel, drafter: Drafter | None, prompt: list[int], k: int, options: DecodeOptions
) -> Timing | None:
    """Decode one prompt alone; None if its answer is one token long, which the prompt's pass gives."""
    timed_target = TimedTarget(target)
    timed_drafter = None if drafter is None else TimedDrafter(drafter)
    total: list[float] = []
    (answer,) = timed(total, lambda: decode(timed_target, timed_drafter, [prompt], k, options))
    later = len(answer.tokens) - 1
    if not later:
        return None
    prompt_s = timed_target.prompt_s[0]
    draft_s: list[float] = []
    if timed_drafter is not None:
        of_prompt, *of_rounds = timed_drafter.observe_s
        prompt_s += of_prompt
        draft_s = [a + b for a, b in zip(timed_drafter.draft_s, of_rounds, strict=True)]
    return Timing(ms_per_token=1e3 * (total[0] - prompt_s) / later, draft_s=draft_s, target_s=timed_target.step_s)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Medians over timed answers and their rounds; None without any."""

    ms_per_token: float | None
    draft_s: float | None
    target_s: float | None

    @classmethod
    def of(cls, timings: Sequence[Timing]) -> "Cost":
        return cls(
            ms_per_token=_median([one.ms_per_token for one in timings]),
            draft_s=_median([seconds for one in timings for seconds in one.draft_s]),
            target_s=_median([seconds for one in timings for seconds in one.target_s]),
        )

    @property
    def ratio(self) -> float | None:
        """Seconds of a round's drafting over those of its pass of the target."""
        return self.draft_s / self.target_s if self.draft_s is not None and self.target_s else None


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None
