"""Block verification: lossless, by enumeration and by drawing, and never shorter than rejection sampling.

Shapes: B draft sequences, K draft steps, Q = K + 1 queries, V target vocabulary, Y sequences.
"""

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from drafthead.kernels.verify_block import reference
from drafthead.kernels.verify_block.check import check
from drafthead.kernels.verify_block.op import verify_block
from drafthead.kernels.verify_greedy.op import verify_greedy
from drafthead.kernels.verify_sampling import reference as by_ratio
from drafthead.kernels.verify_sampling.check import DTYPES, KINDS, compare, random_round
from drafthead.kernels.verify_sampling.op import verify_sampling
from torch import Tensor

from tests.kernels.distribution import DRAWS, Toy, draw, p_values, sequence_probs

TOYS = [
    Toy(name="dense K=3", kind="dense", steps=3, vocab=4),
    Toy(name="dense T=0.6 top-k", kind="dense", temperature=0.6, top_k=3, seed=1),
    Toy(name="sparse K=3", kind="sparse", steps=3, vocab=5, seed=2),
    Toy(name="sparse T=1.4 top-p", kind="sparse", temperature=1.4, top_p=0.8, seed=3),
    Toy(name="one-hot T=0.8 top-k top-p", kind="one-hot", temperature=0.8, top_k=4, top_p=0.9, seed=5),
]
ALPHA = 1e-3 / sum(toy.steps + 1 for toy in TOYS)
"""Each toy is tested for one token, two and so on (Bonferroni)."""
SURELY_WRONG = 1e-6
by_name = pytest.mark.parametrize("toy", TOYS, ids=lambda toy: toy.name)


class Enumerated:
    """Every draft sequence of a toy, its probability, and P_0 .. P_K and h_1 .. h_K for it."""

    def __init__(self, toy: Toy) -> None:
        ids = toy.target_ids()
        tokens = torch.arange(toy.vocab) if ids is None else ids.sort().values
        self.draft_BK = torch.cartesian_prod(*[tokens] * toy.steps).reshape(-1, toy.steps)
        before_BQ = torch.nn.functional.pad(self.draft_BK, (1, 0))
        steps_Q = torch.arange(toy.steps + 1)
        self.p_BQV = toy.probs()[steps_Q, before_BQ]
        self.q_BKV = toy.draft_over_target()[steps_Q[:-1], before_BQ[:, :-1]]
        self.p_BK = by_ratio.of_tokens(self.p_BQV[:, :-1], self.draft_BK)
        self.q_BK = by_ratio.of_tokens(self.q_BKV, self.draft_BK)
        self.chance_B = self.q_BK.prod(-1)
        self.joint_BQ = reference.joint_ratio(self.p_BK, self.q_BK)
        count_B = torch.full((len(self.draft_BK),), toy.steps)
        self.h_BK = reference.accept_chance(self.p_BQV, self.q_BKV, self.joint_BQ, count_B)

    def expected_by_block(self) -> float:
        """Expected accepted length; it is at least i unless every h from i on is refused."""
        at_least_BK = 1 - (1 - self.h_BK).flip(-1).cumprod(-1).flip(-1)
        return float(self.chance_B @ at_least_BK.sum(-1))

    def expected_by_ratio(self) -> float:
        kept_BK = (self.p_BK / self.q_BK.clamp_min(1e-300)).clamp_max(1).cumprod(-1)
        return float(self.chance_B @ kept_BK.sum(-1))


def exact_law(toy: Toy) -> Tensor:
    """Probability [Y] of every sequence of K + 1 tokens: those of the round, continued by the target."""
    every = Enumerated(toy)
    probs, vocab, queries = toy.probs(), toy.vocab, toy.steps + 1
    law = torch.zeros([vocab] * queries, dtype=torch.float64)
    refused_behind_B = torch.ones(len(every.draft_BK), dtype=torch.float64)
    full_B = torch.full((len(every.draft_BK),), toy.steps)
    for accepted in range(toy.steps, -1, -1):
        h_B = every.h_BK[:, accepted - 1] if accepted else torch.ones_like(refused_behind_B)
        accepted_B = torch.full_like(full_B, accepted)
        residual = by_ratio.residual(every.p_BQV, every.q_BKV, every.joint_BQ[:, accepted], accepted_B, full_B)
        mass_BV = (every.chance_B * refused_behind_B * h_B)[:, None] * residual / residual.sum(-1, keepdim=True)
        refused_behind_B = refused_behind_B * (1 - h_B)
        place_B = every.draft_BK[:, :accepted] @ vocab ** torch.arange(accepted - 1, -1, -1)
        prefix = torch.zeros(vocab**accepted, vocab, dtype=torch.float64).index_add_(0, place_B, mass_BV)
        prefix = prefix.reshape([vocab] * (accepted + 1))
        for query in range(accepted + 1, queries):
            prefix = prefix[..., None] * probs[query].reshape(*[1] * (query - 1), vocab, vocab)
        law += prefix
    return law.flatten()


@by_name
def test_every_sequence_has_the_targets_probability(toy: Toy) -> None:
    """Exactly, summed over every draft, accepted length and token behind it."""
    assert (exact_law(toy) - sequence_probs(toy, toy.steps + 1)).abs().max() < 1e-12


@by_name
def test_no_toy_is_accepted_less_than_by_ratio(toy: Toy) -> None:
    for seed in range(30):
        every = Enumerated(replace(toy, seed=seed))
        assert every.expected_by_block() >= every.expected_by_ratio() - 1e-12


def test_it_accepts_more_where_later_tokens_can_make_up() -> None:
    gain = [every.expected_by_block() / every.expected_by_ratio() for every in map(Enumerated, TOYS)]
    assert max(gain) > 1.02


@by_name
def test_tokens_follow_the_target(toy: Toy) -> None:
    """From a million rounds; and as many drafts are accepted as enumeration says."""
    drawn = draw(reference.verify_block, toy)
    assert min(p_values(drawn, toy)) > ALPHA
    mean, deviation = drawn.accepted_B.double().mean(), drawn.accepted_B.double().std() / DRAWS**0.5
    assert abs(float(mean) - Enumerated(toy).expected_by_block()) < 4.5 * float(deviation)


right_residual = by_ratio.residual


def factor_forgotten(p_BQV: Tensor, q_BKV: Tensor, factor_B: Tensor, *rest: Tensor) -> Tensor:
    """Wrong: (p - q)+ as in rejection sampling, though P_i was not one."""
    return right_residual(p_BQV, q_BKV, torch.ones_like(factor_B), *rest)


def without_residual(p_BQV: Tensor, q_BKV: Tensor, factor_B: Tensor, accepted_B: Tensor, num_draft_B: Tensor) -> Tensor:
    """Wrong: after a rejection it samples from p."""
    return p_BQV[torch.arange(len(p_BQV)), accepted_B]


def q_of_the_step_before(p_BQV: Tensor, q_BKV: Tensor, *rest: Tensor) -> Tensor:
    """Wrong: it takes off the draft probabilities of another step."""
    return right_residual(p_BQV, q_BKV.roll(1, 1), *rest)


def ratio_not_cut(p_BK: Tensor, q_BK: Tensor) -> Tensor:
    """Wrong: the plain joint ratio, cut to one only at the end."""
    return torch.nn.functional.pad((p_BK / q_BK).cumprod(-1), (1, 0), value=1.0).clamp_max(1)


def chance_is_the_ratio(p_BQV: Tensor, q_BKV: Tensor, joint_BQ: Tensor, num_draft_B: Tensor) -> Tensor:
    """Wrong: h_i = P_i at every step, not only at the last."""
    return joint_BQ[:, 1:]


FAULTS = [
    (by_ratio, "residual", factor_forgotten),
    (by_ratio, "residual", without_residual),
    (by_ratio, "residual", q_of_the_step_before),
    (reference, "joint_ratio", ratio_not_cut),
    (reference, "accept_chance", chance_is_the_ratio),
]


@pytest.mark.parametrize(("module", "name", "fault"), FAULTS, ids=[fault.__name__ for _, _, fault in FAULTS])
@pytest.mark.parametrize("toy", [TOYS[0], TOYS[2]], ids=lambda toy: toy.name)
def test_the_same_test_rejects(
    monkeypatch: pytest.MonkeyPatch, toy: Toy, module: ModuleType, name: str, fault: Callable[..., Tensor]
) -> None:
    monkeypatch.setattr(module, name, fault)
    assert min(p_values(draw(reference.verify_block, toy, DRAWS // 5), toy)) < SURELY_WRONG


@pytest.mark.slow
@by_name
def test_kernel_follows_the_target(toy: Toy, device: str) -> None:
    drawn = draw(triton_op, toy, DRAWS if device == "cuda" else 60, seed=1, device=device)
    assert min(p_values(drawn, toy)) > ALPHA


def triton_op(*arguments: object) -> tuple[Tensor, Tensor, Tensor]:
    return verify_block(*arguments, impl="triton")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("kind", KINDS)
def test_kernel_decides_as_the_reference(device: str, kind: str, dtype: torch.dtype) -> None:
    batch = 2000 if device == "cuda" else 8
    given = random_round(torch.Generator().manual_seed(1), (batch, 4, 63), kind, dtype=dtype)
    compare(verify_block, reference.verify_block, given, device)


@pytest.mark.parametrize("kind", KINDS)
def test_kernel_with_top_k_and_top_p(device: str, kind: str) -> None:
    batch = 2000 if device == "cuda" else 3
    given = random_round(torch.Generator().manual_seed(2), (batch, 2, 257), kind, filtered=True, dtype=torch.bfloat16)
    compare(verify_block, reference.verify_block, given, device)


SHAPES = [(0, 3, 5), (1, 0, 1), (1, 1, 1), (2, 8, 63), (1, 2, 32000), (1, 8, 9000)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_awkward_shapes(device: str, shape: tuple[int, int, int]) -> None:
    given = random_round(torch.Generator().manual_seed(3), shape, "sparse", dtype=torch.bfloat16)
    compare(verify_block, reference.verify_block, given, device)


@pytest.mark.slow
@pytest.mark.parametrize("filtered", [False, True], ids=["all kept", "cut"])
def test_a_large_vocabulary(device: str, filtered: bool) -> None:
    given = random_round(
        torch.Generator().manual_seed(4), (2 if device == "cuda" else 1, 1, 151936), "dense", filtered, torch.bfloat16
    )
    compare(verify_block, reference.verify_block, given, device)


def test_infinities_and_nan(device: str) -> None:
    given = random_round(torch.Generator().manual_seed(5), (15, 2, 40), "dense", special=True)
    compare(verify_block, reference.verify_block, given, device)


def test_a_request_does_not_depend_on_its_batch(device: str) -> None:
    given = random_round(torch.Generator().manual_seed(6), (4, 3, 50), "dense").to(device)
    together = verify_block(**given.arguments(), impl="triton")
    alone = verify_block(**given.map(lambda tensor: tensor[2:3]).arguments(), impl="triton")
    assert all(torch.equal(whole[2:3], part) for whole, part in zip(together, alone, strict=True))


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_greedy_requests_are_verified_as_verify_greedy_does(device: str, impl: str) -> None:
    given = random_round(torch.Generator().manual_seed(7), (8, 3, 60), "one-hot", special=True)
    given = replace(given, sampling=replace(given.sampling, temperature_B=torch.zeros(8))).to(device)
    found = verify_block(**given.arguments(), impl=impl)
    wanted = verify_greedy(given.logits_BQV, given.draft_BK, given.num_draft_B, impl="reference")
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_single_draft_token_is_judged_by_its_ratio(kind: str) -> None:
    """With K = 1 both ops are the same, number by number."""
    given = random_round(torch.Generator().manual_seed(8), (500, 1, 20), kind)
    found, wanted = verify_block(**given.arguments()), verify_sampling(**given.arguments())
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_a_draft_like_the_target_is_always_accepted(device: str, impl: str) -> None:
    """There p / q is one but for rounding, and nothing is left of p - q."""
    given = random_round(torch.Generator().manual_seed(9), (10, 3, 30), "dense").to(device)
    ones_B, full_B = torch.ones(10, device=device), torch.full((10,), 3, device=device)
    sampling = replace(given.sampling, temperature_B=ones_B)
    probs_BKV = given.logits_BQV[:, :-1].softmax(-1)
    given = replace(given, draft_BKU=probs_BKV, num_draft_B=full_B, sampling=sampling)
    assert verify_block(**given.arguments(), impl=impl)[0].tolist() == [3] * 10


def test_the_self_check(device: str) -> None:
    check(0, device)


def test_what_does_not_fit_is_refused() -> None:
    given = random_round(torch.Generator().manual_seed(0), (2, 3, 5), "dense")
    with pytest.raises(ValueError, match="draft tokens"):
        verify_block(**replace(given, draft_BK=given.draft_BK[:, 1:]).arguments())
