"""Acceptance arithmetic, against numbers worked out by hand, and the walk against a simulated server."""

import json
import random

import pytest
import torch
from drafthead.data.errors import InputError
from drafthead.eval.acceptance import RequestRounds, from_counters, summarize, summarize_tree, walk

ROUNDS = [3, 0, 1, 3, 2, 0, 1, 0]


def request_of(accepted: list[int], domain: str = "math") -> RequestRounds:
    return RequestRounds(domain=domain, accepted=accepted, num_tokens=sum(accepted) + len(accepted))


def with_length(tokens: int, rounds: int) -> RequestRounds:
    """A request of `rounds` rounds that gave `tokens` tokens, however they lie."""
    extra = tokens - rounds
    return RequestRounds(
        domain="math",
        accepted=[extra // rounds + (i < extra % rounds) for i in range(rounds)],
        num_tokens=tokens,
    )


def test_every_number_of_one_request() -> None:
    summary = summarize([request_of(ROUNDS)], k=3)
    assert summary["k"] == 3
    assert summary["drafts"] == 8
    assert summary["per_position"] == [0.625, 0.375, 0.25]
    assert summary["conditional"] == pytest.approx([0.625, 0.6, 2 / 3])
    assert summary["mean_acceptance_length"] == 2.25, "the target's own token counts: 1 + 1.25 drafts kept"
    assert summary["mean_acceptance_length"] - 1 == pytest.approx(sum(summary["per_position"]))
    assert summary["mean_of_requests_acceptance_length"] == 2.25
    assert summary["draft_acceptance_rate"] == pytest.approx(10 / 24)


def test_the_numbers_of_a_tree_have_names_of_their_own() -> None:
    tree = summarize_tree([request_of(ROUNDS), request_of([1], "code")], nodes=20, depth=3)
    assert (tree["drafts"], tree["nodes"], tree["depth"], tree["rounds"]) == ("tree", 20, 3, 9)
    assert tree["per_depth"] == pytest.approx([6 / 9, 3 / 9, 2 / 9])
    assert tree["mean_acceptance_length"] == pytest.approx(1 + 11 / 9)
    assert tree["mean_of_requests_acceptance_length"] == pytest.approx((2.25 + 2) / 2)
    assert tree["accepted_share_of_nodes"] == pytest.approx(11 / 180)
    assert tree["by_domain"]["code"] == {"rounds": 1, "mean_acceptance_length": 2}
    assert not {"k", "per_position", "draft_acceptance_rate"} & tree.keys()


def test_pooled_and_mean_of_requests_can_order_two_systems_differently() -> None:
    a = summarize([with_length(300, 100), with_length(12, 10)], k=7)
    b = summarize([with_length(290, 100), with_length(20, 10)], k=7)
    assert a["mean_acceptance_length"] == pytest.approx(2.836, abs=5e-4)
    assert b["mean_acceptance_length"] == pytest.approx(2.818, abs=5e-4)
    assert a["mean_of_requests_acceptance_length"] == pytest.approx(2.10)
    assert b["mean_of_requests_acceptance_length"] == pytest.approx(2.45)


def test_domains_have_the_same_numbers_each_for_itself() -> None:
    summary = summarize([request_of(ROUNDS, "math"), request_of([1], "code")], k=3)
    assert sorted(summary["by_domain"]) == ["code", "math"]
    assert summary["by_domain"]["code"]["mean_acceptance_length"] == 2.0
    assert summary["by_domain"]["code"].keys() == summary.keys() - {"by_domain"}
    assert summary["drafts"] == 9


@pytest.mark.parametrize("requests", [[], [request_of([])]], ids=["no requests", "one-token answer"])
def test_nothing_drafted_is_none_and_valid_json(requests: list[RequestRounds]) -> None:
    summary = summarize(requests, k=2)
    assert summary["drafts"] == 0
    assert summary["per_position"] == [None, None]
    assert summary["mean_acceptance_length"] is None
    assert summary["mean_of_requests_acceptance_length"] is None
    assert summary["draft_acceptance_rate"] is None
    json.dumps(summary, allow_nan=False)


def test_a_conditional_rate_without_cases_is_none() -> None:
    assert summarize([request_of([1, 0])], k=3)["conditional"] == [0.5, 0.0, None]


@pytest.mark.parametrize(("accepted", "k"), [([4], 3), ([-1], 3), ([0], 0)], ids=["above k", "negative", "k 0"])
def test_impossible_rounds_are_refused(accepted: list[int], k: int) -> None:
    with pytest.raises(InputError, match="k="):
        summarize([request_of(accepted)], k)


def test_counters_give_the_same_numbers_as_rounds() -> None:
    expected = summarize([request_of(ROUNDS)], k=3)
    counted = from_counters(8, [5, 3, 2], mean_of_requests=2.25)
    assert counted == {**expected, "by_domain": {}}
    assert from_counters(8, [5, 3, 2])["mean_of_requests_acceptance_length"] is None
    assert from_counters(8, [5, 3, 2], num_draft_tokens=20)["draft_acceptance_rate"] == 0.5


# ---- the walk --------------------------------------------------------------------------------------------


def serve(text: list[int], drafts: list[list[int]], context: int, end: int) -> list[int]:
    """Rounds of a greedy server that knows how its text goes on: it counts first and trims after."""
    length, counted = context + 1, []
    while length < end:
        slot, accepted = length - 2, 0
        while accepted < len(drafts[slot]) and drafts[slot][accepted] == text[length + accepted]:
            accepted += 1
        counted.append(accepted)
        length += accepted + 1
    return counted


def random_case(seed: int, k: int) -> tuple[list[int], list[list[int]], torch.Tensor]:
    generator = random.Random(seed)
    text = [generator.randrange(50) for _ in range(40)]
    drafts = [[text[i + 2 + j] if generator.random() < 0.7 else 99 for j in range(k)] for i in range(38 - k)]
    hits = torch.zeros(40, k, dtype=torch.bool)
    for i, row in enumerate(drafts):
        hits[i] = torch.tensor([row[j] == text[i + 2 + j] for j in range(k)])
    return text, drafts, hits


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("end", range(7, 13))
def test_walk_equals_a_server_where_the_text_goes_on(k: int, end: int) -> None:
    context = 6
    for seed in range(20):
        text, drafts, hits = random_case(seed, k)
        assert walk(hits, context - 1, end - 1, text_last=39) == serve(text, drafts, context, end)


def test_drafts_behind_the_text_count_as_missed_and_the_rest_is_exact() -> None:
    hits = torch.ones(12, 3, dtype=torch.bool)
    # tokens 4..11 are the answer: 4 from the prefill, 5-8 from the first round, 9-11 of four from the second
    assert walk(hits, first=3, last=11) == [3, 3]
    assert walk(hits, first=3, last=10) == [3, 2]
    assert walk(hits, first=3, last=9) == [3, 1]
    assert walk(hits, first=3, last=9, text_last=11) == [3, 3]
    assert walk(hits, first=3, last=8) == [3]


def test_the_first_round_is_that_of_the_last_prompt_token() -> None:
    hits = torch.zeros(8, 2, dtype=torch.bool)
    hits[3] = True
    assert walk(hits, first=3, last=8) == [2, 0]
    assert walk(hits, first=2, last=8) == [0, 2, 0]


def test_an_answer_of_one_token_has_no_round() -> None:
    assert walk(torch.ones(6, 3, dtype=torch.bool), first=3, last=4) == []


def test_a_hit_after_a_miss_is_not_counted() -> None:
    hits = torch.tensor([[True, False, True]] * 8)
    assert walk(hits, first=0, last=5) == [1, 1]


@pytest.mark.parametrize(
    ("first", "last", "text_last"),
    [(-1, 4, None), (0, 8, None), (0, 4, 3)],
    ids=["first", "last", "text_last"],
)
def test_a_walk_outside_its_slots_is_refused(first: int, last: int, text_last: int | None) -> None:
    with pytest.raises(InputError, match="walk"):
        walk(torch.ones(6, 3, dtype=torch.bool), first, last, text_last)
