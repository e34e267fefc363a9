"""Which vocabularies fit: the rules one by one, and the tokens in common as vLLM counts them."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from drafthead.data.vocab_match import Vocabulary, find_mismatches, shared_tokens

from tests.eval.vllm_source import take

TOKENS = ("<s>", "</s>", "<pad>", "<x1>", "<x2>", "def", "Ġadd", "(", "a", ",", "Ġb", "):")
TARGET = Vocabulary(
    type="byte-level BPE",
    ids={token: number for number, token in enumerate(TOKENS)},
    size=len(TOKENS),
    bos_id=0,
    eos_id=1,
    unk_id=0,
    add_bos=True,
    add_eos=False,
    space_prefixes=("Ġ",),
)


def with_token(number: int, text: str) -> Vocabulary:
    tokens = [*TOKENS]
    tokens[number] = text
    return replace(TARGET, ids={token: place for place, token in enumerate(tokens)})


@pytest.mark.parametrize(
    "draft",
    [TARGET, replace(TARGET, size=len(TOKENS) + 128), with_token(3, "<tool>")],
    ids=["same family", "padded", "another control token"],
)
def test_what_can_draft(draft: Vocabulary) -> None:
    assert find_mismatches(TARGET, draft) == []


@pytest.mark.parametrize(
    ("draft", "rule", "values"),
    [
        (replace(TARGET, type="Unigram"), "type", ("byte-level BPE", "Unigram")),
        (replace(TARGET, bos_id=None), "bos_id", (0, None)),
        (replace(TARGET, eos_id=2), "eos_id", (1, 2)),
        (replace(TARGET, add_bos=False), "add_bos", (True, False)),
        (replace(TARGET, add_eos=True), "add_eos", (False, True)),
        (replace(TARGET, size=len(TOKENS) + 129), "size", (12, 141)),
        (with_token(6, "Ġplus"), "token_texts", ("Ġadd", "Ġplus")),
        (with_token(5, "class"), "token_texts", ("def", "class")),
    ],
    ids=["type", "bos", "eos", "add bos", "add eos", "size", "text", "first compared"],
)
def test_the_rule_that_fails_is_named_with_both_values(draft: Vocabulary, rule: str, values: tuple[Any, Any]) -> None:
    (failure,) = find_mismatches(TARGET, draft)
    assert (failure["rule"], failure["target"], failure["draft"]) == (rule, *values)
    assert all(str(value) in failure["message"] for value in values)


def test_every_rule_is_judged_and_differing_tokens_are_counted() -> None:
    draft = replace(TARGET, type="Unigram", eos_id=2, ids={token: 11 - place for token, place in TARGET.ids.items()})
    failures = {one["rule"]: one for one in find_mismatches(TARGET, draft)}
    assert set(failures) == {"type", "eos_id", "token_texts"}
    assert failures["token_texts"]["differing"] == 7
    assert failures["token_texts"]["first"][0] == {"id": 5, "target": "def", "draft": "Ġadd"}


def test_a_token_where_the_other_only_pads_differs() -> None:
    longer = replace(TARGET, ids={**TARGET.ids, "<tool>": 12}, size=13)
    (failure,) = find_mismatches(replace(TARGET, size=13), longer)
    assert (failure["rule"], failure["target"], failure["draft"]) == ("token_texts", None, "<tool>")


class _Tokenizer:
    """What vLLM's mapping asks of a tokenizer."""

    unk_token_id = 0

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary

    def get_vocab(self) -> dict[str, int]:
        return self.vocabulary.ids

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [0]

    def convert_ids_to_tokens(self, number: int) -> str:
        return self.vocabulary.space_prefixes[0] + "a"


@pytest.mark.parametrize("size", [12, 7], ids=["whole", "table smaller than the tokenizer"])
def test_common_tokens_are_those_of_vllm(size: int) -> None:
    spelled = {token.replace("Ġ", "▁"): 3 * place % 14 for token, place in TARGET.ids.items()}
    # of two spellings of one token the first counts
    draft = replace(TARGET, ids={**spelled, " add": 13, "other": 12}, size=14, space_prefixes=("▁",))
    target = replace(TARGET, size=size)
    mapping = take("v1/spec_decode/vocab_mapping.py", logger=logging.getLogger("quiet"))["VocabMapping"]
    vllm = mapping(_Tokenizer(target), _Tokenizer(draft), target.size, draft.size, torch.device("cpu"))
    shared = shared_tokens(target, draft)
    assert len(shared) == vllm.intersection_size
    assert 0 < vllm.intersection_size <= size
    assert {one: int(vllm.target_to_draft_ids[one]) for one, _ in shared} == dict(shared)
    assert {other: int(vllm.draft_to_target_ids[other]) for _, other in shared} == {b: a for a, b in shared}
