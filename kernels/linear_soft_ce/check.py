"""The fused loss on random inputs against float64; see `drafthead.kernels.testing`.

Shapes: R rows, D hidden of the draft, E hidden of the target, U draft vocabulary.
"""

from dataclasses import dataclass

import torch
from drafthead.kernels.linear_soft_ce import reference
from drafthead.kernels.linear_soft_ce.op import FUSED_DTYPES, linear_soft_ce
from drafthead.kernels.linear_soft_ce.reference import LossRows, TargetLogits, TargetStates
from drafthead.kernels.testing import same, within_budget
from torch import Tensor

ROWS = (0, 1, 2, 7, 13)
VOCABULARIES = (1, 2, 63, 257, 1000, 4096, 9001, 32000)
SIZES = (1, 8, 24, 33)
CASES = 5
SLACK = {torch.float32: 2**-18, torch.float16: 2**-10, torch.bfloat16: 2**-6}
"""Of the largest value; the interpreter of Triton 3.9 cuts bf16 off where it should round."""
UPSTREAM = 0.7


@dataclass(frozen=True, kw_only=True)
class _Inputs:
    hidden_RD: Tensor
    weight_UD: Tensor
    target: TargetStates | TargetLogits
    weight_R: Tensor
    label_R: Tensor
    log_sum_R: Tensor | None


def check(seed: int, device: str) -> None:
    """Compare a few shapes, dtypes and losses."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(CASES):
        loss = reference.LOSSES[_choose(generator, *range(len(reference.LOSSES)))]
        inputs, what = _draw(generator, device)
        _compare(inputs, loss, f"{loss}, {what}")


def _choose(generator: torch.Generator, *options: int) -> int:
    return options[int(torch.randint(len(options), (1,), generator=generator))]


def _draw(generator: torch.Generator, device: str) -> tuple[_Inputs, str]:
    rows, vocab = _choose(generator, *ROWS), _choose(generator, *VOCABULARIES)
    size, target_size = _choose(generator, *SIZES), _choose(generator, *SIZES)
    dtype = FUSED_DTYPES[_choose(generator, 0, 1, 2)]
    weight_dtype = FUSED_DTYPES[_choose(generator, 0, 2)]
    states, log_sum = _choose(generator, 0, 1), _choose(generator, 0, 1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    state_RE, lm_head_UE = normal(rows, target_size), normal(vocab, target_size) * 3 * target_size**-0.5
    logits_RU = state_RE @ lm_head_UE.T
    target: TargetStates | TargetLogits = TargetLogits(logits_RU=logits_RU.to(device, dtype).mT.contiguous().mT)
    if states:
        target = TargetStates(state_RE=state_RE.to(device, dtype), lm_head_UE=lm_head_UE.to(device, dtype))
    weight_R = normal(rows).abs() * (torch.rand(rows, generator=generator) < 0.8)
    inputs = _Inputs(
        hidden_RD=normal(rows, size).to(device, dtype),
        # what every path makes of the weight first
        weight_UD=(normal(vocab, size) * 2 * size**-0.5).to(device, dtype).to(weight_dtype),
        target=target,
        weight_R=weight_R.to(device),
        label_R=torch.randint(-1, vocab, (rows,), generator=generator).to(device),
        log_sum_R=(logits_RU.logsumexp(-1) + torch.rand(rows, generator=generator)).to(device) if log_sum else None,
    )
    shape = (
        f"R, U, D = {rows}, {vocab}, {size}, {'states' if states else 'logits'}{' with log sums' if log_sum else ''}"
    )
    return inputs, f"{shape}, {dtype}, weight {weight_dtype}"


def _compare(inputs: _Inputs, loss: str, what: str) -> None:
    dtype = inputs.hidden_RD.dtype
    found, found_gradients = _run(inputs, loss, None)
    exact, exact_gradients = _run(inputs, loss, torch.float64)
    plain, plain_gradients = _run(inputs, loss, dtype)
    results = {
        "total": (found.total, exact.total, plain.total),
        "rejection": (1 - found.overlap_R, 1 - exact.overlap_R, 1 - plain.overlap_R),
        "hidden gradient": (found_gradients[0], exact_gradients[0], plain_gradients[0]),
        "weight gradient": (found_gradients[1], exact_gradients[1], plain_gradients[1]),
    }
    undecided = _undecided(inputs) if loss in ("lk", "lk_hybrid") else 0.0
    jumps = {"hidden gradient": inputs.weight_UD, "weight gradient": inputs.hidden_RD}
    for name, (one, other, same_dtype) in results.items():
        slack = SLACK[dtype]
        if name in jumps and undecided and other.numel():
            slack += undecided * float(jumps[name].abs().max()) / max(float(other.abs().max()), 1e-30)
        within_budget(one.detach(), other.detach(), same_dtype.detach().to(one.dtype), slack, f"{name} of {what}")
    if dtype == torch.float32:
        same(found.argmax_R, exact.argmax_R, f"argmax of {what}")
        same(found.hit_R, exact.hit_R, f"hit of {what}")


NEAR = {torch.float32: 2**-17, torch.float16: 2**-8, torch.bfloat16: 2**-5}
"""Relative difference of p and q below which rounding decides which is the smaller."""


def _undecided(inputs: _Inputs) -> float:
    """How far a row's gradient of -sum min(p, q) may jump: it has a corner at every token with p = q."""
    target = inputs.target
    given_RU = target.state_RE.double() @ target.lm_head_UE.double().T if isinstance(target, TargetStates) else None
    logits_RU = target.logits_RU.double() if isinstance(target, TargetLogits) else given_RU
    assert logits_RU is not None
    log_sum_R = logits_RU.logsumexp(-1) if inputs.log_sum_R is None else inputs.log_sum_R.double()
    p_RU = (logits_RU - log_sum_R[:, None]).exp()
    q_RU = (inputs.hidden_RD.double() @ inputs.weight_UD.double().T).softmax(-1)
    is_near_RU = (p_RU - q_RU).abs() <= NEAR[inputs.hidden_RD.dtype] * torch.maximum(p_RU, q_RU)
    mass_R = (q_RU * is_near_RU).sum(-1) * inputs.weight_R
    return 2 * UPSTREAM * float(mass_R.sum())


def _run(inputs: _Inputs, loss: str, dtype: torch.dtype | None) -> tuple[LossRows, list[Tensor]]:
    """The operation, or its definition in a dtype, and the gradients of both inputs."""
    hidden_RD, weight_UD = inputs.hidden_RD, inputs.weight_UD
    if dtype is not None:
        hidden_RD, weight_UD = hidden_RD.to(dtype), weight_UD.to(dtype)
    hidden_RD, weight_UD = (tensor.detach().requires_grad_() for tensor in (hidden_RD, weight_UD))
    if dtype is None:
        rows = linear_soft_ce(
            hidden_RD,
            weight_UD,
            inputs.target,
            inputs.weight_R,
            inputs.label_R,
            loss,
            log_sum_R=inputs.log_sum_R,
            impl="triton",
        )
    else:
        rows = reference.linear_soft_ce(
            hidden_RD,
            weight_UD,
            _in_dtype(inputs.target, dtype),
            inputs.weight_R.double() if dtype == torch.float64 else inputs.weight_R,
            inputs.label_R,
            loss,
            inputs.log_sum_R,
        )
    return rows, list(torch.autograd.grad(rows.total * UPSTREAM, [hidden_RD, weight_UD]))


def _in_dtype(target: TargetStates | TargetLogits, dtype: torch.dtype) -> TargetStates | TargetLogits:
    if isinstance(target, TargetLogits):
        return TargetLogits(logits_RU=target.logits_RU.to(dtype))
    return TargetStates(state_RE=target.state_RE.to(dtype), lm_head_UE=target.lm_head_UE.to(dtype))
