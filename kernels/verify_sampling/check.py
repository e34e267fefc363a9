"""Speculative sampling on random inputs against float64; see `drafthead.kernels.testing`.

Shapes: B requests, K draft steps, Q = K + 1 queries, V target vocabulary, U draft vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from drafthead.kernels.testing import same
from drafthead.kernels.verify_sampling import reference
from drafthead.kernels.verify_sampling.inputs import Sampling
from drafthead.kernels.verify_sampling.op import verify_sampling
from torch import Tensor

KINDS = ("one-hot", "dense", "sparse")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SPECIAL = (float("inf"), float("-inf"), float("nan"))
Verify = Callable[..., tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Round:
    """Arguments of `verify_sampling` and `verify_block`, by name."""

    logits_BQV: Tensor
    draft_BK: Tensor
    num_draft_B: Tensor
    sampling: Sampling
    draft_BKU: Tensor | None
    target_ids_U: Tensor | None

    def arguments(self) -> dict[str, Tensor | Sampling | None]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def map(self, function: Callable[[Tensor], Tensor]) -> "Round":
        """The same with every tensor changed, the ids of the draft vocabulary apart."""
        sampling = Sampling(**{name: function(value) for name, value in self.sampling.tensors().items()})
        batched = ("logits_BQV", "draft_BK", "num_draft_B") + (() if self.draft_BKU is None else ("draft_BKU",))
        return replace(self, sampling=sampling, **{name: function(getattr(self, name)) for name in batched})

    def to(self, device: str) -> "Round":
        ids = self.target_ids_U
        return replace(self.map(lambda tensor: tensor.to(device)), target_ids_U=None if ids is None else ids.to(device))


def random_round(
    generator: torch.Generator,
    shape: tuple[int, int, int],
    kind: str = "dense",
    filtered: bool = False,
    dtype: torch.dtype = torch.float32,
    special: bool = False,
) -> Round:
    """Drafts close enough to the target for every outcome to occur, sampled from the q that goes with them.

    Args:
        generator: Source of everything.
        shape: Requests, draft steps, target vocabulary.
        kind: One of `KINDS`; a sparse draft vocabulary holds half the tokens.
        filtered: With top-k and top-p.
        dtype: Of the logits.
        special: With infinities, NaN, and rows that are all -inf.
    """
    batch, steps, vocab = shape

    def uniform() -> Tensor:
        return torch.rand(batch, generator=generator)

    def integers(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (batch,), generator=generator)

    logits_BQV = (2 * torch.randn(batch, steps + 1, vocab, generator=generator)).to(dtype)
    noise_BKV = torch.randn(batch, steps, vocab, generator=generator)
    near_BKV = logits_BQV[:, :-1].float() + noise_BKV
    draft_BKU, target_ids_U = None, None
    if kind == "one-hot":
        draft_BK = near_BKV.argmax(-1)
    else:
        if kind == "sparse":
            target_ids_U = torch.randperm(vocab, generator=generator)[: vocab // 2 + 1]
            near_BKV = near_BKV[..., target_ids_U]
        draft_BKU = near_BKV.softmax(-1)
        flat = draft_BKU.reshape(-1, draft_BKU.shape[-1])
        chosen = torch.multinomial(flat, 1, generator=generator) if len(flat) else flat[:, :1].long()
        draft_BK = chosen.reshape(batch, steps)
        draft_BK = draft_BK if target_ids_U is None else target_ids_U[draft_BK]
    if special:
        chosen_BQV = torch.randint(40 * len(SPECIAL), logits_BQV.shape, generator=generator)
        for index, value in enumerate(SPECIAL):
            logits_BQV[chosen_BQV == index] = value
        logits_BQV[1::5] = float("-inf")
    sampling = Sampling(
        temperature_B=torch.where(uniform() < 0.2, 0.0, uniform() + 0.3),
        seed_B=integers(-(2**63), 2**63 - 1),
        position_B=integers(0, 2**40),
        top_k_B=integers(0, vocab + 1) if filtered else None,
        top_p_B=uniform() + 0.2 if filtered else None,
    )
    return Round(
        logits_BQV=logits_BQV,
        draft_BK=draft_BK,
        num_draft_B=integers(0, steps + 1),
        sampling=sampling,
        draft_BKU=draft_BKU,
        target_ids_U=target_ids_U,
    )


def compare(op: Verify, exact: Verify, given: Round, device: str) -> None:
    """Assert that kernel and reference decide alike, but for one request in a thousand that rounding may tip."""
    given = given.to(device)
    found, wanted = op(**given.arguments(), impl="triton"), exact(**given.arguments())
    tipped_B = (found[1] != wanted[1]).any(-1)
    allowed = len(tipped_B) // 1000
    what = f"logits {list(given.logits_BQV.shape)} {given.logits_BQV.dtype}"
    for name, one, other in zip(("accepted", "output", "mask"), found, wanted, strict=True):
        if tipped_B.sum() <= allowed:
            one, other = one[~tipped_B], other[~tipped_B]
        same(one, other, f"{name} for {what}")


def check_op(op: Verify, exact: Verify, seed: int, device: str) -> None:
    """Compare a few shapes, dtypes and kinds of draft."""
    generator = torch.Generator().manual_seed(seed)

    def choose(*options: int) -> int:
        return options[int(torch.randint(len(options), (1,), generator=generator))]

    for filtered, batches in ((False, (0, 1, 5)), (True, (1, 2))):
        vocab = choose(1, 2, 63, 257, 4096, 8193)
        given = random_round(
            generator,
            (choose(*batches), choose(0, 1, 2, 5), vocab),
            kind=KINDS[choose(0, 1, 2)],
            filtered=filtered,
            dtype=DTYPES[choose(0, 1, 2)],
            special=choose(0, 1) == 1,
        )
        compare(op, exact, given, device)


def check(seed: int, device: str) -> None:
    check_op(verify_sampling, reference.verify_sampling, seed, device)
