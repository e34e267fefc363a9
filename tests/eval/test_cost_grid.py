"""Rounds timed by batch size and k: what is counted, on a clock that the fakes turn, and that each round is the same.

Shapes: B requests, Q new tokens, K draft tokens, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from drafthead.eval import cost
from drafthead.eval.cost_grid import BatchTimes, describe_batch, measure_batch, room_for
from drafthead.eval.drafters.ngram import NgramDrafter, NgramOptions
from drafthead.eval.hf_target import HFTarget
from drafthead.eval.protocols import Drafter, TargetPass
from torch import Tensor

from tests.eval.speculation import Scripted, V, make_eagle3, make_medusa

KS = (1, 3)


@dataclass
class Clock:
    """Stands still until somebody works."""

    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(cost, "now", clock)
    return clock


@dataclass
class SlowTarget:
    """A pass takes 1 s and .01 s for each of its tokens, `extra(number of the pass)` more."""

    clock: Clock
    extra: Callable[[int], float] = lambda number: 0.0
    rows: list[int] = field(default_factory=list)
    first_positions: list[int] = field(default_factory=list)

    def start(self, prompts: list[list[int]], max_length: int) -> TargetPass:
        self.clock.seconds += 1000  # the prompts' pass is in no number
        return self._pass(len(prompts), len(prompts[0]))

    def step(self, tokens_BQ: Tensor, position_BQ: Tensor) -> TargetPass:
        batch, queries = tokens_BQ.shape
        self.clock.seconds += 1 + 0.01 * batch * queries + self.extra(len(self.rows))
        self.rows.append(queries)
        self.first_positions.append(int(position_BQ[0, 0]))
        return self._pass(batch, queries)

    def select(self, rows: Tensor) -> None:
        raise AssertionError("no request ends")

    def _pass(self, batch: int, queries: int) -> TargetPass:
        states = torch.zeros(batch, queries, 2)
        return TargetPass(logits_BQV=torch.zeros(batch, queries, V), aux_BQAD=states[:, :, None], last_BQD=states)


@dataclass
class SlowDrafter:
    """Drafting takes .1 s and .02 s a token, taking a slot in .005 s; it never has more than two tokens, all wrong."""

    clock: Clock

    def start(self, prompts: list[list[int]], max_length: int) -> None:
        self.clock.seconds += 1000

    def observe(self, next_BQ: Tensor, states: TargetPass, position_BQ: Tensor, count_B: Tensor) -> None:
        self.batch = len(next_BQ)
        self.clock.seconds += 0.005 * next_BQ.shape[1]

    def draft(self, k: int) -> Tensor:
        self.clock.seconds += 0.1 + 0.02 * k
        return torch.ones(self.batch, min(k, 2), dtype=torch.long)

    def select(self, rows: Tensor) -> None:
        raise AssertionError("no request ends")


def measure(clock: Clock, batch: int = 4, repeats: int = 3, **target: Any) -> tuple[BatchTimes, SlowTarget]:
    slow = SlowTarget(clock, **target)
    return measure_batch(slow, SlowDrafter(clock), [[1, 2, 3]] * batch, KS, repeats), slow


def test_a_round_is_split_into_pass_and_drafting(clock: Clock) -> None:
    times, _ = measure(clock)
    assert times.batch == 4
    assert times.plain_s == pytest.approx(1.04)
    assert times.target_s == pytest.approx({1: 1.08, 3: 1.16}), "over k + 1 tokens, though it had two to propose"
    assert times.draft_s == pytest.approx({1: 0.13, 3: 0.18}), "proposing, and taking in the k + 1 slots"


def test_repetitions_take_all_in_turn_and_go_on_writing(clock: Clock) -> None:
    _, target = measure(clock)
    assert target.rows == [1, 2, 4] * 4, "a warm-up and three"
    assert target.first_positions == list(range(3, 15)), "each round keeps one token"


def test_the_warm_up_and_a_hiccup_change_nothing(clock: Clock) -> None:
    steady, _ = measure(clock)
    disturbed, _ = measure(clock, extra=lambda number: 50.0 if number < 3 or number == 7 else 0.0)
    assert disturbed.plain_s == pytest.approx(steady.plain_s)
    assert disturbed.target_s == pytest.approx(steady.target_s)


def test_every_cell_is_described_beside_the_fit(clock: Clock) -> None:
    times, _ = measure(clock)
    found = describe_batch(times)
    assert (found["batch"], found["plain_ms"]) == (4, pytest.approx(1040))
    assert [one["k"] for one in found["rounds"]] == [1, 3]
    for one in found["rounds"]:
        assert one["cost"] == pytest.approx((one["target_ms"] + one["draft_ms"]) / found["plain_ms"])
        assert one["fitted_cost"] == pytest.approx(1 + one["k"] * (found["draft_cost"] + found["row_cost"]))
        assert one["error"] == pytest.approx(one["fitted_cost"] / one["cost"] - 1)
    assert found["largest_error"] == max((one["error"] for one in found["rounds"]), key=abs)


# ---- a real target and real drafters


def test_what_is_written_is_the_targets_text_and_the_drafter_sees_all_of_it(
    target: HFTarget, texts: list[list[int]]
) -> None:
    """The scripted drafter holds every slot that it is shown against the text; half of its drafts are right."""
    length, ks, repeats = 12, (1, 3), 1
    wanted = [text for text in texts if len(text) >= length + room_for(ks, repeats)]
    hits = [[place % 2 == number % 2 for place in range(len(text))] for number, text in enumerate(wanted)]
    scripted = Scripted(wanted, hits)
    measure_batch(target, scripted, [text[:length] for text in wanted], ks, repeats)
    written = [slot + 2 - length for slot in scripted.slots]
    assert min(written) > 1 + (repeats + 1) * (1 + len(ks)), "more than a token a round"
    assert len(set(written)) > 1, "requests of a batch go on at their own pace"


@pytest.mark.parametrize("make", [make_eagle3, make_medusa], ids=["eagle3", "medusa"])
def test_any_drafter_is_timed(model: Any, target: HFTarget, make: Callable[[Any], Drafter]) -> None:
    contexts = torch.randint(V, (3, 9), generator=torch.Generator().manual_seed(5)).tolist()
    told: list[int] = []
    times = measure_batch(target, make(model), contexts, (1, 2, 3), 2, lambda: told.append(1))
    assert len(told) == 3 * 4
    assert min(times.plain_s, *times.target_s.values(), *times.draft_s.values()) > 0


def test_prompt_lookup_is_timed(target: HFTarget) -> None:
    """It may have no draft, or a shorter one, and its text only grows."""
    drafter = NgramDrafter(NgramOptions(prompt_lookup_min=1), max_model_len=100)
    times = measure_batch(target, drafter, [[1, 2, 1, 2], [3, 4, 5, 6]], (1, 4), 2)
    assert set(times.draft_s) == {1, 4}


def test_an_uneven_machine_shows_in_the_spread(clock: Clock) -> None:
    """Passes 12, 15, 18 ... are the plain ones of the later repetitions."""
    steady, _ = measure(clock, repeats=7)
    busy, _ = measure(clock, repeats=7, extra=lambda number: 1.0 if number >= 12 else 0.0)
    hiccup, _ = measure(clock, repeats=7, extra=lambda number: 50.0 if number == 12 else 0.0)
    assert (steady.plain_spread, hiccup.plain_spread) == pytest.approx((0, 0))
    assert busy.plain_spread == pytest.approx(1 / 2.04)
    assert describe_batch(busy)["plain_spread"] == busy.plain_spread
