"""Which k to serve at which batch size, as vLLM's `num_speculative_tokens_per_batch_size`, and where to switch off.

Not what a run would do: that is `drafthead run --plan` (pipeline/plan.py).
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Protocol

from drafthead.data.errors import InputError
from drafthead.eval.economics import ROUNDING, Choice, LinearCost, Rates, check_cost, choose_k
from drafthead.eval.roofline import Roofline

MAX_BATCH = 2048


class BatchCost(Protocol):
    """Plain steps OF THAT BATCH SIZE that a round over k draft tokens of each request takes."""

    def __call__(self, batch: int, k: int) -> float: ...


@dataclass(frozen=True, kw_only=True)
class MeasuredCost:
    """Costs at some batch sizes: linear between them, the nearest one's outside.

    Raises:
        InputError: No or impossible batch sizes, or a cost that is none.
    """

    draft_by_batch: Mapping[int, float]
    row_by_batch: Mapping[int, float]

    def __post_init__(self) -> None:
        for name, costs in (("draft-cost", self.draft_by_batch), ("row-cost", self.row_by_batch)):
            if not costs:
                raise InputError(f"{name}-by-batch: empty; give BATCH:COST pairs, for instance 1:0.02,8:0.1,64:0.6")
            for batch, cost in costs.items():
                if not 1 <= batch <= MAX_BATCH:
                    raise InputError(f"{name}-by-batch: batch size {batch}; a batch has 1 to {MAX_BATCH} requests")
                check_cost(f"{name}-by-batch at batch {batch}", cost)

    @classmethod
    def of_rows(cls, draft: float, row_by_batch: Mapping[int, float]) -> "MeasuredCost":
        """Drafting that costs the same share of a plain step at every batch size."""
        check_cost("draft-cost", draft)
        return cls(draft_by_batch={1: draft}, row_by_batch=row_by_batch)

    def draft(self, batch: int) -> float:
        return _between(self.draft_by_batch, batch)

    def row(self, batch: int) -> float:
        return _between(self.row_by_batch, batch)

    def __call__(self, batch: int, k: int) -> float:
        return LinearCost(draft=self.draft(batch), row=self.row(batch))(k)


def _between(costs: Mapping[int, float], batch: int) -> float:
    """Linear between the batch sizes that have a cost; outside that of the nearest."""
    at = sorted(costs)
    right = min(bisect_left(at, batch), len(at) - 1)
    low, high = at[max(0, right - 1)], at[right]
    share = min(1.0, max(0.0, (batch - low) / (high - low))) if low < high else 1.0
    return (1 - share) * costs[low] + share * costs[high]


@dataclass(frozen=True, kw_only=True)
class RooflineCost:
    """By the roofline model; a draft token costs the same share of a plain step at every batch size.

    Raises:
        InputError: The draft cost is none.
    """

    draft: float
    roofline: Roofline

    def __post_init__(self) -> None:
        check_cost("draft-cost", self.draft)

    def __call__(self, batch: int, k: int) -> float:
        return self.roofline.step_s(batch, k + 1) / self.roofline.step_s(batch) + k * self.draft


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """The best k by batch size."""

    choices: dict[int, Choice]
    """At the batch sizes asked for."""
    schedule: list[tuple[int, int, int]]
    """First and last batch size, both included, and the k for them; from 1 to the largest batch size asked for."""

    @property
    def break_even_batch(self) -> int | None:
        """The batch size from which on speculation is off; None if it pays at the largest one asked for."""
        first, _, k = self.schedule[-1]
        return None if k else first

    @property
    def max_k(self) -> int:
        return max(k for _, _, k in self.schedule)

    def vllm_settings(self) -> dict[str, Any] | None:
        """The two keys of vLLM's speculative config; None where speculation never pays.

        vLLM takes no k above `num_speculative_tokens`, and the last range's k for all larger batches
        (v1/spec_decode/dynamic/utils.py).
        """
        if not self.max_k:
            return None
        return {
            "num_speculative_tokens": self.max_k,
            "num_speculative_tokens_per_batch_size": [list(part) for part in self.schedule],
        }


def plan_by_batch(rates: Rates, cost: BatchCost, batches: Sequence[int], max_k: int) -> BatchPlan:
    """Choose k at every batch size up to the largest of `batches`."""
    every = range(1, max(batches) + 1)
    choices = {batch: choose_k(rates, partial(cost, batch), max_k) for batch in every}
    parts = [[batch for batch, _ in part] for _, part in groupby(choices.items(), lambda item: item[1].k)]
    return BatchPlan(
        choices={batch: choices[batch] for batch in sorted(batches)},
        schedule=[(part[0], part[-1], choices[part[0]].k) for part in parts],
    )


def static_break_even(rates: Rates, cost: BatchCost, k: int, max_batch: int) -> int | None:
    """The first batch size at which k, kept at every batch size, is no faster than plain decoding; None if none is."""
    tokens = rates.tokens(k)
    return next((batch for batch in range(1, max_batch + 1) if tokens / cost(batch, k) <= 1 + ROUNDING), None)
