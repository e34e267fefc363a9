"""A real vLLM serves stitched MTP checkpoints: plain text, and counters equal to the walk.

The layers learn the greedy texts of a tiny random target by heart, as far as their few parameters go, so that rounds of
different lengths occur. A norm, order, feedback, bias or tensor that vLLM reads otherwise breaks that pattern.

Only families that vLLM 0.32 serves on a CPU as transformers computes them: Qwen3.5's model cannot be imported there
(it needs torchvision), and the plain text of its DeepSeek-V3 on a CPU is another.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from drafthead.data.draft_vocab import DraftVocab
from drafthead.data.files import read_json
from drafthead.eval.acceptance import walk
from drafthead.eval.decode import DecodeOptions, decode
from drafthead.eval.engine import DraftCounters, Engine, EngineConfig, Request, is_available
from drafthead.eval.hf_target import HFTarget
from drafthead.pipeline.export.folder import TrainedHead, initial_digests, served_path
from drafthead.pipeline.export.mtp import write_mtp
from drafthead.pipeline.export.preflight import preflight
from drafthead.pipeline.heads.base import FrozenTarget, Head, HeadBatch, Objective
from drafthead.pipeline.heads.build import build_frozen_target, build_head, describe_head
from drafthead.pipeline.recipe import MTPConfig
from drafthead.pipeline.target import Target, open_target
from transformers import AutoModelForCausalLM, Glm4MoeConfig, LlamaConfig, PreTrainedConfig

pytestmark = [
    pytest.mark.serve,
    pytest.mark.slow,
    pytest.mark.skipif(not is_available(), reason="vllm is not installed"),
]

K = 3
LENGTHS = [1, 2, 3, 12, 13, 14, 15, 30, 30, 30]
"""Of the answers."""
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


@dataclass(frozen=True, kw_only=True)
class Text:
    """A prompt, its greedy answer, and what would follow."""

    prompt: list[int]
    answer: list[int]
    beyond: list[int]

    @property
    def ids(self) -> list[int]:
        return [*self.prompt, *self.answer, *self.beyond]


def write_target(folder: Path, config: PreTrainedConfig) -> Target:
    """A random target of a family, with the tokenizer of the built-in one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(open_target("builtin:tiny-random").path / name, folder / name)
    return Target(folder)


def greedy_texts(target: Target, model: HFTarget) -> list[Text]:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, target.vocab_size, (4 + n,), generator=generator).tolist() for n in range(len(LENGTHS))]
    options = DecodeOptions(max_new_tokens=max(LENGTHS) + K, end_ids=[])
    found = []
    for prompt, length, plain in zip(prompts, LENGTHS, decode(model, None, prompts, 0, options), strict=True):
        ends = [place + 1 for place, token in enumerate(plain.tokens) if token in target.end_of_turn_ids]
        length = min([length, *ends])
        found.append(Text(prompt=prompt, answer=plain.tokens[:length], beyond=plain.tokens[length:]))
    return found


def batch_of(text: Text, model: HFTarget) -> HeadBatch:
    tokens_T = torch.tensor(text.ids)
    aux, last = model.recorder.forward(tokens_T[None])
    return HeadBatch(
        tokens_T=tokens_T,
        aux_TAD=aux[0].clone(),
        last_TD=last[0].clone(),
        position_T=torch.arange(len(tokens_T)),
        supervised_T=torch.arange(len(tokens_T)) >= len(text.prompt),
        documents=[(0, len(tokens_T))],
    )


def learn_by_heart(head: Head, frozen: FrozenTarget, batches: list[HeadBatch], steps: int) -> None:
    optimizer = torch.optim.Adam([p for p in head.parameters() if p.requires_grad], lr=5e-3)
    for _ in range(steps):
        for batch in batches:
            head(batch, frozen, Objective(depth=K)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def rounds_of(text: Text, head: Head, frozen: FrozenTarget, batch: HeadBatch) -> list[int]:
    with torch.inference_mode():
        survived_TK = head(batch, frozen, Objective(depth=K)).survived_TK
    first = len(text.prompt) - 1
    return walk(survived_TK, first, first + len(text.answer), text_last=len(text.ids) - 1)


def serve(target: Target, export: Path, texts: list[Text]) -> tuple[list[list[int]], DraftCounters]:
    config = EngineConfig(
        model=str(served_path(target.path, export)),
        max_model_len=128,
        kv_cache_gib=1,
        speculative_config=read_json(export / "speculative_config.json"),
    )
    requests = [
        Request(key=str(number), prompt_ids=text.prompt, max_new_tokens=len(text.answer))
        for number, text in enumerate(texts)
    ]
    with Engine(config, export.parent / "vllm.log") as engine:
        results = {result.key: result.token_ids for result in engine.generate(requests)}
        return [results[request.key] for request in requests], engine.counters()


@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_plain_and_counters_are_those_of_the_walk(cache: Path, tmp_path: Path, family: str) -> None:
    target = write_target(tmp_path / "target", FAMILIES[family]())
    model = HFTarget(target.load(torch.float32, "cpu"), [])
    texts = greedy_texts(target, model)
    batches = [batch_of(text, model) for text in texts]
    size = target.vocab_size
    vocab = DraftVocab(d2t=torch.zeros(size, dtype=torch.int64), t2d=torch.ones(size, dtype=torch.bool))
    frozen = build_frozen_target(target, vocab)
    head = build_head(MTPConfig(type="mtp"), target, frozen, 0, seed=0)
    head.calibrate(batches[0].last_TD, frozen)
    initial = initial_digests(head.state_dict())
    learn_by_heart(head, frozen, batches, steps=12)
    description = {**describe_head(head, []), "initial_digests": initial, "trained_length": 48}
    export = tmp_path / "export"
    state = head.state_dict()
    write_mtp(
        export, TrainedHead(state=state, description=description, target=target, vocab=vocab, k=K, dtype="float32")
    )
    assert preflight(export, target.path).failures == []

    rounds = [
        count for text, batch in zip(texts, batches, strict=True) for count in rounds_of(text, head, frozen, batch)
    ]
    assert {0, K} < set(rounds), "rounds of different lengths"
    answers, counters = serve(target, export, texts)
    assert answers == [text.answer for text in texts]
    assert counters.num_drafts == len(rounds)
    assert counters.num_accepted_tokens_per_pos == [sum(count > place for count in rounds) for place in range(K)]
