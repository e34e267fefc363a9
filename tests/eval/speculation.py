"""Shared by the tests of the speculative loops: sizes, a scripted drafter, a random head, and the chi-square test.

Shapes: B requests, Q new tokens, K draft tokens, V vocabulary.
"""

from typing import Any

import torch
from drafthead.eval.decode import Answer
from drafthead.eval.protocols import TargetPass
from drafthead.eval.states import StateRecorder
from drafthead.pipeline.heads.base import FrozenTarget
from drafthead.pipeline.heads.eagle3 import Eagle3, Eagle3Options
from drafthead.pipeline.heads.medusa import Medusa, MedusaDrafter, MedusaOptions
from drafthead.pipeline.heads.recursive import RecursiveDrafter
from torch import Tensor

V, D, AUX, BEHIND = 14, 32, [1, 2, 4], 8
LENGTHS = [3, 9, 1, 6, 12, 2, 4, 5]
NO_END = 10_000
DRAFTED = [0, 1, 3, 4, 5, 7, 8, 10, 12, 13]
"""The draft vocabulary."""
SMALL: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.4,
    "pad_token_id": 0,
}
"""A target's configuration; its layers are strong enough that greedy texts wander instead of repeating one token."""


def random_model(kind: Any, config: Any, seed: int) -> Any:
    """A model of random weights, the same whatever was drawn before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind(config).eval().requires_grad_(False)


class Scripted:
    """A drafter that knows the texts and is right where `hits` says so, counted by the place of the token."""

    def __init__(self, texts: list[list[int]], hits: list[list[bool]]):
        self.texts = texts
        self.hits = hits

    def start(self, prompts: list[list[int]], max_length: int) -> None:
        self.requests = list(range(len(prompts)))
        self.slots = [-1] * len(prompts)

    def observe(self, next_BQ: Tensor, states: TargetPass, position_BQ: Tensor, count_B: Tensor) -> None:
        """The loop must show every slot once, in order, with the token that follows it."""
        for row, request in enumerate(self.requests):
            for query in range(int(count_B[row])):
                self.slots[row] += 1
                assert int(position_BQ[row, query]) == self.slots[row]
                assert int(next_BQ[row, query]) == self.texts[request][self.slots[row] + 1]

    def draft(self, k: int) -> Tensor:
        return torch.tensor(
            [
                [self._token(request, slot + 2 + step) for step in range(k)]
                for request, slot in zip(self.requests, self.slots, strict=True)
            ]
        )

    def _token(self, request: int, place: int) -> int:
        text, hits = self.texts[request], self.hits[request]
        if place >= len(text):
            return 0
        return text[place] if hits[place] else (text[place] + 1) % V

    def select(self, rows: Tensor) -> None:
        self.requests = [self.requests[row] for row in rows.tolist()]
        self.slots = [self.slots[row] for row in rows.tolist()]


def make_eagle3(model: Any, seed: int = 2) -> RecursiveDrafter:
    """A random head over ten of the target's tokens."""
    options = Eagle3Options(num_aux=len(AUX), draft_vocab_size=len(DRAFTED), norm_before_residual=True)
    head = Eagle3(model.config, options)
    randomise(head, seed)
    return RecursiveDrafter(head, frozen_parts(model))


def make_medusa(model: Any, seed: int = 4) -> MedusaDrafter:
    """Three random heads over ten of the target's tokens."""
    head = Medusa(model.config, MedusaOptions(num_heads=3, num_layers=1, draft_vocab_size=len(DRAFTED)))
    randomise(head, seed)
    return MedusaDrafter(head, frozen_parts(model))


def randomise(head: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim > 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(2 * noise / parameter.shape[-1] ** 0.5)
    head.eval().requires_grad_(False)


def frozen_parts(model: Any) -> FrozenTarget:
    weights = model.model.embed_tokens.weight, model.model.norm.weight, model.lm_head.weight
    return FrozenTarget(*weights, torch.tensor(DRAFTED), float(model.config.rms_norm_eps))


def pass_over(recorder: StateRecorder, ids: list[int]) -> TargetPass:
    """The target's states of a text, by one whole forward pass."""
    aux_BQAD, last_BQD = recorder.forward(torch.tensor([ids]))
    return TargetPass(logits_BQV=torch.empty(1, 0, V), aux_BQAD=aux_BQAD.clone(), last_BQD=last_BQD.clone())


def tokens_of(answers: list[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


def chi_square_p(tokens: list[int], probabilities_V: Tensor) -> float:
    """How likely counts this far from the expected ones are; rare tokens are counted together."""
    counts_V = torch.tensor(tokens).bincount(minlength=len(probabilities_V)).double()
    expected_V = len(tokens) * probabilities_V.double()
    common = expected_V >= 8
    counts = torch.cat([counts_V[common], counts_V[~common].sum()[None]])
    expected = torch.cat([expected_V[common], expected_V[~common].sum()[None]]).clamp_min(1e-3)
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor(int(common.sum()) / 2).double(), statistic / 2))


def observed(make: Any, model: Any, prompts: list[list[int]], texts: list[list[int]]) -> Any:
    """A drafter that has observed the prompts and the token behind each."""
    recorder = StateRecorder(model, AUX)
    passes = [pass_over(recorder, prompt) for prompt in prompts]

    def padded(tensors: list[Tensor]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)

    states = TargetPass(
        logits_BQV=torch.empty(len(prompts), 0, V),
        aux_BQAD=padded([one.aux_BQAD[0] for one in passes]),
        last_BQD=padded([one.last_BQD[0] for one in passes]),
    )
    next_BQ = padded([torch.tensor(text[1 : len(p) + 1]) for text, p in zip(texts, prompts, strict=True)])
    drafter = make(model)
    drafter.start(prompts, next_BQ.shape[1] + 8)
    position_BQ = torch.arange(next_BQ.shape[1]).expand_as(next_BQ)
    drafter.observe(next_BQ, states, position_BQ, torch.tensor([len(prompt) for prompt in prompts]))
    return drafter
