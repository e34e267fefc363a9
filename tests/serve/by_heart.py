"""What the tests of served heads share: texts learned by heart, what a head would accept of them, and a real vLLM."""

from dataclasses import dataclass
from pathlib import Path

import torch
from drafthead.data.files import read_json
from drafthead.eval.acceptance import walk
from drafthead.eval.decode import DecodeOptions, decode
from drafthead.eval.engine import DraftCounters, Engine, EngineConfig, Request
from drafthead.eval.hf_target import HFTarget
from drafthead.pipeline.export.folder import served_path
from drafthead.pipeline.heads.base import FrozenTarget, Head, HeadBatch, Objective
from drafthead.pipeline.target import Target

LENGTHS = [1, 2, 3, 12, 13, 14, 15, 30, 30, 30]
"""Of the answers."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """A prompt, its greedy answer, and what would follow."""

    prompt: list[int]
    answer: list[int]
    beyond: list[int]

    @property
    def ids(self) -> list[int]:
        return [*self.prompt, *self.answer, *self.beyond]


def greedy_texts(target: Target, model: HFTarget, k: int) -> list[Text]:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, target.vocab_size, (4 + n,), generator=generator).tolist() for n in range(len(LENGTHS))]
    options = DecodeOptions(max_new_tokens=max(LENGTHS) + k, end_ids=[])
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


def learn_by_heart(
    head: Head, frozen: FrozenTarget, batches: list[HeadBatch], objective: Objective, num_steps: int, rate: float
) -> None:
    optimizer = torch.optim.Adam([p for p in head.parameters() if p.requires_grad], lr=rate)
    for _ in range(num_steps):
        for batch in batches:
            head(batch, frozen, objective).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def rounds_of(texts: list[Text], batches: list[HeadBatch], head: Head, frozen: FrozenTarget, k: int) -> list[int]:
    """Drafts accepted in each round that serving runs over the texts."""
    rounds = []
    for text, batch in zip(texts, batches, strict=True):
        with torch.inference_mode():
            survived_TK = head(batch, frozen, Objective(depth=k)).survived_TK
        first = len(text.prompt) - 1
        rounds += walk(survived_TK, first, first + len(text.answer), text_last=len(text.ids) - 1)
    return rounds


def serve(target: Target, export: Path, k: int, texts: list[Text]) -> tuple[list[list[int]], DraftCounters]:
    config = EngineConfig(
        model=str(served_path(target.path, export)),
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


def assert_served_as_walked(target: Target, export: Path, k: int, texts: list[Text], rounds: list[int]) -> None:
    answers, counters = serve(target, export, k, texts)
    assert answers == [text.answer for text in texts]
    assert counters.num_drafts == len(rounds)
    assert counters.num_accepted_tokens_per_pos == [sum(count > place for count in rounds) for place in range(k)]
