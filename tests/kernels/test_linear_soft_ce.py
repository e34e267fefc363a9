"""The fused loss against its definition in float64: value, argmax and every gradient.

Shapes: R rows, D hidden, U draft vocabulary.
"""

from dataclasses import dataclass

import pytest
import torch
from drafthead.kernels.linear_soft_ce import reference
from drafthead.kernels.linear_soft_ce.op import linear_soft_ce
from torch import Tensor

LOSSES = pytest.mark.parametrize("loss", reference.LOSSES)
D, U = 24, 77


@dataclass(kw_only=True)
class Case:
    """Inputs of one call."""

    hidden_RD: Tensor
    weight_UD: Tensor
    target_RU: Tensor
    weight_R: Tensor

    def in_dtype(self, dtype: torch.dtype) -> "Case":
        return Case(
            hidden_RD=self.hidden_RD.to(dtype),
            weight_UD=self.weight_UD.to(dtype),
            target_RU=self.target_RU.to(dtype),
            weight_R=self.weight_R.to(dtype),
        )


@dataclass(kw_only=True)
class Outcome:
    """What a call gives, in float64."""

    total: Tensor
    argmax_R: Tensor
    hidden_gradient_RD: Tensor
    weight_gradient_UD: Tensor


def make_case(rows: int, seed: int = 0, vocab: int = U, size: int = D) -> Case:
    """Peaked targets with exact zeros among them, uneven row weights, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    hidden_RD = torch.randn(rows, size, generator=generator)
    weight_UD = torch.randn(vocab, size, generator=generator) * 0.4
    logits_RU = torch.randn(rows, vocab, generator=generator) * 3
    logits_RU[:, ::9] = float("-inf")
    weight_R = torch.rand(rows, generator=generator) + 0.1
    weight_R[2::5] = 0
    return Case(hidden_RD=hidden_RD, weight_UD=weight_UD, target_RU=logits_RU.softmax(-1), weight_R=weight_R)


def run(function: object, case: Case, loss: str, upstream: float = 1.0) -> Outcome:
    hidden_RD = case.hidden_RD.clone().requires_grad_()
    weight_UD = case.weight_UD.clone().requires_grad_()
    assert callable(function)
    total, argmax_R = function(hidden_RD, weight_UD, case.target_RU, case.weight_R, loss)
    (total * upstream).backward()
    assert hidden_RD.grad is not None
    assert weight_UD.grad is not None
    assert hidden_RD.grad.dtype == hidden_RD.dtype
    assert weight_UD.grad.dtype == weight_UD.dtype
    return Outcome(
        total=total.detach().double(),
        argmax_R=argmax_R,
        hidden_gradient_RD=hidden_RD.grad.double(),
        weight_gradient_UD=weight_UD.grad.double(),
    )


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@LOSSES
@pytest.mark.parametrize("rows", [1, 63, 257], ids=lambda rows: f"{rows} rows")
def test_fp32_equals_the_definition_in_float64(loss: str, rows: int) -> None:
    case = make_case(rows)
    exact = run(reference.linear_soft_ce, case.in_dtype(torch.float64), loss, upstream=0.3)
    found = run(linear_soft_ce, case, loss, upstream=0.3)
    torch.testing.assert_close(found.total, exact.total, rtol=1e-5, atol=1e-5)
    assert torch.equal(found.argmax_R, exact.argmax_R)
    assert relative_error(found.hidden_gradient_RD, exact.hidden_gradient_RD) < 1e-4
    assert relative_error(found.weight_gradient_UD, exact.weight_gradient_UD) < 1e-4


@LOSSES
@pytest.mark.parametrize("rows", [1, 63], ids=lambda rows: f"{rows} rows")
def test_bf16_stays_within_the_error_budget_of_plain_torch(loss: str, rows: int) -> None:
    """No worse than twice what plain bf16 arithmetic loses, all measured against float64 of the same inputs."""
    case = make_case(rows, seed=1)
    half = case.in_dtype(torch.bfloat16)
    half.target_RU, half.weight_R = case.target_RU, case.weight_R
    wide = half.in_dtype(torch.float64)
    exact = run(reference.linear_soft_ce, wide, loss)
    plain = run(reference.linear_soft_ce, case.in_dtype(torch.bfloat16), loss)
    found = run(linear_soft_ce, half, loss)
    for name in ("total", "hidden_gradient_RD", "weight_gradient_UD"):
        wanted = getattr(exact, name)
        budget = 2 * (getattr(plain, name) - wanted).abs().max() + 2**-9 * wanted.abs().max()
        assert (getattr(found, name) - wanted).abs().max() <= budget, name


@LOSSES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_gradient_survives_a_head_that_is_nearly_right(loss: str, dtype: torch.dtype) -> None:
    """A116: where q is close to p the gradient is a small difference; its error stays below 1 %.

    The identity as lm_head makes hidden states the logits, exact in either dtype, so that only the loss's own
    arithmetic is measured.
    """
    generator = torch.Generator().manual_seed(2)
    logits_RU = (torch.randn(40, U, generator=generator) * 2).to(dtype)
    noise_RU = torch.randn(40, U, generator=generator, dtype=torch.float64) * 0.02
    case = Case(
        hidden_RD=logits_RU,
        weight_UD=torch.eye(U, dtype=dtype),
        target_RU=(logits_RU.double() + noise_RU).softmax(-1).float(),
        weight_R=torch.ones(40),
    )
    exact = run(reference.linear_soft_ce, case.in_dtype(torch.float64), loss)
    found = run(linear_soft_ce, case, loss)
    assert relative_error(found.hidden_gradient_RD, exact.hidden_gradient_RD) < 0.01


def test_kl_and_soft_ce_have_the_same_gradients_and_differ_by_the_entropy() -> None:
    case = make_case(63)
    kl, soft_ce = (run(linear_soft_ce, case, loss) for loss in ("kl", "soft_ce"))
    assert torch.equal(kl.hidden_gradient_RD, soft_ce.hidden_gradient_RD)
    assert torch.equal(kl.weight_gradient_UD, soft_ce.weight_gradient_UD)
    entropy_R = -torch.xlogy(case.target_RU, case.target_RU).sum(-1)
    expected = (entropy_R * case.weight_R).sum().double()
    torch.testing.assert_close(soft_ce.total - kl.total, expected, rtol=1e-5, atol=0)


@LOSSES
def test_gradients_agree_with_finite_differences(loss: str) -> None:
    """Independent of autograd. For lk_hybrid the mix of the two losses is a constant, so it is held there."""
    case = make_case(5, seed=3).in_dtype(torch.float64)
    mix_R = torch.exp(-3 * torch.minimum(case.target_RU, (case.hidden_RD @ case.weight_UD.T).softmax(-1)).sum(-1))

    def value(hidden_RD: Tensor, weight_UD: Tensor) -> Tensor:
        draft_RU = (hidden_RD @ weight_UD.T).softmax(-1)
        rejection_R = 1 - torch.minimum(case.target_RU, draft_RU).sum(-1)
        cross_R = -(case.target_RU * draft_RU.log()).sum(-1)
        losses_R = {
            "soft_ce": cross_R,
            "kl": cross_R,
            "lk": rejection_R,
            "lk_hybrid": mix_R * cross_R + (1 - mix_R) * rejection_R,
        }[loss]
        return (losses_R * case.weight_R).sum()

    found = run(linear_soft_ce, case.in_dtype(torch.float32), loss)
    generator = torch.Generator().manual_seed(4)
    for _ in range(5):
        step_RD = torch.randn(case.hidden_RD.shape, generator=generator, dtype=torch.float64)
        step_UD = torch.randn(case.weight_UD.shape, generator=generator, dtype=torch.float64)
        forward, backward = (
            value(case.hidden_RD + sign * 1e-6 * step_RD, case.weight_UD + sign * 1e-6 * step_UD) for sign in (1, -1)
        )
        slope = (found.hidden_gradient_RD * step_RD).sum() + (found.weight_gradient_UD * step_UD).sum()
        assert float(slope) == pytest.approx(float(forward - backward) / 2e-6, rel=1e-3, abs=1e-4)


@LOSSES
def test_rows_of_weight_zero_change_nothing(loss: str) -> None:
    """A117: neither the loss nor the weight's gradient sees masked rows, and they get no gradient themselves."""
    case, masked = make_case(63), make_case(20, seed=5)
    longer = Case(
        hidden_RD=torch.cat([case.hidden_RD, masked.hidden_RD]),
        weight_UD=case.weight_UD,
        target_RU=torch.cat([case.target_RU, masked.target_RU]),
        weight_R=torch.cat([case.weight_R, torch.zeros(20)]),
    )
    alone, padded = run(linear_soft_ce, case, loss), run(linear_soft_ce, longer, loss)
    torch.testing.assert_close(padded.total, alone.total, rtol=1e-6, atol=0)
    torch.testing.assert_close(padded.weight_gradient_UD, alone.weight_gradient_UD, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(padded.hidden_gradient_RD[:63], alone.hidden_gradient_RD, rtol=1e-5, atol=1e-6)
    assert not padded.hidden_gradient_RD[63:].any()
    assert not alone.hidden_gradient_RD[2::5].any()
    assert alone.hidden_gradient_RD[0].any()


@LOSSES
def test_all_rows_masked_is_zero_and_finite(loss: str) -> None:
    case = make_case(7)
    case.weight_R = torch.zeros(7)
    found = run(linear_soft_ce, case, loss)
    assert found.total == 0
    assert not found.hidden_gradient_RD.any()
    assert not found.weight_gradient_UD.any()


@LOSSES
def test_frozen_lm_head_gets_no_gradient(loss: str) -> None:
    case = make_case(9)
    trained = run(linear_soft_ce, case, loss)
    hidden_RD, weight_UD = case.hidden_RD.requires_grad_(), case.weight_UD
    total, argmax_R = linear_soft_ce(hidden_RD, weight_UD, case.target_RU, case.weight_R, loss)
    total.backward()
    assert weight_UD.grad is None
    assert not argmax_R.requires_grad
    assert hidden_RD.grad is not None
    assert torch.equal(hidden_RD.grad.double(), trained.hidden_gradient_RD)


@LOSSES
def test_non_contiguous_inputs_and_untouched_arguments(loss: str) -> None:
    case = make_case(33)
    strided = Case(
        hidden_RD=case.hidden_RD.T.contiguous().T,
        weight_UD=case.weight_UD.T.contiguous().T,
        target_RU=case.target_RU.T.contiguous().T,
        weight_R=torch.stack([case.weight_R, case.weight_R], 1)[:, 0],
    )
    before = strided.target_RU.clone()
    straight, found = run(linear_soft_ce, case, loss), run(linear_soft_ce, strided, loss)
    torch.testing.assert_close(found.total, straight.total, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.hidden_gradient_RD, straight.hidden_gradient_RD, rtol=1e-4, atol=1e-6)
    assert torch.equal(strided.target_RU, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_lowest_id_wins_a_tie(dtype: torch.dtype) -> None:
    weight_UD = torch.zeros(U, D, dtype=dtype)
    weight_UD[[5, 30, 76]] = 1.0
    target_RU = torch.full((3, U), 1 / U)
    hidden_RD = torch.ones(3, D, dtype=dtype)
    hidden_RD[1] = -1.0
    hidden_RD[2] = 0.0
    _, argmax_R = linear_soft_ce(hidden_RD, weight_UD, target_RU, torch.ones(3), "soft_ce")
    assert argmax_R.tolist() == [5, 0, 0]
    assert argmax_R.dtype == torch.int64


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("hidden_RD", (8, D)),
        ("hidden_RD", (9, D + 1)),
        ("weight_UD", (U - 1, D)),
        ("target_RU", (9, U + 1)),
        ("target_RU", (8, U)),
        ("weight_R", (8,)),
        ("weight_R", (9, 1)),
    ],
    ids=lambda value: str(value),
)
def test_shapes_that_do_not_fit_are_refused(name: str, shape: tuple[int, ...]) -> None:
    case = make_case(9)
    setattr(case, name, torch.rand(shape))
    with pytest.raises(ValueError, match="shapes do not fit"):
        linear_soft_ce(case.hidden_RD, case.weight_UD, case.target_RU, case.weight_R, "soft_ce")


def test_an_unknown_loss_is_refused_with_the_known_ones() -> None:
    case = make_case(2)
    with pytest.raises(ValueError, match=r"loss='tv'.*soft_ce, kl, lk, lk_hybrid"):
        linear_soft_ce(case.hidden_RD, case.weight_UD, case.target_RU, case.weight_R, "tv")
