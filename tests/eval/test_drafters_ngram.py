"""Prompt lookup: against a search through the whole text, against vLLM's own proposer, and in the loop.

Shapes: B requests, Q new tokens, K draft tokens.
"""

import random
from typing import Any

import numpy as np
import pytest
import torch
from drafthead.data.errors import InputError
from drafthead.eval.decode import DecodeOptions, decode
from drafthead.eval.drafters.ngram import NgramDrafter, NgramIndex, NgramOptions
from drafthead.eval.engine import is_available
from drafthead.eval.hf_target import HFTarget
from torch import Tensor

from tests.eval.speculation import NO_END, V, chi_square_p, tokens_of

BOUNDS = [(1, 1), (2, 2), (5, 5), (1, 3), (2, 4), (3, 8)]
LONG = 10_000


def search(tokens: list[int], low: int, high: int, k: int) -> list[int]:
    """The definition: the longest suffix that occurs earlier, its first occurrence, what follows it there."""
    for length in range(min(high, len(tokens) - 1), low - 1, -1):
        for start in range(len(tokens) - length):
            if tokens[start : start + length] == tokens[len(tokens) - length :]:
                return tokens[start + length : start + length + k]
    return []


def texts() -> list[list[int]]:
    """Random ones over few and many tokens, repetitions of short pieces, and pieces with one change."""
    draw = random.Random(7)
    found = [[draw.randrange(size) for _ in range(length)] for size in (1, 2, 3, 20) for length in (1, 2, 9, 60)]
    for period in (1, 2, 3, 5, 11):
        piece = [draw.randrange(9) for _ in range(period)]
        found.append((piece * 30)[:50])
        changed = (piece * 30)[:50]
        changed[draw.randrange(50)] = 9
        found.append(changed)
    return found


def options_of(low: int, high: int) -> NgramOptions:
    return NgramOptions(prompt_lookup_min=low, prompt_lookup_max=high)


@pytest.mark.parametrize(("low", "high"), BOUNDS)
def test_every_prefix_proposes_what_a_search_finds(low: int, high: int) -> None:
    found = 0
    for text in texts():
        index = NgramIndex(options_of(low, high))
        for place, token in enumerate(text):
            index.append(token)
            for k in (1, 4):
                expected = search(text[: place + 1], low, high, k)
                assert index.propose(k) == expected, (text[: place + 1], k)
                found += len(expected)
    assert found > 100


@pytest.mark.skipif(not is_available(), reason="vllm is not installed")
@pytest.mark.parametrize(("low", "high"), BOUNDS)
def test_every_prefix_proposes_what_vllm_proposes(low: int, high: int) -> None:
    from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens as theirs

    for text in texts():
        array = np.array(text, dtype=np.int32)
        limit = len(text) - 2  # of the model's length: the last tokens get shorter drafts, and then none
        index = NgramIndex(options_of(low, high))
        for place, token in enumerate(text):
            index.append(token)
            for k in (1, 3, 5):
                count = place + 1
                assert index.propose(k) == theirs(array[:count], low, high, LONG, k).tolist()
                assert index.propose(min(k, limit - count)) == theirs(array[:count], low, high, limit, k).tolist()


@pytest.mark.parametrize(
    ("given", "low", "high"),
    [({}, 5, 5), ({"prompt_lookup_max": 4}, 4, 4), ({"prompt_lookup_min": 2}, 2, 2)],
    ids=["neither", "max alone", "min alone"],
)
def test_bounds_that_are_not_given_are_vllms(given: dict[str, int], low: int, high: int) -> None:
    options = NgramOptions(**given)
    assert (options.prompt_lookup_min, options.prompt_lookup_max) == (low, high)


@pytest.mark.parametrize("given", [{"prompt_lookup_min": 4, "prompt_lookup_max": 3}, {"prompt_lookup_min": 0}])
def test_impossible_bounds_are_refused(given: dict[str, int]) -> None:
    with pytest.raises(InputError, match=f"prompt_lookup_min={given['prompt_lookup_min']}"):
        NgramOptions(**given)


# ---- in the loop -----------------------------------------------------------------------------------------


def simulate(text: list[int], context: int, end: int, options: NgramOptions, k: int) -> tuple[list[int], list[int]]:
    """Rounds of a greedy server that knows its text: drafts from what it has, counts before it trims."""
    low, high = options.prompt_lookup_min, options.prompt_lookup_max
    assert low is not None
    assert high is not None
    length, accepted, drafted = context + 1, [], []
    while length < end:
        draft = search(text[:length], low, high, k)
        hits = [a == b for a, b in zip(draft, text[length : length + len(draft)], strict=True)]
        kept = hits.index(False) if False in hits else len(hits)
        accepted.append(kept)
        drafted.append(len(draft))
        length += kept + 1
    return accepted, drafted


@pytest.mark.parametrize("batch", [1, 8], ids=lambda batch: f"batch {batch}")
@pytest.mark.parametrize("k", [1, 4], ids=lambda k: f"k={k}")
def test_text_stays_plain_and_rounds_are_those_of_a_simulated_server(
    target: HFTarget, prompts: list[list[int]], texts: list[list[int]], batch: int, k: int
) -> None:
    options = DecodeOptions(max_new_tokens=17, end_ids=[NO_END])
    lookup = options_of(1, 3)
    answers = decode(target, NgramDrafter(lookup, LONG), prompts[:batch], k, options)
    assert tokens_of(answers) == tokens_of(decode(target, None, prompts[:batch], 0, options))
    rounds = [(answer.accepted, answer.drafted) for answer in answers]
    assert rounds == [
        simulate(text, len(prompt), len(prompt) + 17, lookup, k)
        for text, prompt in zip(texts[:batch], prompts, strict=False)
    ]
    if batch > 1:
        assert {0, k} <= {count for _, drafted in rounds for count in drafted}, "drafts of different lengths, and none"
        assert any(count for accepted, _ in rounds for count in accepted)


def test_no_draft_reaches_the_models_last_place() -> None:
    """vLLM's scheduler leaves room for the token that the target adds (v1/core/sched/scheduler.py)."""
    text = [1, 2, 3] * 3
    for limit, expected in ((13, [2, 3]), (12, [2]), (11, []), (10, [])):  # 10 tokens are there
        drafter = NgramDrafter(options_of(2, 2), limit)
        drafter.start([text], 20)
        ids = torch.tensor([[*text[1:], 1]])
        drafter.observe(ids, None, torch.arange(9)[None], torch.tensor([9]))  # type: ignore[arg-type]
        assert drafter.draft(3).tolist() == [expected]


def test_sampled_text_follows_the_target_where_drafts_have_different_lengths(model: Any, target: HFTarget) -> None:
    """The second token over all first ones: some of these are followed by drafts, others are new to the text."""
    prompt, count, temperature = [1, 2, 3, 4, 1, 2], 3000, 0.7
    options = DecodeOptions(max_new_tokens=2, end_ids=[NO_END], temperature=temperature)
    answers = decode(target, NgramDrafter(options_of(1, 2), LONG), [prompt] * count, 2, options)
    assert {answer.drafted[0] for answer in answers} == {0, 2}
    assert len({answer.accepted[0] for answer in answers}) > 1

    def next_V(ids: list[int]) -> Tensor:
        return (model(torch.tensor([ids]), use_cache=False).logits[0, -1].double() / temperature).softmax(-1)

    first_V = next_V(prompt)
    second_V = sum((share * next_V([*prompt, token]) for token, share in enumerate(first_V)), torch.zeros(V))
    assert chi_square_p([answer.tokens[0] for answer in answers], first_V) > 1e-3
    assert chi_square_p([answer.tokens[1] for answer in answers], second_V) > 1e-3
