"""Do sampled tokens follow the target? Small target and draft models, rounds drawn from them, and the test.

Shapes: B draws, K draft steps, Q = K + 1 queries, V target vocabulary, U draft vocabulary, Y sequences of some length.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from drafthead.kernels.verify_sampling.inputs import Sampling
from torch import Tensor

Verify = Callable[..., tuple[Tensor, Tensor, Tensor]]
DRAWS = 1_000_000
CHUNK = 20_000
SMALLEST_CELL = 10


def served_probs(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """What a server samples from, token by token: temperature, then top-k, then top-p."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if top_k > 0:
        order = [token for token in order if logits[token] >= logits[order[min(top_k, len(order)) - 1]]]
    weight = torch.tensor([(logits[token] - max(logits)) / temperature for token in order]).double().softmax(0).tolist()
    dropped = 0.0
    while len(weight) > 1 and top_p < 1 and dropped + weight[-1] <= 1 - top_p:
        dropped += weight.pop()
    probs = [0.0] * len(logits)
    for token, share in zip(order, weight, strict=False):
        probs[token] = share / sum(weight)
    return probs


@dataclass(frozen=True, kw_only=True)
class Toy:
    """A target and a draft over a few tokens, by step and by the token before.

    Attributes:
        name: Test id.
        kind: ``dense``, ``sparse`` (the draft lacks tokens) or ``one-hot`` (it always drafts its most likely one).
        seed: Other models for another seed.
    """

    name: str
    kind: str
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    steps: int = 2
    vocab: int = 6
    seed: int = 0

    def logits(self) -> Tensor:
        """Target logits [Q, V, V]."""
        shape = (self.steps + 1, self.vocab, self.vocab)
        return 1.5 * torch.randn(shape, generator=torch.Generator().manual_seed(self.seed))

    def probs(self) -> Tensor:
        """What the server samples from [Q, V, V]."""
        rows = self.logits().flatten(0, 1).tolist()
        served = [served_probs(row, self.temperature, self.top_k, self.top_p) for row in rows]
        return torch.tensor(served, dtype=torch.float64).reshape(self.steps + 1, self.vocab, self.vocab)

    def target_ids(self) -> Tensor | None:
        return torch.tensor([4, 0, 3, 1]) if self.kind == "sparse" else None

    def draft(self) -> Tensor:
        """Draft probabilities [K, V, U], fp32."""
        noise = torch.randn(self.steps, self.vocab, self.vocab, generator=torch.Generator().manual_seed(self.seed + 1))
        logits = self.logits()[:-1] + noise
        if self.kind == "one-hot":
            return torch.nn.functional.one_hot(logits.argmax(-1), self.vocab).float()
        ids = self.target_ids()
        return (logits if ids is None else logits[..., ids]).softmax(-1)

    def draft_over_target(self) -> Tensor:
        """Draft probabilities [K, V, V], fp64."""
        draft, ids = self.draft().double(), self.target_ids()
        draft /= draft.sum(-1, keepdim=True)
        if ids is None:
            return draft
        return draft.new_zeros(self.steps, self.vocab, self.vocab).index_copy_(-1, ids, draft)


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """What rounds gave: accepted drafts, and K + 1 tokens, those behind the round's own drawn from the target."""

    accepted_B: Tensor
    token_BQ: Tensor


def draw(verify: Verify, toy: Toy, draws: int = DRAWS, seed: int = 0, device: str = "cpu") -> Drawn:
    """Draft and verify many rounds, as requests with seeds of their own."""
    parts = [_draw_chunk(verify, toy, slice(at, min(at + CHUNK, draws)), seed, device) for at in range(0, draws, CHUNK)]
    return Drawn(
        accepted_B=torch.cat([part.accepted_B for part in parts]), token_BQ=torch.cat([part.token_BQ for part in parts])
    )


def _draw_chunk(verify: Verify, toy: Toy, chunk: slice, seed: int, device: str) -> Drawn:
    batch = chunk.stop - chunk.start
    generator = torch.Generator().manual_seed(1_000_003 * seed + chunk.start)
    logits, draft, ids = toy.logits(), toy.draft(), toy.target_ids()
    before_B = torch.zeros(batch, dtype=torch.long)
    befores, q_BU = [before_B], []
    for step in range(toy.steps):
        q_BU.append(draft[step, befores[-1]])
        chosen_B = torch.multinomial(q_BU[-1], 1, generator=generator)[:, 0]
        befores.append(chosen_B if ids is None else ids[chosen_B])
    logits_BQV = torch.stack([logits[query, before] for query, before in enumerate(befores)], 1)
    accepted_B, output_BQ, _ = verify(
        logits_BQV.to(device),
        torch.stack(befores[1:], 1).to(device),
        torch.full((batch,), toy.steps, device=device),
        Sampling(
            temperature_B=torch.full((batch,), toy.temperature, device=device),
            seed_B=torch.arange(chunk.start, chunk.stop, device=device) + (seed << 32),
            position_B=torch.full((batch,), 7, device=device),
            top_k_B=torch.full((batch,), toy.top_k, device=device) if toy.top_k else None,
            top_p_B=torch.full((batch,), toy.top_p, device=device) if toy.top_p < 1 else None,
        ),
        None if toy.kind == "one-hot" else torch.stack(q_BU, 1).to(device),
        None if ids is None else ids.to(device),
    )
    return Drawn(accepted_B=accepted_B.cpu(), token_BQ=_complete(toy, output_BQ.cpu(), generator))


def _complete(toy: Toy, output_BQ: Tensor, generator: torch.Generator) -> Tensor:
    probs, token_BQ = toy.probs(), output_BQ.clone()
    for query in range(1, toy.steps + 1):
        own_B = torch.multinomial(probs[query, token_BQ[:, query - 1]], 1, generator=generator)[:, 0]
        token_BQ[:, query] = torch.where(token_BQ[:, query] < 0, own_B, token_BQ[:, query])
    return token_BQ


def sequence_probs(toy: Toy, length: int) -> Tensor:
    """Probability [Y] of every sequence of this length under the target."""
    probs = toy.probs()
    joint = probs[0, 0]
    for query in range(1, length):
        joint = joint[..., None] * probs[query].reshape(*[1] * (query - 1), toy.vocab, toy.vocab)
    return joint.flatten()


def p_values(drawn: Drawn, toy: Toy) -> list[float]:
    """How likely the frequencies of the first token, of the first two, and so on are under the target."""
    values = []
    index_B = torch.zeros_like(drawn.accepted_B)
    for length in range(1, toy.steps + 2):
        index_B = index_B * toy.vocab + drawn.token_BQ[:, length - 1]
        expected = len(index_B) * sequence_probs(toy, length)
        values.append(chi_square_p(index_B.bincount(minlength=len(expected)), expected))
    return values


def chi_square_p(counts_Y: Tensor, expected_Y: Tensor) -> float:
    """How likely counts this far from the expected ones are; what cannot occur must not, rare cells count as one."""
    possible_Y = expected_Y > 0
    if counts_Y[~possible_Y].any():
        return 0.0
    counts_Y, expected_Y = counts_Y[possible_Y].double(), expected_Y[possible_Y].double()
    rare_Y = expected_Y < SMALLEST_CELL
    if rare_Y.any():
        counts_Y = torch.cat([counts_Y[~rare_Y], counts_Y[rare_Y].sum()[None]])
        expected_Y = torch.cat([expected_Y[~rare_Y], expected_Y[rare_Y].sum()[None]])
    statistic = ((counts_Y - expected_Y) ** 2 / expected_Y).sum()
    freedom = torch.tensor((len(counts_Y) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2)) if len(counts_Y) > 1 else 1.0
