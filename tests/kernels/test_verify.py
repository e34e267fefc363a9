"""Verification of drafts: greedy against a loop, sampling against the distribution that it promises.

Shapes: B requests, Q = K + 1 queries, K draft tokens, V vocabulary.
"""

from collections.abc import Callable

import pytest
import torch
from drafthead.kernels.verify_greedy.op import verify_greedy
from drafthead.kernels.verify_sampling.op import verify_sampling
from torch import Tensor

Verify = Callable[[Tensor, Tensor, Tensor | None, Tensor, torch.Generator], tuple[Tensor, Tensor]]
DRAWS = 40_000
P_V = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
Q_V = torch.tensor([0.45, 0.35, 0.2], dtype=torch.float64)

# ---- greedy ----------------------------------------------------------------------------------------------


def greedy_by_loop(logits_QV: list[list[float]], draft: list[int]) -> tuple[int, list[int]]:
    """Accept while the draft is the target's first largest logit; -1 fills the rest."""
    output: list[int] = []
    for query, row in enumerate(logits_QV):
        own = row.index(max(row))
        output.append(own)
        if query == len(draft) or draft[query] != own:
            break
    return len(output) - 1, output + [-1] * (len(logits_QV) - len(output))


@pytest.mark.parametrize("k", [0, 1, 3, 8], ids=lambda k: f"K={k}")
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_greedy_equals_a_loop(k: int, ties: bool) -> None:
    generator = torch.Generator().manual_seed(k)
    batch, vocab = 200, 7
    logits_BQV = torch.randn(batch, k + 1, vocab, generator=generator)
    if ties:
        logits_BQV = logits_BQV.round()
    right_BK = logits_BQV.argmax(-1)[:, :k]
    noise_BK = torch.randint(vocab, (batch, k), generator=generator)
    draft_BK = torch.where(torch.rand(batch, k, generator=generator) < 0.75, right_BK, noise_BK)
    num_draft_B = torch.randint(k + 1, (batch,), generator=generator)
    accepted_B, output_BQ = verify_greedy(logits_BQV, draft_BK, num_draft_B)
    for row in range(batch):
        draft = draft_BK[row, : num_draft_B[row]].tolist()
        accepted, output = greedy_by_loop(logits_BQV[row].tolist(), draft)
        assert accepted_B[row] == accepted
        assert output_BQ[row].tolist() == output
    assert set(accepted_B.tolist()) == set(range(k + 1))


def test_greedy_ignores_what_lies_behind_the_number_of_drafts() -> None:
    logits_BQV = torch.zeros(3, 4, 5)
    logits_BQV[..., 2] = 1.0
    draft_BK = torch.full((3, 3), 2)
    accepted_B, output_BQ = verify_greedy(logits_BQV, draft_BK, torch.tensor([0, 2, 3]))
    assert accepted_B.tolist() == [0, 2, 3]
    assert output_BQ.tolist() == [[2, -1, -1, -1], [2, 2, 2, -1], [2, 2, 2, 2]]


# ---- sampling --------------------------------------------------------------------------------------------


def chi_square_p(counts_V: Tensor, expected_V: Tensor) -> float:
    """How likely counts this far from the expected ones are; cells that cannot occur must be empty."""
    possible = expected_V > 0
    if counts_V[~possible].any():
        return 0.0
    counts_V, expected_V = counts_V[possible].double(), expected_V[possible].double()
    statistic = ((counts_V - expected_V) ** 2 / expected_V).sum()
    freedom = torch.tensor((len(counts_V) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def without_residual(
    target_BQV: Tensor, draft_BK: Tensor, draft_BKV: Tensor | None, num_draft_B: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Wrong on purpose: after a rejection it samples from p instead of (p - q)+. K = 1 only."""
    p_B = target_BQV[:, 0].gather(1, draft_BK)[:, 0]
    q_B = torch.ones_like(p_B) if draft_BKV is None else draft_BKV[:, 0].gather(1, draft_BK)[:, 0]
    kept_B = torch.rand(len(p_B), generator=generator, dtype=torch.float64) * q_B < p_B
    own_B = torch.multinomial(target_BQV[:, 0], 1, generator=generator)[:, 0]
    bonus_B = torch.multinomial(target_BQV[:, 1], 1, generator=generator)[:, 0]
    first_B = torch.where(kept_B, draft_BK[:, 0], own_B)
    return kept_B.long(), torch.stack([first_B, torch.where(kept_B, bonus_B, -torch.ones_like(bonus_B))], 1)


def sample(verify: Verify, q_kind: str, draws: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Verify `draws` one-token drafts, each sampled from its q, as rows of one batch."""
    generator = torch.Generator().manual_seed(seed)
    target_BQV = P_V.expand(draws, 2, -1)
    num_draft_B = torch.ones(draws, dtype=torch.long)
    if q_kind == "one-hot":
        draft_BK = torch.full((draws, 1), int(P_V.argmax()))
        return verify(target_BQV, draft_BK, None, num_draft_B, generator)
    draft_BK = torch.multinomial(Q_V.expand(draws, -1), 1, generator=generator)
    return verify(target_BQV, draft_BK, Q_V.expand(draws, 1, -1), num_draft_B, generator)


@pytest.mark.parametrize(("q_kind", "acceptance"), [("one-hot", 0.5), ("dense", 0.95)], ids=["one-hot q", "dense q"])
def test_sampling_follows_the_target_and_accepts_the_overlap(q_kind: str, acceptance: float) -> None:
    """C19 c: the first token is distributed as p, the bonus token too, and sum min(p, q) of the drafts are kept."""
    accepted_B, output_BQ = sample(verify_sampling, q_kind, DRAWS)
    assert chi_square_p(output_BQ[:, 0].bincount(minlength=3), DRAWS * P_V) > 1e-3
    bonus = output_BQ[accepted_B == 1, 1]
    assert chi_square_p(bonus.bincount(minlength=3), len(bonus) * P_V) > 1e-3
    assert (output_BQ[accepted_B == 0, 1] == -1).all()
    deviation = (acceptance * (1 - acceptance) / DRAWS) ** 0.5
    assert abs(float(accepted_B.double().mean()) - acceptance) < 4 * deviation


@pytest.mark.parametrize("q_kind", ["one-hot", "dense"], ids=["one-hot q", "dense q"])
def test_the_same_test_rejects_sampling_without_the_residual(q_kind: str) -> None:
    """With this dense q the fault moves no frequency by more than 0.025, so this also shows the test's power."""
    _, output_BQ = sample(without_residual, q_kind, DRAWS)
    assert chi_square_p(output_BQ[:, 0].bincount(minlength=3), DRAWS * P_V) < 1e-6


def test_a_long_draft_is_lossless_at_every_position() -> None:
    """Joint distribution of the first two tokens where p depends on the position, with q far from p."""
    generator = torch.Generator().manual_seed(3)
    draws, steps, vocab = 8_000, 3, 4
    p_QV = (torch.randn(steps + 1, vocab, generator=generator, dtype=torch.float64)).softmax(-1)
    q_KV = (torch.randn(steps, vocab, generator=generator, dtype=torch.float64)).softmax(-1)
    draft_BK = torch.multinomial(q_KV, draws, replacement=True, generator=generator).T.contiguous()
    accepted_B, output_BQ = verify_sampling(
        p_QV.expand(draws, -1, -1),
        draft_BK,
        q_KV.expand(draws, -1, -1),
        torch.full((draws,), steps),
        generator,
    )
    for position in range(steps + 1):
        reached = output_BQ[accepted_B >= position, position]
        assert len(reached) > 100
        expected_V = len(reached) * p_QV[position]
        assert chi_square_p(reached.bincount(minlength=vocab), expected_V) > 1e-3, position
    overlap_K = torch.minimum(p_QV[:steps], q_KV).sum(-1)
    for position, rate in enumerate(overlap_K.cumprod(0).tolist()):
        deviation = (rate * (1 - rate) / draws) ** 0.5
        assert abs(float((accepted_B > position).double().mean()) - rate) < 4 * deviation
    index_Q = torch.arange(steps + 1)
    assert torch.equal(output_BQ >= 0, index_Q <= accepted_B[:, None])


def test_ragged_drafts_and_none_at_all() -> None:
    """A request takes its bonus token from the query behind its own last draft."""
    target_BQV = torch.zeros(4, 4, 5, dtype=torch.float64)
    target_BQV[:, torch.arange(4), torch.arange(4)] = 1.0  # query i can only give token i
    draft_BK = torch.tensor([[0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 4, 2]])
    num_draft_B = torch.tensor([0, 2, 3, 3])
    accepted_B, output_BQ = verify_sampling(target_BQV, draft_BK, None, num_draft_B, torch.Generator())
    assert accepted_B.tolist() == [0, 2, 3, 1]
    assert output_BQ.tolist() == [[0, -1, -1, -1], [0, 1, 2, -1], [0, 1, 2, 3], [0, 1, -1, -1]]


def test_a_batch_without_drafts_samples_from_the_target() -> None:
    draws = 4_000
    accepted_B, output_BQ = verify_sampling(
        P_V.expand(draws, 1, -1),
        torch.empty(draws, 0, dtype=torch.long),
        None,
        torch.zeros(draws, dtype=torch.long),
        torch.Generator().manual_seed(1),
    )
    assert not accepted_B.any()
    assert chi_square_p(output_BQ[:, 0].bincount(minlength=3), draws * P_V) > 1e-3


def test_the_same_seed_gives_the_same_tokens() -> None:
    first, again, other = (sample(verify_sampling, "dense", 200, seed=seed)[1] for seed in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


# ---- shapes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draft", "length"),
    [((2, 4), (2,)), ((2, 2), (2,)), ((1, 3), (2,)), ((2, 3), (3,)), ((2, 3), (2, 1))],
    ids=["K too large", "K too small", "other batch", "other lengths", "lengths of rank 2"],
)
def test_shapes_that_do_not_fit_are_refused(draft: tuple[int, ...], length: tuple[int, ...]) -> None:
    draft_BK, num_draft_B = torch.zeros(draft, dtype=torch.long), torch.zeros(length, dtype=torch.long)
    with pytest.raises(ValueError, match="shapes do not fit"):
        verify_greedy(torch.rand(2, 4, 5), draft_BK, num_draft_B)
    with pytest.raises(ValueError, match="shapes do not fit"):
        verify_sampling(torch.rand(2, 4, 5), draft_BK, None, num_draft_B, torch.Generator())


def test_draft_probabilities_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="shapes do not fit"):
        verify_sampling(
            torch.rand(2, 4, 5),
            torch.zeros(2, 3, dtype=torch.long),
            torch.rand(2, 3, 4),
            torch.zeros(2, dtype=torch.long),
            torch.Generator(),
        )
