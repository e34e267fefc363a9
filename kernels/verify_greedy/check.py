"""Greedy verification on random inputs against float64; see `drafthead.kernels.testing`.

Shapes: B requests, K draft steps, Q = K + 1 queries, V target vocabulary.
"""

import torch
from drafthead.kernels.testing import same
from drafthead.kernels.verify_greedy import reference
from drafthead.kernels.verify_greedy.op import LOGITS, verify_greedy
from torch import Tensor

BATCHES = (0, 1, 2, 5)
STEPS = (0, 1, 3, 8, 20)
VOCABULARIES = (1, 2, 63, 257, 1000, 4096, 8193, 32000)
CASES = 8
SPECIAL = (float("inf"), float("-inf"), float("nan"), 0.0, -0.0)


def check(seed: int, device: str) -> None:
    """Compare a few shapes, dtypes and memory layouts."""
    generator = torch.Generator().manual_seed(seed)

    def choose(*options: int) -> int:
        return options[int(torch.randint(len(options), (1,), generator=generator))]

    for _ in range(CASES):
        batch, steps, vocab = choose(*BATCHES), choose(*STEPS), choose(*VOCABULARIES)
        logits_BQV = _logits((batch, steps + 1, vocab), choose(0, 1, 2), generator).to(LOGITS[choose(0, 1, 2)])
        right_BK = logits_BQV.double().argmax(-1)[:, :steps]
        wrong_BK = torch.randint(vocab, (batch, steps), generator=generator)
        draft_BK = torch.where(torch.rand(batch, steps, generator=generator) < 0.8, right_BK, wrong_BK)
        num_draft_B = torch.randint(steps + 1, (batch,), generator=generator, dtype=torch.int32)
        inputs = [tensor.to(device) for tensor in (logits_BQV, draft_BK, num_draft_B)]
        inputs[0] = _laid_out(inputs[0], choose(0, 1, 2))
        found = verify_greedy(inputs[0], inputs[1], inputs[2], impl="triton")
        exact = reference.verify_greedy(inputs[0].double(), inputs[1], inputs[2])
        what = f"logits {list(logits_BQV.shape)} {logits_BQV.dtype}, strides {inputs[0].stride()}"
        for name, one, other in zip(("accepted", "output", "mask"), found, exact, strict=True):
            same(one, other, f"{name} for {what}:")


def _logits(shape: tuple[int, int, int], kind: int, generator: torch.Generator) -> Tensor:
    """Distinct values, ties, or ties with infinities, NaN and rows that are all -inf."""
    logits_BQV = torch.randn(shape, generator=generator)
    if kind > 0:
        logits_BQV = logits_BQV.round()
    if kind == 2:
        chosen_BQV = torch.randint(40 * len(SPECIAL), shape, generator=generator)
        for index, value in enumerate(SPECIAL):
            logits_BQV[chosen_BQV == index] = value
        logits_BQV[:, ::3] = float("-inf")
    return logits_BQV


def _laid_out(logits_BQV: Tensor, kind: int) -> Tensor:
    """The same numbers as they are, with the vocabulary outermost, or with gaps between the rows."""
    if kind == 0:
        return logits_BQV
    if kind == 1:
        return logits_BQV.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    return torch.nn.functional.pad(logits_BQV, (3, 2))[..., 3:-2]
