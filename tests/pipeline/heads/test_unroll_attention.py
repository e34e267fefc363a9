"""FlexAttention over all documents at once against the reference, document by document.

Shapes: T packed tokens, R rows, H heads, G key-value heads, P head dim, S steps after the first.
"""

from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from drafthead.pipeline.heads import unroll_attention
from drafthead.pipeline.heads.unroll_attention import (
    BLOCK,
    all_at_once,
    by_document,
    document_blocks,
    flex_agrees,
    with_own_columns,
)
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import flex_attention

LENGTHS = {
    "one block": [7, 1, 40],
    "edges on blocks": [BLOCK, 2 * BLOCK, BLOCK],
    "edges off blocks": [63, 257, 1, 130, 5],
    "long": [700],
}
ALL_LENGTHS = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
ON_EACH_DEVICE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@dataclass(frozen=True, kw_only=True)
class Inputs:
    query_RHP: Tensor
    base: tuple[Tensor, Tensor]
    own: list[tuple[Tensor, Tensor]]
    documents: list[tuple[int, int]]
    row_T: Tensor

    def leaves(self) -> list[Tensor]:
        return [self.query_RHP, *self.base, *(tensor for pair in self.own for tensor in pair)]

    def arguments(self) -> tuple[object, ...]:
        return self.query_RHP, self.base, self.own, self.documents, self.row_T


def make(
    lengths: list[int], steps: int = 2, value_size: int = 16, device: str = "cpu", every: int = 3, seed: int = 0
) -> Inputs:
    """Four heads in two groups of 16 channels; every third slot is a row, the last one repeated as padding."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    row_T = torch.arange(total)[::every]
    row_T = torch.cat([row_T, row_T[-1:].expand(5)])

    def random(rows: int, number: int, width: int) -> Tensor:
        return torch.randn(rows, number, width, generator=generator).to(device)

    return Inputs(
        query_RHP=2 * random(len(row_T), 4, 16),
        base=(random(total, 2, 16), random(total, 2, value_size)),
        own=[(random(len(row_T), 2, 16), random(len(row_T), 2, value_size)) for _ in range(steps)],
        documents=list(zip(accumulate(lengths, initial=0), lengths, strict=False)),
        row_T=row_T.to(device),
    )


def visible_RT(inputs: Inputs) -> Tensor:
    total = sum(length for _, length in inputs.documents)
    document_T = torch.cat([torch.full((length,), n) for n, (_, length) in enumerate(inputs.documents)])
    rows = inputs.row_T.cpu()
    return (document_T == document_T[rows, None]) & (torch.arange(total) <= rows[:, None])


@ON_EACH_DEVICE
@ALL_LENGTHS
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_both_ways_agree(lengths: list[int], steps: int, device: str) -> None:
    inputs = make(lengths, steps, value_size=8 if device == "cpu" else 32, device=device)
    # fp32 sums of up to 700 terms in another order
    torch.testing.assert_close(all_at_once(*inputs.arguments()), by_document(*inputs.arguments()), rtol=1e-4, atol=2e-5)  # type: ignore[arg-type]


@ALL_LENGTHS
@pytest.mark.parametrize("every", [1, 3, 50])
def test_the_blocks_are_those_that_some_row_sees_and_no_others_are_listed(lengths: list[int], every: int) -> None:
    """The kernel skips blocks that are not listed; the eager path of a CPU would not notice."""
    inputs = make(lengths, every=every)
    total = sum(lengths)
    mask = document_blocks(inputs.documents, inputs.row_T, total)
    seen_RT = visible_RT(inputs)
    padded = torch.nn.functional.pad(seen_RT, (0, -total % BLOCK, 0, -len(seen_RT) % BLOCK))
    needed_BC = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).any(3).any(1)
    listed_BC = mask.to_dense()[0, 0].bool()
    assert listed_BC.shape == needed_BC.shape
    assert not (needed_BC & ~listed_BC).any()
    # a block of rows lists a range, in which a document without rows may lie
    for needed, listed in zip(needed_BC, listed_BC, strict=True):
        places = listed.nonzero().squeeze(1).tolist()
        assert places == list(range(places[0], places[-1] + 1))
        assert bool(needed[places[0]])
        assert bool(needed[places[-1]])
    rows, tokens = (torch.arange(count) for count in seen_RT.shape)
    assert torch.equal(mask.mask_mod(torch.tensor(0), torch.tensor(0), rows[:, None], tokens), seen_RT)
    assert mask.kv_indices.numel() == needed_BC.numel()


def test_own_columns_join_with_the_references_gradients() -> None:
    """From a dense attention over the step-0 keys and its log-sum-exp, which autograd knows."""
    inputs, found = make([9, 30, 4], steps=3, value_size=8), []
    weight = torch.randn(len(inputs.row_T), 4 * 8, generator=torch.Generator().manual_seed(1))
    hidden_RT = ~visible_RT(inputs)

    def dense(inputs: Inputs) -> Tensor:
        keys, values = (tensor.repeat_interleave(2, 1) for tensor in inputs.base)
        scores_RHT = torch.einsum("rhp,thp->rht", inputs.query_RHP, keys) * 16**-0.5
        scores_RHT = scores_RHT.masked_fill(hidden_RT[:, None], float("-inf"))
        mixed = torch.einsum("rht,thp->rhp", scores_RHT.softmax(-1), values)
        return with_own_columns(mixed, scores_RHT.logsumexp(-1), inputs.query_RHP, inputs.own).flatten(1)

    for attend in (dense, lambda inputs: by_document(*inputs.arguments())):
        for leaf in inputs.leaves():
            leaf.requires_grad_()
        mixed = attend(inputs)
        found.append([mixed, *torch.autograd.grad((mixed * weight).sum(), inputs.leaves())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@ON_EACH_DEVICE
@pytest.mark.parametrize("changed", [0, 1, 2], ids=["first", "middle", "last"])
def test_a_changed_document_leaves_the_others_bit_identical(changed: int, device: str) -> None:
    lengths = [70, 150, 80]
    before, other = make(lengths, device=device), make(lengths, device=device, seed=1)
    start, length = before.documents[changed]
    place_T = torch.arange(sum(lengths), device=device)
    inside_T = (place_T >= start) & (place_T < start + length)
    inside_R = inside_T[before.row_T]

    def mix(which: Tensor, new: Tensor, old: Tensor) -> Tensor:
        return torch.where(which[:, None, None], new, old)

    after = Inputs(
        query_RHP=mix(inside_R, other.query_RHP, before.query_RHP),
        base=tuple(mix(inside_T, new, old) for new, old in zip(other.base, before.base, strict=True)),  # type: ignore[arg-type]
        own=[
            tuple(mix(inside_R, new, old) for new, old in zip(news, olds, strict=True))  # type: ignore[misc]
            for news, olds in zip(other.own, before.own, strict=True)
        ],
        documents=before.documents,
        row_T=before.row_T,
    )
    for attend in (all_at_once, by_document):
        one, two = (attend(*inputs.arguments()) for inputs in (before, after))  # type: ignore[operator]
        assert torch.equal(one[~inside_R], two[~inside_R])
        assert not torch.equal(one[inside_R], two[inside_R])


def test_no_rows_are_no_output() -> None:
    inputs = make([5, 6])
    nothing = inputs.row_T[:0]
    assert all_at_once(inputs.query_RHP[:0], inputs.base, [], inputs.documents, nothing).shape == (0, 64)


def test_packs_of_other_lengths_do_not_compile_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond eight times torch would give up compiling, and run the kernel's slow definition without a word."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(flex_attention, dynamic=True, backend=counter)
    monkeypatch.setattr(unroll_attention, "_flex", lambda device: compiled)
    for lengths in (*LENGTHS.values(), [300, 300], [90] * 9, [33], [500, 20, 10, 10]):
        inputs = make(lengths)
        torch.testing.assert_close(
            all_at_once(*inputs.arguments()),  # type: ignore[arg-type]
            by_document(*inputs.arguments()),  # type: ignore[arg-type]
            rtol=1e-4,
            atol=2e-5,
        )
    assert counter.frame_count <= 2


def test_flex_is_not_chosen_where_it_has_no_gradient(capsys: pytest.CaptureFixture[str]) -> None:
    flex_agrees.cache_clear()
    assert not flex_agrees(torch.device("cpu"), torch.float32, (4, 2, 16, 16))
    assert "document by document, since FlexAttention fails here" in capsys.readouterr().err
    assert not flex_agrees(torch.device("cpu"), torch.float32, (4, 2, 8, 8))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("sizes", [(4, 2, 64, 64), (8, 8, 192, 128), (16, 2, 256, 256)], ids=str)
def test_flex_is_chosen_on_cuda(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Forward and backward equal the reference there."""
    flex_agrees.cache_clear()
    assert flex_agrees(torch.device("cuda"), dtype, sizes)
