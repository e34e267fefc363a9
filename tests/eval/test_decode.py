"""The speculative loop against plain decoding, transformers' generate and the walk; sampling against softmax.

Shapes: B requests, Q new tokens, K draft tokens, T tokens of a text, V vocabulary.
"""

from functools import partial
from typing import Any

import pytest
import torch
from drafthead.eval.acceptance import walk
from drafthead.eval.decode import Answer, DecodeOptions, decode
from drafthead.eval.engine import Request
from drafthead.eval.hf_engine import TransformersEngine
from drafthead.eval.hf_target import HFTarget
from drafthead.eval.protocols import Drafter, TargetPass
from drafthead.eval.states import StateRecorder
from drafthead.pipeline.heads.base import HeadBatch, Objective
from torch import Tensor

from tests.eval.speculation import AUX, NO_END, Scripted, V, chi_square_p, make_eagle3, tokens_of


def scripted(texts: list[list[int]], rate: float, seed: int = 5) -> Scripted:
    generator = torch.Generator().manual_seed(seed)
    return Scripted(texts, [(torch.rand(len(text), generator=generator) < rate).tolist() for text in texts])


def expected_answer(
    text: list[int], prompt: list[int], max_new_tokens: int, end_ids: list[int]
) -> tuple[list[int], str]:
    tokens = text[len(prompt) : len(prompt) + max_new_tokens]
    ends = [place for place, token in enumerate(tokens) if token in end_ids]
    return (tokens[: ends[0] + 1], "stop") if ends else (tokens, "length")


# ---- greedy ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3, 8], ids=lambda batch: f"batch {batch}")
@pytest.mark.parametrize("k", [1, 3, 5], ids=lambda k: f"k={k}")
@pytest.mark.parametrize("max_new_tokens", [1, 2, 17], ids=lambda count: f"{count} new")
def test_speculative_output_equals_plain_output(
    model: Any,
    target: HFTarget,
    prompts: list[list[int]],
    texts: list[list[int]],
    batch: int,
    k: int,
    max_new_tokens: int,
) -> None:
    options = DecodeOptions(max_new_tokens=max_new_tokens, end_ids=[NO_END])
    chosen, known = prompts[:batch], texts[:batch]
    expected = [text[len(prompt) :][:max_new_tokens] for text, prompt in zip(known, chosen, strict=True)]
    assert tokens_of(decode(target, None, chosen, 0, options)) == expected
    drafters: list[Drafter] = [make_eagle3(model), scripted(known, 0.6), scripted(known, 1.0)]
    for drafter in drafters:
        answers = decode(target, drafter, chosen, k, options)
        assert tokens_of(answers) == expected
        assert {answer.finish_reason for answer in answers} == {"length"}
        for answer in answers:
            assert len(answer.tokens) <= 1 + sum(answer.accepted) + len(answer.accepted)
            assert (answer.accepted == []) == (max_new_tokens == 1)


@pytest.mark.parametrize("end", [[NO_END], [4], [7, 11]], ids=["no end", "one end id", "two end ids"])
def test_plain_and_speculative_output_equal_transformers_generate(
    model: Any, target: HFTarget, prompts: list[list[int]], end: list[int]
) -> None:
    options = DecodeOptions(max_new_tokens=17, end_ids=end)
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=17, do_sample=False, eos_token_id=end
        )
        expected.append(output[0, len(prompt) :].tolist())
    assert tokens_of(decode(target, None, prompts, 0, options)) == expected
    assert tokens_of(decode(target, make_eagle3(model), prompts, 4, options)) == expected


@pytest.mark.parametrize("k", [1, 3, 5], ids=lambda k: f"k={k}")
@pytest.mark.parametrize("rate", [0.0, 0.5, 0.9, 1.0], ids=lambda rate: f"{rate:.0%} right")
@pytest.mark.parametrize("end", [[NO_END], [4], [7, 11]], ids=["no end", "one end id", "two end ids"])
def test_accept_counts_equal_the_walk(
    target: HFTarget, prompts: list[list[int]], texts: list[list[int]], k: int, rate: float, end: list[int]
) -> None:
    """Drafts behind an end inside the accepted run count, as in vLLM; none follow in the answer."""
    drafter = scripted(texts, rate)
    answers = decode(target, drafter, prompts, k, DecodeOptions(max_new_tokens=17, end_ids=end))
    for answer, prompt, text, hits in zip(answers, prompts, texts, drafter.hits, strict=True):
        assert (answer.tokens, answer.finish_reason) == expected_answer(text, prompt, 17, end)
        padded = [*hits, *[False] * (k + 2)]
        hits_TK = torch.tensor([[padded[slot + 2 + step] for step in range(k)] for slot in range(len(text))])
        last = len(prompt) + len(answer.tokens) - 1
        assert answer.accepted == walk(hits_TK, len(prompt) - 1, last, text_last=len(text) - 1)
        if rate in (0.0, 1.0):
            assert set(answer.accepted) <= {k if rate else 0}


def test_an_end_of_turn_inside_an_accepted_run_ends_the_answer(
    target: HFTarget, prompts: list[list[int]], texts: list[list[int]]
) -> None:
    """One round of eight drafts holds the whole answer and what the target would have written behind it."""
    prompt, text = prompts[0], texts[0]
    end = text[len(prompt) + 3]
    length = text[len(prompt) :].index(end) + 1
    assert 1 < length <= 4
    (answer,) = decode(target, scripted([text], 1.0), [prompt], 8, DecodeOptions(max_new_tokens=17, end_ids=[end]))
    assert answer == Answer(tokens=text[len(prompt) :][:length], accepted=[8], drafted=[8], finish_reason="stop")


@pytest.mark.parametrize("k", [1, 2, 4], ids=lambda k: f"k={k}")
def test_accept_counts_of_an_eagle3_head_equal_the_walk_over_its_unroll(
    model: Any, target: HFTarget, prompts: list[list[int]], texts: list[list[int]], k: int
) -> None:
    """What training watches is what the loop does: cache, roll-back and positions of the drafter included."""
    drafter = make_eagle3(model)
    options = DecodeOptions(max_new_tokens=17, end_ids=[NO_END])
    answers = decode(target, drafter, prompts, k, options)
    recorder = StateRecorder(model, AUX)
    seen: list[int] = []
    for answer, prompt, text in zip(answers, prompts, texts, strict=True):
        aux, last = recorder.forward(torch.tensor([text]))
        batch = HeadBatch(
            tokens_T=torch.tensor(text),
            aux_TAD=aux[0].clone(),
            last_TD=last[0].clone(),
            position_T=torch.arange(len(text)),
            supervised_T=torch.arange(len(text)) >= len(prompt),
            documents=[(0, len(text))],
        )
        output = drafter.head(batch, drafter.frozen, Objective(depth=k))
        expected = walk(output.survived_TK, len(prompt) - 1, len(prompt) + 16, text_last=len(text) - 1)
        assert answer.accepted == expected
        seen += expected
    assert len(set(seen)) > 1, "some drafts hit and some miss"


def test_results_do_not_depend_on_which_requests_share_the_batch(
    model: Any, target: HFTarget, prompts: list[list[int]]
) -> None:
    """Requests end at different times, so rows are dropped on the way; A24."""
    options = DecodeOptions(max_new_tokens=17, end_ids=[4, 7])
    drafter = make_eagle3(model)
    alone = [decode(target, drafter, [prompt], 3, options)[0] for prompt in prompts]
    assert len({len(answer.tokens) for answer in alone}) > 2
    assert decode(target, drafter, prompts, 3, options) == alone
    order = [5, 2, 7, 0]
    assert decode(target, drafter, [prompts[i] for i in order], 3, options) == [alone[i] for i in order]


def test_progress_counts_every_request_once(target: HFTarget, prompts: list[list[int]], texts: list[list[int]]) -> None:
    finished: list[int] = []
    options = DecodeOptions(max_new_tokens=9, end_ids=[4, 7])
    decode(target, scripted(texts, 0.5), prompts, 2, options, on_progress=finished.append)
    assert sum(finished) == len(prompts)
    assert len(finished) > 1


# ---- sampling --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [None, 0.0, 1.0], ids=["plain", "greedy-wrong drafts", "greedy-right drafts"])
def test_sampled_tokens_follow_the_targets_softmax(
    model: Any, target: HFTarget, prompts: list[list[int]], texts: list[list[int]], rate: float | None
) -> None:
    """First token from the prefill, second from a round with a draft that is the greedy text's or next to it."""
    draws, temperature, prompt = 3000, 2.5, prompts[3]

    class Fixed(Scripted):
        def observe(self, next_BQ: Tensor, states: TargetPass, position_BQ: Tensor, count_B: Tensor) -> None:
            self.slots = (position_BQ[torch.arange(len(count_B)), count_B - 1]).tolist()

    drafter = None if rate is None else Fixed([texts[3]] * draws, [[bool(rate)] * len(texts[3])] * draws)
    options = DecodeOptions(max_new_tokens=2, end_ids=[NO_END], temperature=temperature, seed=11)
    answers = decode(target, drafter, [prompt] * draws, 1, options)

    def probabilities(ids: list[int]) -> Tensor:
        logits_V: Tensor = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
        return (logits_V.double() / temperature).softmax(-1)

    first_V = probabilities(prompt)
    assert first_V.max() < 0.9, "there is something to sample"
    second_V = sum(first_V[token] * probabilities([*prompt, token]) for token in range(V))
    assert isinstance(second_V, Tensor)
    assert chi_square_p([answer.tokens[0] for answer in answers], first_V) > 1e-3
    assert chi_square_p([answer.tokens[1] for answer in answers], second_V) > 1e-3
    assert chi_square_p([answer.tokens[1] for answer in answers], first_V) < 1e-6, "the test has power"


def test_sampling_is_reproducible_by_seed(model: Any, target: HFTarget, prompts: list[list[int]]) -> None:
    options = partial(DecodeOptions, max_new_tokens=17, end_ids=[NO_END], temperature=1.0)
    drafter = make_eagle3(model)
    first, again, other = (decode(target, drafter, prompts, 3, options(seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert tokens_of(first) != tokens_of(other)


def test_a_cold_temperature_is_greedy(target: HFTarget, prompts: list[list[int]], texts: list[list[int]]) -> None:
    options = DecodeOptions(max_new_tokens=17, end_ids=[NO_END], temperature=1e-6)
    answers = decode(target, scripted(texts, 0.7), prompts, 3, options)
    assert tokens_of(answers) == [text[len(p) :][:17] for text, p in zip(texts, prompts, strict=True)]


# ---- the fallback engine ---------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3, 8], ids=lambda batch: f"batch {batch}")
def test_the_fallback_engine_gives_single_prompt_answers(
    model: Any, prompts: list[list[int]], texts: list[list[int]], batch: int
) -> None:
    end_ids = [4, 7]
    engine = TransformersEngine(lambda: model, end_ids, batch, seed=0)
    requests = [
        Request(key=str(number), prompt_ids=prompt, max_new_tokens=5 + 3 * (number % 5))
        for number, prompt in enumerate(prompts)
    ]
    with engine:
        results = {result.key: result for result in engine.generate(requests)}
    assert len(results) == len(prompts)
    for request, prompt, text in zip(requests, prompts, texts, strict=True):
        result = results[request.key]
        expected = expected_answer(text, prompt, request.max_new_tokens, end_ids)
        assert (result.token_ids, result.finish_reason) == expected
    assert {result.finish_reason for result in results.values()} == {"stop", "length"}


def test_requests_submitted_while_results_come_are_answered_too(model: Any, prompts: list[list[int]]) -> None:
    with TransformersEngine(lambda: model, [4], 2, seed=0) as engine:
        for number in range(3):
            engine.submit(Request(key=f"{number}", prompt_ids=prompts[number], max_new_tokens=3))
        keys = []
        for result in engine.results():
            keys.append(result.key)
            if len(result.key) == 1:
                engine.submit(Request(key=f"{result.key}-2", prompt_ids=prompts[4], max_new_tokens=3))
    assert sorted(keys) == ["0", "0-2", "1", "1-2", "2", "2-2"]


def test_a_sampling_request_does_not_make_its_neighbours_sample(
    model: Any, prompts: list[list[int]], texts: list[list[int]]
) -> None:
    hot = [
        Request(key=f"hot-{number}", prompt_ids=prompts[0], max_new_tokens=17, temperature=50.0) for number in range(4)
    ]
    cold = [
        Request(key=f"cold-{number}", prompt_ids=prompt, max_new_tokens=17) for number, prompt in enumerate(prompts)
    ]
    with TransformersEngine(lambda: model, [4, 7], 32, seed=0) as engine:
        results = {result.key: result.token_ids for result in engine.generate([*hot, *cold])}
    for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        assert results[f"cold-{number}"] == expected_answer(text, prompt, 17, [4, 7])[0]
    assert len({tuple(results[request.key]) for request in hot}) > 2
