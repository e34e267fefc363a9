"""Targets whose layers slide or keep a state: the loops write what transformers' own `generate` writes.

The windows (4 positions) are shorter than prompts and answers, so a layer that sees too much writes another text.
"""

from typing import Any

import pytest
import torch
from drafthead.data.errors import GateError, InputError
from drafthead.eval.decode import DecodeOptions, decode
from drafthead.eval.hf_target import HFTarget
from drafthead.eval.layer_kinds import attention_masks, keeps_positions
from drafthead.eval.recomputed_target import RecomputedTarget, loop_target
from transformers import AutoConfig, AutoModelForCausalLM

from tests.eval.speculation import NO_END, D, Scripted, V, tokens_of

WINDOW, NEW, BEHIND = 4, 14, 8
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7], [1, 8, 2, 8, 1, 8]]
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.4,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
SLIDING: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window": WINDOW, "layer_types": MIXED},
    "gpt_oss": {"sliding_window": WINDOW, "layer_types": MIXED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mistral": {"sliding_window": WINDOW},
    "qwen3": {"sliding_window": WINDOW, "use_sliding_window": True, "layer_types": MIXED},
}
STATEFUL: dict[str, dict[str, Any]] = {
    "qwen3_next": {**LINEAR, **EXPERTS},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "moe"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
    },
    "llama4_text": {
        "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
        "attention_chunk_size": WINDOW,
        "num_local_experts": 2,
        "intermediate_size_mlp": 48,
    },
}


def make_model(kind: str, changes: dict[str, Any]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = AutoConfig.for_model(kind, **{**SIZES, **changes})
        return AutoModelForCausalLM.from_config(config).float().eval().requires_grad_(False)


def generated(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    found = model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, eos_token_id=NO_END)
    return [int(token) for token in found[0]]


def scripted(texts: list[list[int]]) -> Scripted:
    generator = torch.Generator().manual_seed(5)
    return Scripted(texts, [(torch.rand(len(text), generator=generator) < 0.6).tolist() for text in texts])


@pytest.mark.parametrize("kind", [*SLIDING, *STATEFUL])
def test_speculative_text_equals_transformers_generate(kind: str) -> None:
    model = make_model(kind, {**SLIDING, **STATEFUL}[kind])
    texts = [generated(model, prompt, NEW + BEHIND) for prompt in PROMPTS]
    assert all(len(set(text[len(prompt) :])) > 2 for text, prompt in zip(texts, PROMPTS, strict=True)), "texts wander"
    target = loop_target(model, [1, 2])
    assert isinstance(target, HFTarget if kind in SLIDING else RecomputedTarget)
    options = DecodeOptions(max_new_tokens=NEW, end_ids=[NO_END])
    expected = [text[len(prompt) :][:NEW] for text, prompt in zip(texts, PROMPTS, strict=True)]
    assert tokens_of(decode(target, None, PROMPTS, 0, options)) == expected
    answers = decode(target, scripted(texts), PROMPTS, 3, options)
    assert tokens_of(answers) == expected
    assert {count for answer in answers for count in answer.accepted} >= {0, 3}, "some drafts are taken back"


@pytest.mark.parametrize("kind", ["mistral", "qwen3_next"])
def test_states_of_a_round_are_those_of_the_whole_text(kind: str) -> None:
    """What a head drafts from, after a rejected draft was written over."""
    target = loop_target(make_model(kind, {**SLIDING, **STATEFUL}[kind]), [1, 3])
    text = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    whole = target.start([text], 16)
    target.start([text[:6]], 16)
    target.step(torch.tensor([[7, 7, 7]]), torch.tensor([[6, 7, 8]]))
    again = target.step(torch.tensor([text[6:]]), torch.arange(6, 10)[None])
    torch.testing.assert_close(again.aux_BQAD, whole.aux_BQAD[:, 6:], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(again.last_BQD, whole.last_BQD[:, 6:], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(again.logits_BQV[:, -1:], whole.logits_BQV, rtol=1e-3, atol=1e-4)


def test_a_state_is_refused_where_only_positions_can_be_kept() -> None:
    model = make_model("qwen3_next", STATEFUL["qwen3_next"])
    assert not keeps_positions(model.config)
    with pytest.raises(InputError, match=r"draft model: a qwen3_next .*linear_attention.* keeps a state"):
        HFTarget(model, [], role="draft model")


def test_masks_are_added_where_attention_adds_them() -> None:
    """gpt-oss adds its mask to the scores: booleans there would hide nothing."""
    model = make_model("gpt_oss", SLIDING["gpt_oss"])
    masks = attention_masks(model.config, torch.tensor([[5]]), 6, torch.float32)
    assert isinstance(masks, dict)
    assert (masks["full_attention"] == 0).all()
    assert (masks["sliding_attention"][0, 0, 0] == 0).tolist() == [False, False, True, True, True, True]


def test_a_tree_beyond_the_window_is_refused() -> None:
    target = loop_target(make_model("mistral", SLIDING["mistral"]), [1])
    target.start([[1, 2, 3, 4, 5]], 16)
    visible = torch.ones(1, 2, 2, dtype=torch.bool).tril()
    with pytest.raises(InputError, match=r"leave eval\.tree out"):
        target.step_tree(torch.tensor([[1, 2]]), torch.tensor([5]), visible)


@pytest.mark.parametrize("kind", ["granite", "cohere"])
def test_logits_that_the_loop_does_not_know_are_a_gate(kind: str) -> None:
    """Both loops would be wrong alike, and their texts equal."""
    changes = {"granite": {"logits_scaling": 8.0}, "cohere": {"logit_scale": 0.1, "layer_norm_eps": 1e-5}}
    target = loop_target(make_model(kind, changes[kind]), [1])
    with pytest.raises(GateError, match=f"LoopGate: target {kind}: .*differ by"):
        target.start(PROMPTS, 32)
