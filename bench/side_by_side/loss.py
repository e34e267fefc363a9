"""Cases of `linear_soft_ce`, forward and backward: against eager torch, torch.compile and fused losses of others.

Shapes: R rows (tokens), D hidden of draft and target, U vocabulary.
"""

import importlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
from drafthead.kernels.linear_soft_ce import reference
from drafthead.kernels.linear_soft_ce.op import linear_soft_ce
from drafthead.kernels.linear_soft_ce.reference import TargetStates
from side_by_side.measure import CannotRunError, Case, Contender, Run, our_name
from torch import Tensor

Shape = tuple[int, int, int]
Loss = Callable[[], Tensor]
TINY = ((48, 32, 500),)
SHAPES = ((4096, 4096, 32000), (8192, 4096, 151936))
CPU_SHAPES = ((512, 576, 8192), (512, 576, 49152))
"""R, D, U."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Inputs of the loss; hidden states and weight take gradients."""

    hidden_RD: Tensor
    weight_UD: Tensor
    state_RD: Tensor
    lm_head_UD: Tensor
    share_R: Tensor
    label_R: Tensor

    def through(self, loss: Loss) -> Run:
        """Forward and backward, from no gradients to no gradients."""

        def run() -> Tensor:
            total = loss()
            total.backward()
            self.hidden_RD.grad = self.weight_UD.grad = None
            return total.detach()

        return run

    def arguments(self, loss: str) -> tuple[Tensor, Tensor, TargetStates, Tensor, Tensor, str]:
        """Arguments of `linear_soft_ce`, op and reference."""
        target = TargetStates(state_RE=self.state_RD, lm_head_UE=self.lm_head_UD)
        return self.hidden_RD, self.weight_UD, target, self.share_R, self.label_R, loss

    def summed_ce(self) -> Tensor:
        """Hard cross-entropy, materialised."""
        logits_RU = (self.hidden_RD @ self.weight_UD.T).float()
        total: Tensor = torch.nn.functional.cross_entropy(logits_RU, self.label_R, reduction="sum")
        return total


def cases(device: str, quick: bool) -> Iterator[Case]:
    """KL against the target's own states, and hard cross-entropy, at every shape."""
    shapes = CPU_SHAPES if device == "cpu" else SHAPES
    for shape in TINY if quick else shapes:
        rows = draw(shape, device)
        yield _kl_case(rows, device, quick)
        yield _hard_ce_case(rows, device, quick)


def draw(shape: Shape, device: str) -> Rows:
    """Logits of both sides have a standard deviation of about 2; bf16."""
    num_rows, size, vocab = shape
    generator = torch.Generator(device).manual_seed(0)

    def normal(*sizes: int, scale: float = 1.0) -> Tensor:
        return torch.randn(sizes, dtype=torch.bfloat16, device=device, generator=generator) * scale

    return Rows(
        hidden_RD=normal(num_rows, size).requires_grad_(),
        weight_UD=normal(vocab, size, scale=2 * size**-0.5).requires_grad_(),
        state_RD=normal(num_rows, size),
        lm_head_UD=normal(vocab, size, scale=2 * size**-0.5),
        share_R=torch.ones(num_rows, device=device),
        label_R=torch.randint(vocab, (num_rows,), device=device, generator=generator),
    )


def _kl_case(rows: Rows, device: str, quick: bool) -> Case:
    def eager() -> Tensor:
        total: Tensor = reference.linear_soft_ce(*rows.arguments("kl")).total
        return total

    return _case(
        "KL to the target's states",
        rows,
        device,
        ours=lambda: linear_soft_ce(*rows.arguments("kl")).total,
        peers=(
            Contender(name="torch, eager", prepare=lambda: rows.through(eager)),
            Contender(name="torch.compile", prepare=lambda: rows.through(_compiled(eager, device, quick))),
            Contender(name="Liger, fused linear JSD at 0", prepare=lambda: rows.through(_liger_kl(rows, device))),
        ),
    )


def _hard_ce_case(rows: Rows, device: str, quick: bool) -> Case:
    return _case(
        "hard cross-entropy",
        rows,
        device,
        ours=lambda: linear_soft_ce(*rows.arguments("hard_ce")).total,
        peers=(
            Contender(name="torch, eager", prepare=lambda: rows.through(rows.summed_ce)),
            Contender(name="torch.compile", prepare=lambda: rows.through(_compiled(rows.summed_ce, device, quick))),
            Contender(name="torch, linear_cross_entropy", prepare=lambda: rows.through(_torch_chunked(rows))),
            Contender(name="Liger, fused linear CE", prepare=lambda: rows.through(_liger_ce(rows, device))),
        ),
    )


def _case(what: str, rows: Rows, device: str, ours: Loss, peers: tuple[Contender, ...]) -> Case:
    num_rows, size = rows.hidden_RD.shape
    return Case(
        what=f"{num_rows} x {size} x {len(rows.weight_UD)} bf16, {what}",
        ours=Contender(name=our_name(device), prepare=lambda: rows.through(ours)),
        peers=peers,
        agrees=lambda expected, found: bool((expected.double() - found.double()).abs() <= 0.01 * expected.abs()),
        wants_memory=True,
    )


# ---- peers -----------------------------------------------------------------------------------------------


def _compiled(loss: Loss, device: str, quick: bool) -> Loss:
    if quick:
        raise CannotRunError("compiling takes longer than --quick allows")
    if device == "cpu" and not shutil.which(os.environ.get("CXX", "g++")):
        raise CannotRunError("no C++ compiler (g++, or what CXX names)")
    return torch.compile(loss, dynamic=False)


def _torch_chunked(rows: Rows) -> Loss:
    """torch's own chunked loss."""
    try:
        from torch.nn import LinearCrossEntropyOptions
    except ImportError:
        raise CannotRunError(f"torch {torch.__version__} has no linear_cross_entropy with options") from None
    function, options = torch.nn.functional.linear_cross_entropy, LinearCrossEntropyOptions()
    return lambda: function(rows.hidden_RD, rows.weight_UD, rows.label_R, reduction="sum", options=options)


def _liger(device: str) -> ModuleType:
    if device != "cuda":
        raise CannotRunError("Liger's kernels need a GPU")
    try:
        return importlib.import_module("liger_kernel.transformers")
    except ModuleNotFoundError:
        raise CannotRunError("liger-kernel is not installed") from None


def _liger_ce(rows: Rows, device: str) -> Loss:
    function = _liger(device).LigerFusedLinearCrossEntropyLoss(reduction="sum")
    return lambda: function(rows.weight_UD, rows.hidden_RD, rows.label_R)


def _liger_kl(rows: Rows, device: str) -> Loss:
    """Its Jensen-Shannon divergence at beta 0 is the KL divergence; it averages over the rows."""
    function, count = _liger(device).LigerFusedLinearJSD(jsd_beta=0.0), len(rows.hidden_RD)
    return lambda: count * function(rows.hidden_RD, rows.weight_UD, rows.state_RD, rows.lm_head_UD, rows.label_R)
