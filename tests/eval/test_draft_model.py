"""Draft models against whole forward passes: drafts, roll-back, and the translation between two vocabularies.

Shapes: B requests, Q new tokens, K draft tokens, V vocabulary.
"""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from drafthead.data.errors import InputError
from drafthead.data.vocab_match import Vocabulary
from drafthead.eval.decode import DecodeOptions, decode
from drafthead.eval.drafters.draft_model import DraftModel
from drafthead.eval.drafters.shared_vocab import SharedVocabulary
from drafthead.eval.hf_target import HFTarget
from transformers import LlamaConfig, LlamaForCausalLM

from tests.eval.speculation import NO_END, V, random_model, tokens_of
from tests.eval.watched import Watched

OPTIONS = DecodeOptions(max_new_tokens=17, end_ids=[NO_END])


def small(seed: int, vocab: int = V, scale: float = 0.4) -> Any:
    """Another random model, of two layers."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=scale,
        pad_token_id=0,
    )
    return random_model(LlamaForCausalLM, config, seed)


def greedy(model: Any, text: list[int], k: int) -> list[int]:
    """K tokens, each by a whole forward pass."""
    ids = list(text)
    for _ in range(k):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(text) :]


@pytest.mark.parametrize("k", [1, 4], ids=lambda k: f"k={k}")
def test_the_target_itself_as_draft_model_is_always_right(
    model: Any, target: HFTarget, prompts: list[list[int]], k: int
) -> None:
    answers = decode(target, DraftModel(copy.deepcopy(model)), prompts, k, OPTIONS)
    assert tokens_of(answers) == tokens_of(decode(target, None, prompts, 0, OPTIONS))
    assert {count for answer in answers for count in answer.accepted} == {k}


@pytest.mark.parametrize("end", [[NO_END], [7, 11]], ids=["no end", "two end ids"])
def test_the_text_is_that_of_plain_decoding(target: HFTarget, prompts: list[list[int]], end: list[int]) -> None:
    """Requests end at different rounds, so rows are selected in between."""
    options = DecodeOptions(max_new_tokens=17, end_ids=end)
    answers = decode(target, DraftModel(small(5)), prompts, 3, options)
    assert tokens_of(answers) == tokens_of(decode(target, None, prompts, 0, options))
    counts = [count for answer in answers for count in answer.accepted]
    assert 0 < sum(counts) < 3 * len(counts)


def test_a_batch_drafts_what_each_request_would_alone(target: HFTarget, prompts: list[list[int]]) -> None:
    batch = decode(target, DraftModel(small(5)), prompts, 3, OPTIONS)
    assert batch == [decode(target, DraftModel(small(5)), [prompt], 3, OPTIONS)[0] for prompt in prompts]


@pytest.mark.parametrize("request_number", [0, 2, 4], ids=["3 tokens", "1 token", "12 tokens"])
def test_drafts_equal_whole_passes_over_the_text_so_far(
    model: Any, target: HFTarget, prompts: list[list[int]], request_number: int
) -> None:
    """The drafts of a model that is right half of the time, after drafts of every length were refused."""
    noisy = copy.deepcopy(model)
    with torch.no_grad():
        noisy.lm_head.weight.add_(0.5 * torch.randn(noisy.lm_head.weight.shape, generator=torch.manual_seed(1)))
    drafter = Watched(DraftModel(noisy))
    (answer,) = decode(target, drafter, [prompts[request_number]], 4, OPTIONS)
    assert len(set(answer.accepted)) > 1
    for text, drafts in drafter.rounds:
        assert drafts == greedy(noisy, text, 4)


# ---- another vocabulary ----------------------------------------------------------------------------------


def vocabulary(tokens: list[str], unk_id: int | None = 1) -> Vocabulary:
    return Vocabulary(
        type="byte-level BPE",
        ids={token: number for number, token in enumerate(tokens)},
        size=len(tokens),
        bos_id=None,
        eos_id=0,
        unk_id=unk_id,
        add_bos=False,
        add_eos=False,
        space_prefixes=("Ġ",),
    )


TOKENS = ["</s>", "<unk>", *"abcdefghijk", "Ġa"]
OURS = vocabulary(TOKENS)


def test_the_target_with_its_tokens_in_another_order_is_always_right(
    model: Any, target: HFTarget, prompts: list[list[int]]
) -> None:
    order = torch.randperm(V, generator=torch.Generator().manual_seed(3)).tolist()
    shuffled = copy.deepcopy(model)
    with torch.no_grad():
        shuffled.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight[order])
        shuffled.lm_head.weight.copy_(model.lm_head.weight[order])
    shared = SharedVocabulary.of(OURS, vocabulary([TOKENS[number] for number in order]), "cpu")
    assert (shared.num_shared, shared.share_of_target) == (V, 1.0)
    answers = decode(target, DraftModel(shuffled, shared), prompts, 3, OPTIONS)
    assert {count for answer in answers for count in answer.accepted} == {3}


# the first half of the target's tokens in another order, others between them, a space spelled otherwise
THEIRS = ["x", "c", "</s>", "y", "▁a", "b", "a", "<unk>", "zz", "d"]


def test_only_common_tokens_are_drafted_and_the_text_stays_the_targets(
    target: HFTarget, prompts: list[list[int]]
) -> None:
    """Each draft equals a step by hand: ids mapped to the draft model's, unknown ones to its unknown token, the
    likeliest of the common tokens mapped back."""
    theirs = replace(vocabulary(THEIRS, unk_id=7), space_prefixes=("▁",))
    shared = SharedVocabulary.of(OURS, theirs, "cpu")
    to_draft = {TOKENS.index(a): THEIRS.index(a) for a in ("</s>", "<unk>", "a", "b", "c", "d")} | {V - 1: 4}
    to_target = {other: one for one, other in to_draft.items()}
    assert shared.share_of_target == len(to_draft) / V == 0.5
    draft_model = small(9, vocab=len(THEIRS), scale=0.8)
    drafter = Watched(DraftModel(draft_model, shared))
    drafted = set()
    for prompt in prompts[3:5]:
        (answer,) = decode(target, drafter, [prompt], 3, OPTIONS)
        assert answer.tokens == decode(target, None, [prompt], 0, OPTIONS)[0].tokens
        for text, drafts in drafter.rounds:
            ids = [to_draft.get(token, 7) for token in text]
            for draft in drafts:
                logits_U = draft_model(torch.tensor([ids]), use_cache=False).logits[0, -1]
                best = max(to_target, key=lambda number: float(logits_U[number]))
                assert draft == to_target[best]
                ids.append(best)
            drafted |= set(drafts)
    assert len(drafted) > 2


def test_a_vocabulary_with_nothing_in_common_or_nothing_for_unknown_tokens_is_refused() -> None:
    with pytest.raises(InputError, match="no token in common with the target's"):
        SharedVocabulary.of(OURS, vocabulary(["x", "y"]), "cpu")
    with pytest.raises(InputError, match="neither an unknown token nor an EOS"):
        SharedVocabulary.of(OURS, replace(vocabulary(["a", "b"], unk_id=None), eos_id=None), "cpu")
    by_eos = SharedVocabulary.of(OURS, vocabulary(["</s>", "a"], unk_id=None), "cpu")
    assert int(by_eos.draft_ids_V[TOKENS.index("b")]) == 0
