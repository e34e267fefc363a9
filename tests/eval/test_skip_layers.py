"""Drafts by a part of the target's layers, against a copy of the model that has no other layers.

Shapes: B requests, Q new tokens, K draft tokens.
"""

import copy
from typing import Any

import pytest
import torch
from drafthead.data.errors import InputError
from drafthead.eval.decode import DecodeOptions, decode
from drafthead.eval.drafters.skip_layers import SkipLayers, SkipLayersOptions
from drafthead.eval.hf_target import HFTarget
from torch import nn
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from tests.eval.speculation import NO_END, SMALL, random_model, tokens_of
from tests.eval.watched import Watched

OPTIONS = DecodeOptions(max_new_tokens=17, end_ids=[NO_END])


def drafted_by_hand(model: Any, kept: list[int], text: list[int], k: int) -> list[int]:
    """The whole model reads all but the newest token; a copy with fewer layers goes on from the cache of its layers."""
    cache = DynamicCache()
    model(torch.tensor([text[:-1]]), past_key_values=cache, use_cache=True)
    fewer = copy.deepcopy(model)
    fewer.model.layers = nn.ModuleList(fewer.model.layers[layer] for layer in kept)
    fewer.config.num_hidden_layers = len(kept)
    if kinds := fewer.config.to_dict().get("layer_types"):
        fewer.config.layer_types = [kinds[layer] for layer in kept]
    for place, block in enumerate(fewer.model.layers):
        block.self_attn.layer_idx = place
    own = DynamicCache([(cache.layers[layer].keys, cache.layers[layer].values) for layer in kept])
    ids = text[-1:]
    for _ in range(k):
        output = fewer(torch.tensor([ids[-1:]]), past_key_values=own, use_cache=True)
        ids.append(int(output.logits[0, -1].argmax()))
    return ids[1:]


def test_with_no_layer_skipped_every_draft_is_right(target: HFTarget, prompts: list[list[int]]) -> None:
    answers = decode(target, SkipLayers(target, []), prompts, 4, OPTIONS)
    assert tokens_of(answers) == tokens_of(decode(target, None, prompts, 0, OPTIONS))
    assert {count for answer in answers for count in answer.accepted} == {4}


@pytest.mark.parametrize("end", [[NO_END], [7, 11]], ids=["no end", "two end ids"])
@pytest.mark.parametrize("skipped", [[0], [2], [1, 2]], ids=["first", "third", "middle"])
def test_the_text_is_that_of_plain_decoding(
    target: HFTarget, prompts: list[list[int]], skipped: list[int], end: list[int]
) -> None:
    options = DecodeOptions(max_new_tokens=17, end_ids=end)
    answers = decode(target, SkipLayers(target, skipped), prompts, 3, options)
    assert tokens_of(answers) == tokens_of(decode(target, None, prompts, 0, options))
    counts = [count for answer in answers for count in answer.accepted]
    assert sum(counts) < 3 * len(counts)


@pytest.mark.parametrize("kept", [[0, 1, 3], [0, 3]], ids=["one skipped", "two skipped"])
def test_drafts_equal_a_model_that_lacks_the_layers(
    model: Any, target: HFTarget, prompts: list[list[int]], kept: list[int]
) -> None:
    drafter = Watched(SkipLayers(target, {0, 1, 2, 3} - set(kept)))
    (answer,) = decode(target, drafter, [prompts[4]], 3, OPTIONS)
    assert len(drafter.rounds) == len(answer.accepted) > 4
    for text, drafts in drafter.rounds:
        assert drafts == drafted_by_hand(model, kept, text, 3)


def test_a_batch_drafts_what_each_request_would_alone(target: HFTarget, prompts: list[list[int]]) -> None:
    batch = decode(target, SkipLayers(target, [2]), prompts, 3, OPTIONS)
    assert batch == [decode(target, SkipLayers(target, [2]), [prompt], 3, OPTIONS)[0] for prompt in prompts]
    assert len(target.recorder.decoder.layers) == 4, "the target keeps its layers"


def test_the_layers_that_stay_keep_their_masks() -> None:
    """Layers see four positions, all, four, all: with the second one skipped the third must still see four."""
    kinds = ["sliding_attention", "full_attention"] * 2
    config = Qwen3Config(**SMALL, layer_types=kinds, use_sliding_window=True, sliding_window=4)
    mixed = random_model(Qwen3ForCausalLM, config, seed=8)
    target = HFTarget(mixed, [])
    drafter = Watched(SkipLayers(target, [1]))
    decode(target, drafter, [[3, 1, 4, 1, 5, 9, 2, 6, 5]], 3, OPTIONS)
    for text, drafts in drafter.rounds:
        assert drafts == drafted_by_hand(mixed, [0, 2, 3], text, 3)
    assert mixed.config.num_hidden_layers == 4


@pytest.mark.parametrize(
    ("text", "ids"), [("8-10", {8, 9, 10}), ("3", {3}), ("1+4-5", {1, 4, 5})], ids=["range", "one", "several"]
)
def test_layers_are_read(text: str, ids: set[int]) -> None:
    assert SkipLayersOptions(layers=text).ids == ids


@pytest.mark.parametrize(
    ("text", "message"),
    [("8..10", "layer ids and ranges joined by"), ("", "layer ids and ranges"), ("5-4", "a range ends before")],
    ids=["spelling", "empty", "backwards"],
)
def test_wrong_layers_are_one_line(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        SkipLayersOptions(layers=text)


def test_layers_that_the_target_lacks_are_refused(target: HFTarget) -> None:
    with pytest.raises(InputError, match="no layer 4; its layers are 0 to 3"):
        SkipLayers(target, [3, 4])
    with pytest.raises(InputError, match="all 4 layers are skipped"):
        SkipLayers(target, range(4))
