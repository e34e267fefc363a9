"""Greedy verification: the definition against a loop, the kernel against the definition in float64.

Shapes: B requests, K draft steps, Q = K + 1 queries, V target vocabulary.
"""

from collections.abc import Callable

import pytest
import torch
from drafthead.kernels.testing import same
from drafthead.kernels.verify_greedy import reference
from drafthead.kernels.verify_greedy.op import verify_greedy
from torch import Tensor

IMPLEMENTATIONS = pytest.mark.parametrize("impl", ["reference", "triton"])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
INF, NAN = float("inf"), float("nan")


def by_loop(logits_QV: list[list[float]], draft: list[int]) -> tuple[int, list[int], list[bool]]:
    """Accept while the draft is the target's first largest logit."""
    output: list[int] = []
    for query, row in enumerate(logits_QV):
        own = row.index(max(row))
        output.append(own)
        if query == len(draft) or draft[query] != own:
            break
    accepted, queries = len(output) - 1, len(logits_QV)
    mask = [True] * accepted + [False] * (queries - 1 - accepted)
    return accepted, output + [-1] * (queries - len(output)), mask


def draw(
    batch: int, steps: int, vocab: int, seed: int = 0, ties: bool = False, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, drafts that are mostly right, and lengths, every other one of which is K."""
    generator = torch.Generator().manual_seed(seed)
    logits_BQV = torch.randn(batch, steps + 1, vocab, generator=generator).to(dtype)
    if ties:
        logits_BQV = logits_BQV.round()
    noise_BK = torch.randint(vocab, (batch, steps), generator=generator)
    is_right_BK = torch.rand(batch, steps, generator=generator) < 0.8
    draft_BK = torch.where(is_right_BK, logits_BQV.argmax(-1)[:, :steps], noise_BK)
    num_draft_B = torch.randint(steps + 1, (batch,), generator=generator)
    num_draft_B[::2] = steps
    return logits_BQV, draft_BK, num_draft_B


def assert_as_in_float64(logits_BQV: Tensor, draft_BK: Tensor, num_draft_B: Tensor) -> tuple[Tensor, ...]:
    """Run the kernel and compare all three results."""
    found = verify_greedy(logits_BQV, draft_BK, num_draft_B, impl="triton")
    exact = reference.verify_greedy(logits_BQV.double(), draft_BK, num_draft_B)
    for name, one, other in zip(("accepted", "output", "mask"), found, exact, strict=True):
        same(one, other, name)
    return found


@pytest.mark.parametrize("k", [0, 1, 3, 8, 20], ids=lambda k: f"K={k}")
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_the_definition_equals_a_loop(k: int, ties: bool) -> None:
    logits_BQV, draft_BK, num_draft_B = draw(200, k, 7, seed=k, ties=ties)
    accepted_B, output_BQ, accepted_BK = verify_greedy(logits_BQV, draft_BK, num_draft_B)
    for row in range(200):
        draft = draft_BK[row, : num_draft_B[row]].tolist()
        found = (accepted_B[row].item(), output_BQ[row].tolist(), accepted_BK[row].tolist())
        assert found == by_loop(logits_BQV[row].tolist(), draft)
    assert {0, min(k, 8)} <= set(accepted_B.tolist())


@DTYPES
@pytest.mark.parametrize("k", [0, 1, 8], ids=lambda k: f"K={k}")
@pytest.mark.parametrize("vocab", [1, 63, 257, 8193], ids=lambda vocab: f"V={vocab}")
def test_any_size_and_dtype(device: str, dtype: torch.dtype, k: int, vocab: int) -> None:
    inputs = [each.to(device) for each in draw(1 if k == 8 else 3, k, vocab, seed=vocab, dtype=dtype)]
    assert_as_in_float64(inputs[0], inputs[1], inputs[2])


@pytest.mark.parametrize("vocab", [32000, 49152, 151936], ids=lambda vocab: f"V={vocab}")
def test_vocabularies_of_real_targets(device: str, vocab: int) -> None:
    """Full of ties, within a chunk and across chunks."""
    logits_BQV, draft_BK, num_draft_B = draw(2, 2, vocab, seed=vocab, ties=True, dtype=torch.bfloat16)
    largest_BQ1 = logits_BQV.amax(-1, keepdim=True)
    assert ((logits_BQV == largest_BQ1).sum(-1) > 1).any()
    assert_as_in_float64(logits_BQV.to(device), draft_BK.to(device), num_draft_B.to(device))


def _vocabulary_outermost(logits_BQV: Tensor) -> Tensor:
    return logits_BQV.permute(2, 0, 1).contiguous().permute(1, 2, 0)


def _rows_with_gaps(logits_BQV: Tensor) -> Tensor:
    return torch.nn.functional.pad(logits_BQV, (3, 2), value=NAN)[..., 3:-2]


def _every_third(logits_BQV: Tensor) -> Tensor:
    wide = logits_BQV.repeat_interleave(3, -1)
    wide[..., 1::3] = INF
    return wide[..., ::3]


def _one_row_for_all(logits_BQV: Tensor) -> Tensor:
    return logits_BQV[:, :1].expand_as(logits_BQV)


@DTYPES
@pytest.mark.parametrize(
    "lay_out",
    [_vocabulary_outermost, _rows_with_gaps, _every_third, _one_row_for_all],
    ids=["vocabulary outermost", "rows with gaps", "every third", "expanded"],
)
def test_any_strides(device: str, dtype: torch.dtype, lay_out: Callable[[Tensor], Tensor]) -> None:
    logits_BQV, draft_BK, num_draft_B = (each.to(device) for each in draw(3, 2, 601, seed=1, dtype=dtype))
    strided_BQV = lay_out(logits_BQV)
    assert not strided_BQV.is_contiguous()
    strided_BK = draft_BK.T.contiguous().T
    strided_B = torch.stack([num_draft_B, num_draft_B + 99], 1)[:, 0]
    found = assert_as_in_float64(strided_BQV, strided_BK, strided_B)
    plain = reference.verify_greedy(strided_BQV.contiguous(), draft_BK, num_draft_B)
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))


@IMPLEMENTATIONS
@DTYPES
@pytest.mark.parametrize(
    ("values", "own"),
    [
        ({5: 3.0, 9000: 3.0}, 5),
        ({8191: 3.0, 8192: 3.0}, 8191),
        ({6: 3.0, 7: 3.0}, 6),
        ({20: INF, 21: INF, 9: 3.0}, 20),
        ({20: INF, 9001: NAN, 9003: NAN}, 9001),
        ({20: NAN, 9001: INF}, 20),
        ({20: -NAN, 30: INF}, 20),
        ({}, 0),
    ],
    ids=["chunks", "border of a chunk", "neighbours", "inf", "NaN behind inf", "NaN first", "negative NaN", "all -inf"],
)
def test_ties_and_what_is_not_finite(
    device: str, impl: str, dtype: torch.dtype, values: dict[int, float], own: int
) -> None:
    """As torch's argmax: the lowest id of equal ones, NaN above infinity, id 0 where nothing is possible."""
    logits_BQV = torch.full((1, 2, 9100), -INF, dtype=dtype, device=device)
    for place, value in values.items():
        logits_BQV[..., place] = value
    draft_BK, num_draft_B = torch.tensor([[own]], device=device), torch.tensor([1], device=device)
    accepted_B, output_BQ, accepted_BK = verify_greedy(logits_BQV, draft_BK, num_draft_B, impl=impl)
    assert accepted_B.tolist() == [1]
    assert output_BQ.tolist() == [[own, own]]
    assert accepted_BK.tolist() == [[True]]


@DTYPES
@pytest.mark.parametrize("zeros", [(-0.0, 0.0), (0.0, -0.0)], ids=["-0 first", "+0 first"])
def test_zeros_of_both_signs_are_equal(device: str, dtype: torch.dtype, zeros: tuple[float, float]) -> None:
    logits_BQV = torch.full((1, 1, 9100), -1.0, dtype=dtype, device=device)
    for gap in (1, 40, 9000):
        logits_BQV[..., 3:] = -1.0
        logits_BQV[..., 3], logits_BQV[..., 3 + gap] = zeros
        found = assert_as_in_float64(
            logits_BQV,
            torch.empty(1, 0, dtype=torch.long, device=device),
            torch.zeros(1, dtype=torch.long, device=device),
        )
        assert found[1].tolist() == [[3]]


@IMPLEMENTATIONS
def test_ignores_what_lies_behind_the_number_of_drafts(device: str, impl: str) -> None:
    """Lengths outside 0 to K count as the nearer bound; ids outside the vocabulary are never accepted."""
    logits_BQV = torch.zeros(6, 4, 5, device=device)
    logits_BQV[..., 2] = 1.0
    logits_BQV[2, 3:] = NAN
    draft_BK = torch.full((6, 3), 2, dtype=torch.int32, device=device)
    draft_BK[5] = torch.tensor([2, -1, 2])
    num_draft_B = torch.tensor([0, 1, 2, 9, -4, 3], dtype=torch.int32, device=device)
    accepted_B, output_BQ, accepted_BK = verify_greedy(logits_BQV, draft_BK, num_draft_B, impl=impl)
    assert accepted_B.tolist() == [0, 1, 2, 3, 0, 1]
    own = [1, 2, 3, 4, 1, 2]
    assert output_BQ.tolist() == [[2] * count + [-1] * (4 - count) for count in own]
    assert accepted_BK.tolist() == [[True] * (count - 1) + [False] * (4 - count) for count in own]
    assert (accepted_B.dtype, output_BQ.dtype, accepted_BK.dtype) == (torch.int64, torch.int64, torch.bool)


@IMPLEMENTATIONS
@pytest.mark.parametrize(("batch", "k"), [(0, 3), (0, 0), (2, 0)], ids=["B=0", "B=0 K=0", "K=0"])
def test_nothing_to_verify(device: str, impl: str, batch: int, k: int) -> None:
    logits_BQV, draft_BK, num_draft_B = (each.to(device) for each in draw(batch, k, 100))
    accepted_B, output_BQ, accepted_BK = verify_greedy(logits_BQV, draft_BK, num_draft_B, impl=impl)
    assert accepted_B.tolist() == [0] * batch
    assert torch.equal(output_BQ, logits_BQV.argmax(-1) if k == 0 else torch.empty_like(output_BQ))
    assert accepted_BK.shape == (batch, k)


def test_more_queries_than_the_walk_takes_at_once(device: str) -> None:
    """The first miss counts, whichever block of queries it lies in."""
    logits_BQV, _, _ = draw(3, 20, 7)
    draft_BK = logits_BQV.argmax(-1)[:, :20]
    draft_BK[1, 17] += 1
    draft_BK[2, 3] += 1
    lengths = torch.tensor([18, 20, 20], device=device)
    found = assert_as_in_float64(logits_BQV.to(device), draft_BK.to(device), lengths)
    assert found[0].tolist() == [18, 17, 3]


@pytest.mark.parametrize("place", [11, 32 * 8192 + 7, 33 * 8192 + 4])
def test_more_chunks_than_the_walk_takes_at_once(device: str, place: int) -> None:
    """The last chunk holds a tie, which must lose."""
    logits_BQV = torch.zeros(1, 1, 33 * 8192 + 5, dtype=torch.bfloat16, device=device)
    logits_BQV[..., [place, -1]] = 1.0
    nothing = torch.empty(1, 0, dtype=torch.long, device=device)
    found = assert_as_in_float64(logits_BQV, nothing, torch.zeros(1, dtype=torch.long, device=device))
    assert found[1].tolist() == [[place]]


def test_offsets_beyond_two_gibi_elements(device: str) -> None:
    """Rows so far apart that their offset needs 64 bits although the stride does not; the gaps stay untouched."""
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    apart = 2**29
    storage = torch.empty(4 * apart + 64, dtype=torch.bfloat16, device=device)
    logits_BQV = storage.as_strided((5, 2, 8), (apart, 8, 1))
    logits_BQV.zero_()
    logits_BQV[4, :, 6] = 1.0
    draft_BK = torch.tensor([[0], [0], [0], [0], [6]], device=device)
    found = verify_greedy(logits_BQV, draft_BK, torch.ones(5, dtype=torch.long, device=device), impl="triton")
    assert found[1].tolist() == [[0, 0]] * 4 + [[6, 6]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draft": (2, 4)}, "shapes do not fit"),
        ({"draft": (2, 2)}, "shapes do not fit"),
        ({"draft": (1, 3)}, "shapes do not fit"),
        ({"lengths": (3,)}, "shapes do not fit"),
        ({"lengths": (2, 1)}, "shapes do not fit"),
        ({"logits": (4, 5)}, "shapes do not fit"),
        ({"logits": (2, 4, 0)}, "vocabulary of 0"),
    ],
    ids=["K too large", "K too small", "other batch", "other lengths", "lengths of rank 2", "logits of rank 2", "V=0"],
)
def test_shapes_that_do_not_fit_are_refused(change: dict[str, tuple[int, ...]], message: str) -> None:
    shapes = {"logits": (2, 4, 5), "draft": (2, 3), "lengths": (2,)} | change
    logits, draft, lengths = (torch.zeros(shape) for shape in shapes.values())
    with pytest.raises(ValueError, match=message):
        verify_greedy(logits, draft.long(), lengths.long())


def test_dtypes_and_devices_that_do_not_fit_are_refused(device: str) -> None:
    logits_BQV, draft_BK, num_draft_B = (each.to(device) for each in draw(2, 3, 5))
    with pytest.raises(ValueError, match=r"draft of torch\.float32: wanted int32 or int64"):
        verify_greedy(logits_BQV, draft_BK.float(), num_draft_B)
    with pytest.raises(ValueError, match=r"lengths of torch\.bool"):
        verify_greedy(logits_BQV, draft_BK, num_draft_B.bool())
    with pytest.raises(ValueError, match="draft on meta, logits on"):
        verify_greedy(logits_BQV, draft_BK.to("meta"), num_draft_B)
    with pytest.raises(ValueError, match=r"logits of torch\.float64: the kernel takes"):
        verify_greedy(logits_BQV.double(), draft_BK, num_draft_B, impl="triton")
