"""Steps of an engine: which count, what they say, and what is predicted for them."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from drafthead.data.errors import InputError
from drafthead.eval.economics import LinearCost, Rates
from drafthead.eval.engine import Request, Result, Step, StepLog
from drafthead.eval.served_cost import (
    ServedSteps,
    answer_at_batch,
    describe_served,
    num_answers,
    summarize_steps,
)

REQUESTS = [Request(key=str(number), prompt_ids=[number], max_new_tokens=4) for number in range(3)]


def step(num_requests: int, num_tokens: int, seconds: float = 1.0, num_first: int = 0) -> Step:
    return Step(seconds=seconds, num_requests=num_requests, num_first=num_first, num_tokens=num_tokens)


# ---- the child's log


def output(key: str, count: int, finished: bool = False) -> Any:
    return SimpleNamespace(request_id=key, finished=finished, outputs=[SimpleNamespace(token_ids=list(range(count)))])


def test_a_step_counts_new_tokens_and_first_ones() -> None:
    log = StepLog()
    for outputs in (
        [output("a", 1)],
        [],
        [output("a", 4), output("b", 1)],
        [output("a", 5, finished=True), output("b", 3)],
        [output("a", 1)],
    ):
        assert log.run(lambda given=outputs: given) == outputs  # type: ignore[misc]
    counted = [(one.num_requests, one.num_first, one.num_tokens) for one in log.steps]
    assert counted == [(1, 1, 1), (2, 1, 4), (2, 0, 3), (1, 1, 1)], "the last is another request of the same key"
    assert all(one.seconds > 0 for one in log.steps)


# ---- which steps count


def test_steps_count_while_the_batch_is_full_and_no_prompt_runs() -> None:
    steps = [
        step(1, 1, num_first=1),
        step(2, 3, num_first=1),
        step(2, 4),
        step(2, 2, seconds=3),
        step(2, 6, seconds=2),
        step(2, 3),
        step(1, 2),
    ]
    found = summarize_steps(steps, 2)
    assert found == ServedSteps(batch=2, num_steps=2, step_s=2.5, tokens_per_step=8 / 4, tokens_per_s=8 / 5)


def test_a_batch_that_was_never_full_is_an_error() -> None:
    with pytest.raises(InputError, match="no step of vLLM had 4 answers going on"):
        summarize_steps([step(3, 3)] * 5, 4)


class Engine:
    """Answers the oldest request; remembers how many were going on when it did."""

    def __init__(self) -> None:
        self.going: list[str] = []
        self.seen: list[str] = []
        self.loads: list[int] = []

    def submit(self, request: Request) -> None:
        assert request.key not in self.seen
        self.seen.append(request.key)
        self.going.append(request.key)

    def results(self) -> Iterator[Result]:
        while self.going:
            self.loads.append(len(self.going))
            yield Result(key=self.going.pop(0), token_ids=[1], finish_reason="length", seconds=0.1)


@pytest.mark.parametrize(("batch", "answers"), [(1, 3), (2, 4), (4, 8)])
def test_an_answer_that_ends_is_followed_by_another(batch: int, answers: int) -> None:
    engine, told = Engine(), []
    answer_at_batch(engine, REQUESTS, batch, lambda: told.append(1))  # type: ignore[arg-type]
    assert len(engine.seen) == len(told) == answers
    assert engine.loads == [batch] * (answers - batch + 1) + list(range(batch - 1, 0, -1))
    assert num_answers(len(REQUESTS), [batch]) == answers + 1, "one for warm-up"


# ---- what they say


def steps_of(step_s: float, tokens: float, batch: int = 4) -> ServedSteps:
    return ServedSteps(
        batch=batch, num_steps=10, step_s=step_s, tokens_per_step=tokens, tokens_per_s=batch * tokens / step_s
    )


def test_measured_beside_predicted() -> None:
    """Rounds of 1.2 and 1.4 plain steps of 100 ms that yield 1.5 and 1.7 tokens where 1.5 and 1.75 are expected."""
    drafted = {1: steps_of(0.12, 1.5), 2: steps_of(0.14, 1.7)}
    loop = LinearCost(draft=0.1, row=0.3)
    found = describe_served(
        (steps_of(0.09, 1), steps_of(0.11, 1)), drafted, Rates(conditional=(0.5,)), lambda batch, k: loop(k)
    )
    assert (found["batch"], found["plain_ms"]) == (4, pytest.approx(100))
    assert found["plain_drift"] == pytest.approx(0.11 / 0.09 - 1)
    assert found["cost_per_draft_token"] == pytest.approx(0.2)
    assert found["largest_error"] == pytest.approx(0)
    one, two = found["rounds"]
    assert (one["cost"], two["cost"]) == pytest.approx((1.2, 1.4))
    assert (two["tokens_per_round"], two["expected_tokens"], two["extrapolated"]) == (1.7, 1.75, True)
    assert not one["extrapolated"]
    plain_tokens_per_s = (4 / 0.09 + 4 / 0.11) / 2
    assert two["speedup"] == pytest.approx(4 * 1.7 / 0.14 / plain_tokens_per_s)
    assert two["predicted_by_served"] == pytest.approx(1.75 / 1.4)
    assert two["predicted_by_loop"] == pytest.approx(1.75 / 1.8)
