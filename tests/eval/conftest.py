"""A small random target, prompts, and its greedy texts, for every test of the speculative loops."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from drafthead.eval.hf_target import HFTarget
from transformers import LlamaConfig, LlamaForCausalLM

from tests.eval.speculation import AUX, BEHIND, LENGTHS, SMALL, V, random_model


@pytest.fixture(scope="session")
def model() -> Any:
    """Four random layers."""
    config = LlamaConfig(**SMALL, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None)
    return random_model(LlamaForCausalLM, config, seed=3)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(V, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.fixture(scope="session")
def texts(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Prompt and greedy continuation by whole forward passes, further than any test decodes."""
    found = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(17 + BEHIND):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        found.append(ids)
    assert len({tuple(text[-17:]) for text in found}) > 4, "the texts differ"
    return found


@pytest.fixture
def target(model: Any) -> Iterator[HFTarget]:
    yield HFTarget(model, AUX)
    for module in model.modules():
        module._forward_pre_hooks.clear()
