"""Speculative sampling: the definition against the distribution that it promises, the kernels against the definition.

Shapes: B requests, K draft steps, Q = K + 1 queries, V target vocabulary, U draft vocabulary, Y sequences.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from drafthead.kernels import philox
from drafthead.kernels.verify_greedy.op import verify_greedy
from drafthead.kernels.verify_sampling import reference
from drafthead.kernels.verify_sampling.check import DTYPES, KINDS, Round, check, compare, random_round
from drafthead.kernels.verify_sampling.inputs import Sampling
from drafthead.kernels.verify_sampling.op import verify_sampling
from torch import Tensor

from tests.kernels.distribution import DRAWS, Drawn, Toy, chi_square_p, draw, p_values

TOYS = [
    Toy(name="dense", kind="dense"),
    Toy(name="dense T=0.6 top-k", kind="dense", temperature=0.6, top_k=3, seed=1),
    Toy(name="sparse T=1.4 top-p", kind="sparse", temperature=1.4, top_p=0.8, seed=3),
    Toy(name="one-hot T=0.8 top-k top-p", kind="one-hot", temperature=0.8, top_k=4, top_p=0.9, seed=5),
]
ALPHA = 1e-3 / (len(TOYS) * 3)
"""Each toy is tested for one, two and three tokens (Bonferroni)."""
SURELY_WRONG = 1e-6
INF, NAN = float("inf"), float("nan")
by_name = pytest.mark.parametrize("toy", TOYS, ids=lambda toy: toy.name)


def sampling_of(batch: int, device: str = "cpu", **changes: Tensor) -> Sampling:
    fields = {
        "temperature_B": torch.ones(batch, device=device),
        "seed_B": torch.arange(batch, device=device),
        "position_B": torch.zeros(batch, dtype=torch.long, device=device),
    }
    return Sampling(**(fields | changes))


# the promise


@by_name
def test_tokens_follow_the_target(toy: Toy) -> None:
    """One, two and three tokens in a row, from a million rounds; and the overlap sum min(p, q) of drafts is kept."""
    drawn = draw(reference.verify_sampling, toy)
    assert min(p_values(drawn, toy)) > ALPHA
    expect_acceptance(drawn, toy)


def expect_acceptance(drawn: Drawn, toy: Toy) -> None:
    """P(first draft kept) = sum min(p, q); P(both) = sum over the first token of its overlap times that behind it."""
    overlap = torch.minimum(toy.probs()[:-1], toy.draft_over_target())
    kept = [overlap[0, 0].sum(), (overlap[0, 0] * overlap[1].sum(-1)).sum()]
    for number, rate in enumerate(map(float, kept), 1):
        deviation = (rate * (1 - rate) / len(drawn.accepted_B)) ** 0.5
        assert abs(float((drawn.accepted_B >= number).double().mean()) - rate) < 4.5 * deviation


def without_residual(p_BQV: Tensor, q_BKV: Tensor, factor_B: Tensor, accepted_B: Tensor, num_draft_B: Tensor) -> Tensor:
    """Wrong: after a rejection it samples from p."""
    return p_BQV[torch.arange(len(p_BQV)), accepted_B]


def not_renormalised(p_BQV: Tensor, q_BKV: Tensor, factor_B: Tensor, accepted_B: Tensor, num_draft_B: Tensor) -> Tensor:
    """Wrong: what (p - q)+ lacks to one goes to the last token, as when a cumulated sum is searched that ends early."""
    weight_BV = right_residual(p_BQV, q_BKV, factor_B, accepted_B, num_draft_B)
    weight_BV[:, -1] += 1 - weight_BV.sum(-1)
    return weight_BV


def q_of_the_step_before(p_BQV: Tensor, q_BKV: Tensor, *rest: Tensor) -> Tensor:
    """Wrong: it takes off the draft probabilities of another step."""
    return right_residual(p_BQV, q_BKV.roll(1, 1), *rest)


right_residual = reference.residual
FAULTS: list[Callable[..., Tensor]] = [without_residual, not_renormalised, q_of_the_step_before]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("toy", [TOYS[0], TOYS[2], TOYS[3]], ids=lambda toy: toy.name)
def test_the_same_test_rejects(monkeypatch: pytest.MonkeyPatch, toy: Toy, fault: Callable[..., Tensor]) -> None:
    monkeypatch.setattr(reference, "residual", fault)
    assert min(p_values(draw(reference.verify_sampling, toy, DRAWS // 10), toy)) < SURELY_WRONG


@pytest.mark.slow
@by_name
def test_kernel_follows_the_target(toy: Toy, device: str) -> None:
    drawn = draw(triton_op, toy, DRAWS if device == "cuda" else 60, seed=1, device=device)
    assert min(p_values(drawn, toy)) > ALPHA
    expect_acceptance(drawn, toy)


def triton_op(*arguments: object) -> tuple[Tensor, Tensor, Tensor]:
    return verify_sampling(*arguments, impl="triton")  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "rate"), [("most likely", 0.5), ("sampled", 0.95)])
def test_a_draft_of_known_probabilities_is_kept_as_often_as_the_sums_say(kind: str, rate: float) -> None:
    """C19: p = [.5, .3, .2], q = [.45, .35, .2]: p(argmax q) = .5, sum min(p, q) = .95; the tokens follow p in both."""
    draws = 200_000
    p_V, q_V = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.45, 0.35, 0.2])
    draft_B = torch.multinomial(q_V, draws, replacement=True, generator=torch.Generator().manual_seed(7))
    draft_BK = draft_B[:, None] if kind == "sampled" else torch.zeros(draws, 1, dtype=torch.long)
    accepted_B, output_BQ, _ = verify_sampling(
        p_V.log().expand(draws, 2, -1),
        draft_BK,
        torch.ones(draws, dtype=torch.long),
        sampling_of(draws),
        q_V.expand(draws, 1, -1) if kind == "sampled" else None,
    )
    assert float(accepted_B.double().mean()) == pytest.approx(rate, abs=4.5 * (rate * (1 - rate) / draws) ** 0.5)
    counts_V = output_BQ[:, 0].bincount(minlength=3).double()
    assert float(((counts_V - draws * p_V) ** 2 / (draws * p_V)).sum()) < 13.8, "chi-square of 2, p = 0.001"


def test_plain_sampling_without_drafts() -> None:
    draws = 200_000
    logits_V = torch.tensor([0.5, -1.0, 2.0, 0.0])
    accepted_B, output_BQ, mask_BK = verify_sampling(
        logits_V.expand(draws, 1, -1),
        torch.empty(draws, 0, dtype=torch.long),
        torch.zeros(draws, dtype=torch.long),
        sampling_of(draws),
    )
    assert not accepted_B.any()
    assert mask_BK.shape == (draws, 0)
    assert chi_square_p(output_BQ[:, 0].bincount(minlength=4), draws * logits_V.double().softmax(-1)) > 1e-4


# what the server keeps


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (2, 1.0, [1, 2, 4]),
        (4, 1.0, [0, 1, 2, 4, 5]),
        (0, 1.0, range(6)),
        (6, 1.0, range(6)),
        (0, 0.4, [1, 2]),
        (0, 0.0, [1]),
        (2, 0.5, [1, 2]),
    ],
)
def test_ties_at_the_cut(top_k: int, top_p: float, kept: list[int]) -> None:
    """Top-k keeps all that equal the k-th; top-p as many as it needs, lowest ids first."""
    logits_BQV = torch.tensor([2.0, 3.0, 3.0, 1.0, 3.0, 2.0]).log()[None, None]
    sampling = sampling_of(1, top_k_B=torch.tensor([top_k]), top_p_B=torch.tensor([top_p]))
    assert reference.target_probs(logits_BQV, sampling)[0, 0].nonzero()[:, 0].tolist() == list(kept)


@pytest.mark.slow
def test_the_server_keeps_the_same() -> None:
    """vLLM's own definition, on rows without ties, where sorting is free to choose."""
    server = pytest.importorskip("vllm.v1.sample.ops.topk_topp_sampler")
    generator = torch.Generator().manual_seed(0)
    given = random_round(generator, (200, 0, 1000), filtered=True)
    sampling = replace(given.sampling, temperature_B=torch.ones(200))
    top_k_B = sampling.top_k_B.where(sampling.top_k_B > 0, 1000)
    logits_BV = given.logits_BQV[:, 0].clone()
    masked_BV = server.apply_top_k_top_p_pytorch(logits_BV, top_k_B, sampling.top_p_B.clamp_max(1.0))
    kept_BV = reference.target_probs(given.logits_BQV, sampling)[:, 0] > 0
    assert torch.equal(kept_BV, masked_BV > -INF)


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_kernel_cuts_where_sorting_would(device: str, dtype: torch.dtype, ties: bool, small_blocks: None) -> None:
    from drafthead.kernels.verify_sampling import launch

    generator = torch.Generator().manual_seed(int(ties))
    given = random_round(generator, (6, 0, 150), "one-hot", filtered=True, dtype=dtype)
    logits_BQV = given.logits_BQV.round() if ties else given.logits_BQV
    logits_BQV[0, 0, 3:140] = -INF
    top_k_B, top_p_B = torch.tensor([5, 20, 0, 149, 1, 40]), torch.tensor([1.0, 0.7, 0.3, 0.999, 1e-9, 0.9])
    sampling = replace(given.sampling, temperature_B=torch.full((6,), 1.3), top_k_B=top_k_B, top_p_B=top_p_B)
    given = replace(given, logits_BQV=logits_BQV, sampling=sampling).to(device)
    prepared = launch.prepare(**given.arguments())
    cut_B, last_B = prepared.arguments["cut_ptr"][:, None], prepared.arguments["last_ptr"][:, None]
    logits_BV, ids_V = given.logits_BQV[:, 0].float(), torch.arange(150, device=device)
    kept_BV = (logits_BV > cut_B) | ((logits_BV == cut_B) & (ids_V <= last_B))
    exact_BV = reference.target_probs(given.logits_BQV, given.sampling)[:, 0]
    assert torch.equal(kept_BV & (logits_BV > -INF), exact_BV > 0)
    top_BS, total_BS = prepared.arguments["top_ptr"], prepared.arguments["total_ptr"]
    total_B = (total_BS * ((top_BS - top_BS.amax(1, keepdim=True)) / 1.3).exp()).sum(1)
    assert (1 / total_B - exact_BV.amax(1)).abs().max() < 1e-6


# the kernels


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles even of a small vocabulary."""
    from drafthead.kernels.verify_sampling import kernel

    for name, block in (("STATS_BLOCK", 64), ("CUT_BLOCK", 64), ("RACE_BLOCK", 16)):
        monkeypatch.setattr(kernel, name, block)


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("kind", KINDS)
def test_kernel_decides_as_the_reference(device: str, kind: str, dtype: torch.dtype) -> None:
    batch = 2000 if device == "cuda" else 8
    given = random_round(torch.Generator().manual_seed(1), (batch, 3, 63), kind, dtype=dtype)
    compare(verify_sampling, reference.verify_sampling, given, device)


@pytest.mark.parametrize("kind", KINDS)
def test_kernel_with_top_k_and_top_p(device: str, kind: str) -> None:
    batch = 2000 if device == "cuda" else 4
    given = random_round(torch.Generator().manual_seed(2), (batch, 2, 257), kind, filtered=True, dtype=torch.bfloat16)
    compare(verify_sampling, reference.verify_sampling, given, device)


SHAPES = [(0, 3, 5), (1, 0, 1), (1, 1, 1), (2, 8, 63), (1, 1, 32000), (1, 8, 9000)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_awkward_shapes(device: str, shape: tuple[int, int, int]) -> None:
    given = random_round(torch.Generator().manual_seed(3), shape, "sparse", dtype=torch.bfloat16)
    compare(verify_sampling, reference.verify_sampling, given, device)


@pytest.mark.slow
@pytest.mark.parametrize("filtered", [False, True], ids=["all kept", "cut"])
def test_a_large_vocabulary(device: str, filtered: bool) -> None:
    given = random_round(
        torch.Generator().manual_seed(4), (2 if device == "cuda" else 1, 1, 151936), "dense", filtered, torch.bfloat16
    )
    compare(verify_sampling, reference.verify_sampling, given, device)


def test_infinities_and_nan(device: str) -> None:
    """Rows with NaN, both infinities, nothing possible; greedy and sampled."""
    given = random_round(torch.Generator().manual_seed(5), (15, 1, 40), "dense", special=True)
    assert given.logits_BQV.isnan().any()
    compare(verify_sampling, reference.verify_sampling, given, device)


def test_a_nan_among_the_draft_probabilities_counts_as_nothing(device: str) -> None:
    given = random_round(torch.Generator().manual_seed(6), (8, 2, 10), "dense")
    given.draft_BKU[:, :, ::3] = NAN
    compare(verify_sampling, reference.verify_sampling, given, device)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_rows_that_leave_no_choice(device: str, impl: str) -> None:
    """A row that is -inf or NaN all over gives token 0; +inf beats everything finite."""
    logits_BQV = torch.full((3, 1, 20), -INF, device=device)
    logits_BQV[1] = NAN
    logits_BQV[2, 0, 7:] = torch.tensor([INF, *[5.0] * 12], device=device)
    no_draft_BK, none_B = torch.empty(3, 0, dtype=torch.long, device=device), torch.zeros(3, dtype=torch.long)
    result = verify_sampling(logits_BQV, no_draft_BK, none_B.to(device), sampling_of(3, device), impl=impl)
    assert result[1].tolist() == [[0], [0], [7]]


@pytest.mark.parametrize("lay_out", ["vocabulary outermost", "gaps", "broadcast"])
def test_any_strides(device: str, lay_out: str) -> None:
    given = random_round(torch.Generator().manual_seed(7), (3, 2, 70), "sparse").to(device)
    assert given.draft_BKU is not None

    def laid_out(tensor: Tensor) -> Tensor:
        if lay_out == "vocabulary outermost":
            return tensor.permute(2, 0, 1).contiguous().permute(1, 2, 0)
        if lay_out == "gaps":
            return torch.nn.functional.pad(tensor, (3, 2), value=NAN)[..., 3:-2]
        return tensor[:1].expand(3, -1, -1)

    given = replace(given, logits_BQV=laid_out(given.logits_BQV), draft_BKU=laid_out(given.draft_BKU))
    draft_KB = given.draft_BK.T.contiguous()
    compare(verify_sampling, reference.verify_sampling, replace(given, draft_BK=draft_KB.T), device)


def test_inputs_are_left_alone_and_nothing_behind_the_drafts_is_read(device: str) -> None:
    given = random_round(torch.Generator().manual_seed(8), (6, 3, 30), "dense").to(device)
    wanted = verify_sampling(**given.arguments(), impl="triton")
    behind_BQ = torch.arange(4, device=device) > given.num_draft_B[:, None]
    assert given.draft_BKU is not None
    given.logits_BQV[behind_BQ] = NAN
    given.draft_BKU[behind_BQ[:, 1:]] = NAN
    given.draft_BK[behind_BQ[:, 1:]] = -5
    before = [given.logits_BQV.clone(), given.draft_BK.clone(), given.draft_BKU.clone()]
    found = verify_sampling(**given.arguments(), impl="triton")
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    after = [given.logits_BQV, given.draft_BK, given.draft_BKU]
    assert all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(before, after, strict=True))


# what depends on what


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("filtered", [False, True], ids=["all kept", "cut"])
def test_a_request_does_not_depend_on_its_batch(device: str, impl: str, filtered: bool) -> None:
    """Alone, in another order, and beside longer drafts."""
    given = random_round(torch.Generator().manual_seed(9), (5, 2, 50), "dense", filtered, torch.bfloat16).to(device)
    together = verify_sampling(**given.arguments(), impl=impl)
    order_B = torch.tensor([3, 1, 4, 0, 2], device=device)
    shuffled = verify_sampling(**given.map(lambda tensor: tensor[order_B]).arguments(), impl=impl)
    for whole, part in zip(together, shuffled, strict=True):
        assert torch.equal(whole[order_B], part)
    alone = verify_sampling(**wider(given.map(lambda tensor: tensor[2:3])).arguments(), impl=impl)
    assert alone[0][0] == together[0][2]
    assert alone[1][0].tolist() == [*together[1][2].tolist(), -1]


def wider(given: Round) -> Round:
    """Room for one draft token more, which no request has."""
    assert given.draft_BKU is not None
    pad = torch.nn.functional.pad
    return replace(
        given,
        logits_BQV=pad(given.logits_BQV, (0, 0, 0, 1)),
        draft_BK=pad(given.draft_BK, (0, 1)),
        draft_BKU=pad(given.draft_BKU, (0, 0, 0, 1)),
    )


def test_tokens_do_not_depend_on_block_sizes(device: str, request: pytest.FixtureRequest) -> None:
    given = random_round(torch.Generator().manual_seed(10), (5, 2, 150), "dense", True, torch.bfloat16).to(device)
    wanted = verify_sampling(**given.arguments(), impl="triton")
    request.getfixturevalue("small_blocks")
    found = verify_sampling(**given.arguments(), impl="triton")
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", ["seed_B", "position_B"])
def test_another_seed_or_position_gives_other_tokens(name: str) -> None:
    given = random_round(torch.Generator().manual_seed(11), (300, 2, 50))
    changed = replace(given.sampling, **{name: getattr(given.sampling, name) + 1})
    first, again, other = (
        verify_sampling(**replace(given, sampling=sampling).arguments())[1]
        for sampling in (given.sampling, given.sampling, changed)
    )
    assert torch.equal(first, again)
    assert ((first != other).any(-1)).double().mean() > 0.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_greedy_requests_are_verified_as_verify_greedy_does(device: str, impl: str, dtype: torch.dtype) -> None:
    given = random_round(torch.Generator().manual_seed(12), (8, 2, 60), "one-hot", dtype=dtype, special=True)
    given = replace(given, sampling=replace(given.sampling, temperature_B=torch.zeros(8))).to(device)
    found = verify_sampling(**given.arguments(), impl=impl)
    wanted = verify_greedy(given.logits_BQV, given.draft_BK, given.num_draft_B, impl="reference")
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_ragged_drafts(device: str, impl: str) -> None:
    """A request takes its own token from the query behind its last accepted draft; ids that do not exist end it."""
    logits_BQV = torch.full((6, 4, 5), -INF, device=device)
    logits_BQV[:, torch.arange(4), torch.arange(4)] = 0.0  # query i can only give token i
    draft_BK = torch.tensor([[0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 4, 2], [0, -1, 2], [0, 5, 2]], device=device)
    num_draft_B = torch.tensor([-1, 2, 7, 3, 3, 3], device=device)
    accepted_B, output_BQ, mask_BK = verify_sampling(
        logits_BQV, draft_BK, num_draft_B, sampling_of(6, device), impl=impl
    )
    assert accepted_B.tolist() == [0, 2, 3, 1, 1, 1]
    ended = [0, 1, -1, -1]
    assert output_BQ.tolist() == [[0, -1, -1, -1], [0, 1, 2, -1], [0, 1, 2, 3], ended, ended, ended]
    assert mask_BK.sum(-1).tolist() == accepted_B.tolist()


def test_without_a_residual_the_token_comes_from_p() -> None:
    """Draft probabilities that sum to more than one can refuse a token and leave nothing."""
    p_BQV = torch.tensor([[[0.25, 0.75], [0.5, 0.5]]], dtype=torch.float64)
    one_B = torch.ones(1, dtype=torch.long)
    weight_BV = reference.residual(p_BQV, torch.ones(1, 1, 2), one_B.double(), 0 * one_B, one_B)
    assert torch.equal(weight_BV, p_BQV[:, 0])


def test_kernel_without_a_residual(device: str) -> None:
    given = random_round(torch.Generator().manual_seed(13), (8, 1, 10), "dense")
    given = replace(given, draft_BKU=torch.ones(8, 1, 10), num_draft_B=torch.ones(8, dtype=torch.long))
    compare(verify_sampling, reference.verify_sampling, given, device)


def test_the_self_check(device: str) -> None:
    check(0, device)


# refusals


REFUSED = [
    ("draft", {"draft_BK": torch.zeros(2, 4, dtype=torch.long)}),
    ("draft", {"draft_BK": torch.zeros(2, 3)}),
    ("numbers of draft", {"num_draft_B": torch.zeros(3, dtype=torch.long)}),
    ("numbers of draft", {"num_draft_B": torch.zeros(2, 1, dtype=torch.long)}),
    ("draft probabilities", {"draft_BKU": torch.zeros(2, 3, 4)}),
    ("draft probabilities", {"draft_BKU": torch.zeros(2, 3, 5), "target_ids_U": torch.zeros(4, dtype=torch.long)}),
    ("without draft probabilities", {"target_ids_U": torch.zeros(5, dtype=torch.long)}),
    ("temperature_B", {"sampling": sampling_of(3)}),
    ("seed_B", {"sampling": sampling_of(2, seed_B=torch.zeros(2))}),
    ("top_p_B", {"sampling": sampling_of(2, top_p_B=torch.ones(1))}),
    ("logits", {"logits_BQV": torch.zeros(2, 5)}),
    ("logits", {"logits_BQV": torch.zeros(2, 4, 0)}),
    ("logits", {"logits_BQV": torch.zeros(2, 4, 5, dtype=torch.int8)}),
    ("meta", {"draft_BK": torch.zeros(2, 3, dtype=torch.long, device="meta")}),
    ("impl", {"impl": "fast"}),
]


@pytest.mark.parametrize(("message", "changes"), REFUSED, ids=range(len(REFUSED)))
def test_what_does_not_fit_is_refused(message: str, changes: dict[str, object]) -> None:
    arguments: dict[str, object] = {
        "logits_BQV": torch.zeros(2, 4, 5),
        "draft_BK": torch.zeros(2, 3, dtype=torch.long),
        "num_draft_B": torch.zeros(2, dtype=torch.long),
        "sampling": sampling_of(2),
    }
    with pytest.raises(ValueError, match=message):
        verify_sampling(**(arguments | changes))  # type: ignore[arg-type]


def test_the_kernel_refuses_float64(device: str) -> None:
    given = random_round(torch.Generator().manual_seed(0), (1, 1, 4), dtype=torch.float64).to(device)
    verify_sampling(**given.arguments(), impl="reference")
    with pytest.raises(ValueError, match="float64"):
        verify_sampling(**given.arguments(), impl="triton")


def test_numbers_of_acceptance_and_of_tokens_differ() -> None:
    """One number for both would tie the token to its acceptance."""
    seed, zero = torch.arange(1000), torch.zeros(1000, dtype=torch.long)
    accept = philox.uniform(seed, zero, zero, philox.ACCEPT)[:, 0]
    token = philox.uniform(seed, zero, zero, philox.TOKEN, 4)
    assert all(abs(float(torch.corrcoef(torch.stack([accept, token[:, word]]))[0, 1])) < 0.15 for word in range(4))
