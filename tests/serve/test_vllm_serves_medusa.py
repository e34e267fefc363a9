"""A real vLLM serves exported Medusa heads: plain text, and counters equal to the walk.

The heads half learn the greedy texts of `builtin:tiny-random` by heart, so that rounds of every length occur. A block,
map, lm_head or state that vLLM reads otherwise breaks that pattern.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from drafthead.data.draft_vocab import DraftVocab
from drafthead.data.files import read_json
from drafthead.eval.acceptance import walk
from drafthead.eval.decode import DecodeOptions, decode
from drafthead.eval.engine import DraftCounters, Engine, EngineConfig, Request, is_available
from drafthead.eval.hf_target import HFTarget
from drafthead.pipeline.export.folder import TrainedHead, initial_digests
from drafthead.pipeline.export.medusa import write_medusa
from drafthead.pipeline.export.preflight import preflight
from drafthead.pipeline.heads.base import FrozenTarget, Head, HeadBatch, Objective
from drafthead.pipeline.heads.build import build_frozen_target, build_head, describe_head
from drafthead.pipeline.recipe import MedusaConfig
from drafthead.pipeline.target import Target, open_target

pytestmark = [
    pytest.mark.serve,
    pytest.mark.slow,
    pytest.mark.skipif(not is_available(), reason="vllm is not installed"),
]

NUM_HEADS = 3
LENGTHS = [1, 2, 3, 12, 13, 14, 15, 30, 30, 30]
"""Of the answers."""
SHARED = MedusaConfig(type="medusa", num_heads=NUM_HEADS)
SEPARATE = MedusaConfig(
    type="medusa", num_heads=NUM_HEADS, num_layers=2, bias=True, shared_lm_head=False, train_lm_head=True
)


@dataclass(frozen=True, kw_only=True)
class Text:
    """A prompt, its greedy answer, and what would follow."""

    prompt: list[int]
    answer: list[int]
    beyond: list[int]

    @property
    def ids(self) -> list[int]:
        return [*self.prompt, *self.answer, *self.beyond]


def greedy_texts(target: Target, model: HFTarget) -> list[Text]:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, target.vocab_size, (4 + n,), generator=generator).tolist() for n in range(len(LENGTHS))]
    options = DecodeOptions(max_new_tokens=max(LENGTHS) + NUM_HEADS, end_ids=[])
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


def learn_by_heart(head: Head, frozen: FrozenTarget, batches: list[HeadBatch], num_steps: int) -> None:
    optimizer = torch.optim.Adam([p for p in head.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(num_steps):
        for batch in batches:
            head(batch, frozen, Objective(depth=NUM_HEADS, loss="hard_ce")).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def vocabulary(size: int, whole: bool) -> DraftVocab:
    ids = torch.tensor([token for token in range(size) if whole or token % 4 != 3])
    return DraftVocab(
        d2t=ids - torch.arange(len(ids)), t2d=torch.zeros(size, dtype=torch.bool).index_fill(0, ids, True)
    )


def rounds_of(text: Text, head: Head, frozen: FrozenTarget, batch: HeadBatch, k: int) -> list[int]:
    with torch.inference_mode():
        survived_TK = head(batch, frozen, Objective(depth=k)).survived_TK
    first = len(text.prompt) - 1
    return walk(survived_TK, first, first + len(text.answer), text_last=len(text.ids) - 1)


def serve(target: Target, export: Path, k: int, texts: list[Text]) -> tuple[list[list[int]], DraftCounters]:
    config = EngineConfig(
        model=str(target.path),
        max_model_len=128,
        kv_cache_gib=1,
        speculative_config={**read_json(export / "speculative_config.json"), "num_speculative_tokens": k},
    )
    requests = [
        Request(key=str(number), prompt_ids=text.prompt, max_new_tokens=len(text.answer))
        for number, text in enumerate(texts)
    ]
    with Engine(config, export.parent / "vllm.log") as engine:
        results = {result.key: result.token_ids for result in engine.generate(requests)}
        return [results[request.key] for request in requests], engine.counters()


@pytest.mark.parametrize(
    ("config", "k", "num_steps"),
    [(SHARED, NUM_HEADS, 30), (SEPARATE, 2, 8)],
    ids=["truncated vocabulary", "separate lm_heads, k below"],
)
def test_text_is_plain_and_counters_are_those_of_the_walk(
    cache: Path, tmp_path: Path, config: MedusaConfig, k: int, num_steps: int
) -> None:
    target = open_target("builtin:tiny-random")
    model = HFTarget(target.load(torch.float32, "cpu"), [])
    texts = greedy_texts(target, model)
    batches = [batch_of(text, model) for text in texts]
    vocab = vocabulary(target.vocab_size, whole=not config.shared_lm_head)
    frozen = build_frozen_target(target, vocab)
    head = build_head(config, target, frozen, 0, seed=0)
    initial = initial_digests(head.state_dict())
    learn_by_heart(head, frozen, batches, num_steps)
    trained = TrainedHead(
        state=head.state_dict(),
        description={**describe_head(head, []), "initial_digests": initial, "trained_length": 48},
        target=target,
        vocab=vocab,
        k=NUM_HEADS,
        dtype="float32",
    )
    export = tmp_path / "export"
    write_medusa(export, trained)
    assert preflight(export, target.path).failures == []

    rounds = [
        count for text, batch in zip(texts, batches, strict=True) for count in rounds_of(text, head, frozen, batch, k)
    ]
    assert set(Counter(rounds)) == set(range(k + 1)), "rounds of every length"
    answers, counters = serve(target, export, k, texts)
    assert answers == [text.answer for text in texts]
    assert counters.num_drafts == len(rounds)
    assert counters.num_accepted_tokens_per_pos == [sum(count > place for count in rounds) for place in range(k)]
