"""Intervals beside every acceptance number, and acceptance by the length of the prompt."""

import json

import pytest
from drafthead.eval.acceptance import RequestRounds, summarize
from drafthead.eval.context_length import bucket_of, by_context_length
from drafthead.eval.intervals import mean_of_requests, pooled_length, position_rate, summarize_with_intervals
from drafthead.eval.intervals import tokens_per_pass as tokens_per_pass_of

REQUESTS = [
    RequestRounds(domain="math", accepted=[3, 0, 1], num_tokens=7, drafted=[3, 3, 3]),
    RequestRounds(domain="math", accepted=[2, 0, 0, 0], num_tokens=5, drafted=[3, 0, 2, 0]),
    RequestRounds(domain="code", accepted=[0, 0], num_tokens=2, drafted=[0, 0]),
    RequestRounds(domain="code", accepted=[1, 3], num_tokens=5, drafted=[1, 3]),
]


def test_the_sums_give_the_numbers_of_the_summary() -> None:
    """An interval around another number than the one beside it would be a lie."""
    numbers = summarize(REQUESTS, k=3)
    assert pooled_length(REQUESTS).value == pytest.approx(numbers["mean_acceptance_length"])
    assert mean_of_requests(REQUESTS).value == pytest.approx(numbers["mean_of_requests_acceptance_length"])
    assert tokens_per_pass_of(REQUESTS).value == pytest.approx(numbers["tokens_per_pass"])
    rates = [position_rate(REQUESTS, place).value for place in range(3)]
    assert rates == pytest.approx(numbers["per_position"])


def test_every_number_has_its_interval_and_keeps_its_name() -> None:
    plain, found = summarize(REQUESTS, k=3), summarize_with_intervals(REQUESTS, k=3)
    for numbers, before in ((found, plain), (found["by_domain"]["math"], plain["by_domain"]["math"])):
        assert {name: numbers[name] for name in before if name != "by_domain"} == {
            name: value for name, value in before.items() if name != "by_domain"
        }
        for name in ("mean_acceptance_length", "mean_of_requests_acceptance_length", "tokens_per_pass"):
            low, high = numbers[f"{name}_interval"]
            assert 1 <= low <= numbers[name] <= high <= 4
        assert len(numbers["per_position_interval"]) == 3
    assert found["prompts"] == 4
    assert found["by_domain"]["code"]["prompts"] == 2
    code = found["by_domain"]["code"]
    assert code["mean_acceptance_length_interval"] is None, "one of its two prompts was drafted for"
    assert code["tokens_per_pass_interval"] is not None
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    ("length", "bucket"),
    [(0, (0, 31)), (31, (0, 31)), (32, (32, 63)), (127, (64, 127)), (128, (128, 255)), (5000, (4096, 8191))],
)
def test_buckets(length: int, bucket: tuple[int, int]) -> None:
    assert bucket_of(length) == bucket


def test_each_bucket_has_the_numbers_of_its_prompts() -> None:
    found = by_context_length(REQUESTS, [40, 9, 63, 300], k=3)
    assert [(one["from"], one["to"], one["prompts"]) for one in found] == [(0, 31, 1), (32, 63, 2), (256, 511, 1)]
    for one, inside in zip(found, ([1], [0, 2], [3]), strict=True):
        alone = summarize([REQUESTS[place] for place in inside], k=3)
        for name in ("drafts", "mean_acceptance_length", "tokens_per_pass", "per_position"):
            assert one[name] == alone[name], name
    assert found[0]["mean_acceptance_length_interval"] is None, "one prompt"
    assert sum(one["drafts"] for one in found) == summarize(REQUESTS, k=3)["drafts"]
    assert by_context_length([], [], k=3) == []
