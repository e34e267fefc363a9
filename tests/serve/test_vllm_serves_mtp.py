"""A real vLLM serves stitched MTP checkpoints: plain text, and counters equal to the walk.

The layers learn the greedy texts of a tiny random target by heart, as far as their few parameters go, so that rounds of
different lengths occur. A norm, order, feedback, bias or tensor that vLLM reads otherwise breaks that pattern.

Only families that the CPU build of vLLM 0.32 serves as transformers computes them. Its qwen3_5.py imports qwen3_vl.py,
which imports transformers' image processor of Qwen2-VL, which imports torchvision, and that is not installed beside a
CPU torch (ModuleNotFoundError in vLLM's log). Its DeepSeek-V3 writes another plain text than transformers: the CPU
kernel of `rotary_embedding` is wrong for the slices of queries and keys that latent attention rotates. With
`compilation_config={"custom_ops": ["all", "-rotary_embedding"]}` the log-probabilities of both agree to three decimals.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafthead.data.draft_vocab import DraftVocab
from drafthead.eval.engine import is_available
from drafthead.eval.hf_target import HFTarget
from drafthead.pipeline.export.folder import TrainedHead, initial_digests
from drafthead.pipeline.export.mtp import write_mtp
from drafthead.pipeline.export.preflight import preflight
from drafthead.pipeline.heads.base import Objective
from drafthead.pipeline.heads.build import build_frozen_target, build_head, describe_head
from drafthead.pipeline.recipe import MTPConfig
from drafthead.pipeline.target import Target, open_target
from transformers import AutoModelForCausalLM, Glm4MoeConfig, LlamaConfig, PreTrainedConfig

from tests.serve.by_heart import assert_served_as_walked, batch_of, greedy_texts, learn_by_heart, rounds_of

pytestmark = [
    pytest.mark.serve,
    pytest.mark.slow,
    pytest.mark.skipif(not is_available(), reason="vllm is not installed"),
]

K = 3
COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": torch.float32,
}
FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "tied llama as mimo": lambda: LlamaConfig(**COMMON, tie_word_embeddings=True),
    "glm4_moe, experts": lambda: Glm4MoeConfig(
        **COMMON,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        first_k_dense_replace=1,
        num_mtp_layers=0,
        use_qk_norm=True,
    ),
}


def write_target(folder: Path, config: PreTrainedConfig) -> Target:
    """A random target of a family, with the tokenizer of the built-in one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(open_target("builtin:tiny-random").path / name, folder / name)
    return Target(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_plain_and_counters_are_those_of_the_walk(cache: Path, tmp_path: Path, family: str) -> None:
    target = write_target(tmp_path / "target", FAMILIES[family]())
    model = HFTarget(target.load(torch.float32, "cpu"), [])
    texts = greedy_texts(target, model, K)
    batches = [batch_of(text, model) for text in texts]
    size = target.vocab_size
    vocab = DraftVocab(d2t=torch.zeros(size, dtype=torch.int64), t2d=torch.ones(size, dtype=torch.bool))
    frozen = build_frozen_target(target, vocab)
    head = build_head(MTPConfig(type="mtp"), target, frozen, 0, seed=0)
    head.calibrate(batches[0].last_TD, frozen)
    initial = initial_digests(head.state_dict())
    learn_by_heart(head, frozen, batches, Objective(depth=K), num_steps=12, rate=5e-3)
    description = {**describe_head(head, []), "initial_digests": initial, "trained_length": 48}
    export = tmp_path / "export"
    state = head.state_dict()
    write_mtp(
        export, TrainedHead(state=state, description=description, target=target, vocab=vocab, k=K, dtype="float32")
    )
    assert preflight(export, target.path).failures == []

    rounds = rounds_of(texts, batches, head, frozen, K)
    assert {0, K} < set(rounds), "rounds of different lengths"
    assert_served_as_walked(target, export, K, texts, rounds)
