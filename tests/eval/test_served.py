"""ServedGate's comparison, and what is counted and timed, with a fake engine."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import drafthead.eval.served as served
import pytest
from drafthead.eval.acceptance import from_counters
from drafthead.eval.engine import DraftCounters, EngineConfig, Request, Result

PREDICTED = from_counters(100, [60, 40, 30])


def test_equal_numbers_and_equal_texts_pass() -> None:
    assert served.compare(PREDICTED, PREDICTED, 40, 40, 0.02) == served.Comparison(ok=True, failures=[])


@pytest.mark.parametrize(("accepted", "ok"), [(42, True), (38, True), (43, False), (37, False)])
def test_each_position_is_held_to_the_tolerance_both_ways(accepted: int, ok: bool) -> None:
    comparison = served.compare(PREDICTED, from_counters(100, [60, accepted, 30]), 40, 40, 0.02)
    assert comparison.ok is ok
    assert [failure["field"] for failure in comparison.failures] == [] if ok else ["per_position[1]"]


@pytest.mark.parametrize(("identical", "total"), [(39, 40), (0, 0)], ids=["one differs", "none compared"])
def test_every_text_must_equal_plain(identical: int, total: int) -> None:
    comparison = served.compare(PREDICTED, PREDICTED, identical, total, 0.02)
    assert not comparison.ok
    assert comparison.failures[0]["gate"] == "ServedGate"
    assert comparison.failures[0]["field"] == "identical_to_plain"


def test_another_k_cannot_be_compared() -> None:
    comparison = served.compare(PREDICTED, from_counters(100, [60, 40]), 40, 40, 0.02)
    assert [failure["field"] for failure in comparison.failures] == ["k"]


def test_a_server_that_drafted_nothing_fails() -> None:
    comparison = served.compare(PREDICTED, from_counters(0, [0, 0, 0]), 40, 40, 0.02)
    assert len(comparison.failures) == 3
    assert "served" in comparison.failures[0]["message"]


class FakeEngine:
    """Counts ten drafts a request; a request takes as many milliseconds a token as it has prompt tokens."""

    def __init__(self, config: EngineConfig, log_path: Path):
        self.seen: list[str] = []
        self.drafts = 7  # of an earlier life, not to be counted

    def __enter__(self) -> "FakeEngine":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def generate(self, requests: Iterable[Request]) -> Iterator[Result]:
        for request in requests:
            assert request.key not in self.seen
            self.seen.append(request.key)
            self.drafts += 10
            seconds = len(request.prompt_ids) * request.max_new_tokens / 1000
            tokens = [5] * request.max_new_tokens
            accepted = [1] * (request.max_new_tokens // 2 - 1)
            yield Result(key=request.key, token_ids=tokens, finish_reason="length", seconds=seconds, accepted=accepted)

    generate_one_by_one = generate

    def counters(self) -> DraftCounters:
        return DraftCounters(num_drafts=self.drafts, num_accepted_tokens_per_pos=[self.drafts])


def ask(key: str, prompt_tokens: int) -> Request:
    return Request(key=key, prompt_ids=[1] * prompt_tokens, max_new_tokens=4)


def test_counters_are_the_concurrent_batch_alone_and_times_the_timed_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(served, "Engine", FakeEngine)
    seen: list[Any] = []
    requests = [ask("a", 50), ask("b", 60)]
    timed = [ask("a", 3), ask("b", 8), ask("c", 4)]
    config = EngineConfig(model="target")
    measured = served.measure(config, requests, timed, tmp_path / "log", lambda *done: seen.append(done))
    assert sorted(measured.results) == ["a", "b"]
    assert measured.counters.num_drafts == 20
    assert measured.counters.num_accepted_tokens_per_pos == [20]
    assert measured.median_ms_per_token == pytest.approx(4.0)
    assert measured.median_ms_per_pass == pytest.approx(8.0), "of four tokens in the prompt's pass and one round"
    assert seen == [(1, 5), (2, 5), (3, 5), (4, 5), (5, 5)]


def test_without_timed_requests_there_is_no_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(served, "Engine", FakeEngine)
    measured = served.measure(EngineConfig(model="target"), [ask("a", 2)], [], tmp_path / "log")
    assert measured.median_ms_per_token is None
    assert measured.median_ms_per_pass is None
