"""Tree attention: the definition against torch's own attention, the kernel against the definition in float64.

Shapes: B requests, M rows of the tree (row 0 the root), H heads, G kv heads, P head dim, L cache slots.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from drafthead.kernels.tree_attention.check import Case, compare, draw
from drafthead.kernels.tree_attention.op import tree_attention
from drafthead.kernels.verify_tree.structure import tree_visibility
from torch import Tensor
from torch.nn import functional as F

# the interpreter's maximum over the NaN of padding rows
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
NAN = float("nan")
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])


@DTYPES
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256], ids=lambda size: f"P={size}")
def test_any_head_dim_and_dtype(device: str, dtype: torch.dtype, head_dim: int) -> None:
    compare(draw(9, 70, head_dim, dtype=dtype, device=device))


@pytest.mark.parametrize("slots", [0, 1, 257], ids=lambda slots: f"L={slots}")
@pytest.mark.parametrize("nodes", [0, 1, 63], ids=lambda nodes: f"N={nodes}")
@pytest.mark.parametrize("batch", [0, 1, 2], ids=lambda batch: f"B={batch}")
def test_any_tree_and_prefix(device: str, batch: int, nodes: int, slots: int) -> None:
    found = compare(draw(nodes, slots, batch=batch, heads=(2, 1), device=device, seed=nodes + slots))
    assert found.shape == (batch, nodes + 1, 2, 64)


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (6, 2), (7, 1)], ids=lambda heads: f"H={heads[0]} G={heads[1]}")
def test_any_grouping_of_heads(device: str, heads: tuple[int, int]) -> None:
    compare(draw(5, 33, heads=heads, device=device))


def test_a_long_prefix_takes_several_splits(device: str) -> None:
    """Lengths at and around the border of a split, in a cache with room behind them."""
    case = draw(3, 2200, batch=5, heads=(2, 1), device=device)
    length_B = torch.tensor([1023, 1024, 1025, 2048, 2199], device=device)
    keys, values = (torch.randn_like(part) for part in case.cache)
    compare(replace(case, length_B=length_B, cache=(keys, values)))


def test_large_scores_do_not_overflow(device: str) -> None:
    case = draw(7, 40, device=device)
    compare(replace(case, query_BMHP=case.query_BMHP * 300))


@pytest.mark.parametrize("slots", [0, 5], ids=lambda slots: f"L={slots}")
def test_rows_need_not_see_the_root(device: str, slots: int) -> None:
    """A row may see nothing in whole blocks of keys."""
    case = draw(79, slots, batch=1, heads=(1, 1), device=device)
    compare(replace(case, visible_BMM=torch.eye(80, device=device).bool()[None]))


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_rows_without_a_node_are_zero(device: str, impl: str) -> None:
    case = draw(9, 20, device=device)
    live_BM = case.visible_BMM.diagonal(dim1=1, dim2=2)
    assert not live_BM.all()
    found = case.run(impl)
    assert (found[~live_BM] == 0).all()
    assert found.isfinite().all()


def _positions_outermost(part: Tensor) -> Tensor:
    return part.permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3)


def _heads_before_positions(part: Tensor) -> Tensor:
    return part.transpose(1, 2).contiguous().transpose(1, 2)


def _front_of_a_larger_one(part: Tensor) -> Tensor:
    return F.pad(part, (3, 2, 0, 1, 0, 5), value=NAN)[:, : part.shape[1], : part.shape[2], 3:-2]


def _channels_outermost(part: Tensor) -> Tensor:
    return part.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)


@pytest.mark.parametrize(
    "lay_out",
    [_positions_outermost, _heads_before_positions, _front_of_a_larger_one, _channels_outermost],
    ids=["positions outermost", "heads before positions", "front of a larger one", "channels outermost"],
)
def test_any_strides(device: str, lay_out: Callable[[Tensor], Tensor]) -> None:
    case = draw(6, 70, dtype=torch.float16, device=device)
    strided = replace(
        case,
        query_BMHP=lay_out(case.query_BMHP),
        cache=(lay_out(case.cache[0]), case.cache[1]),
        tree=(case.tree[0], lay_out(case.tree[1])),
        visible_BMM=case.visible_BMM.transpose(1, 2).contiguous().transpose(1, 2),
    )
    assert not strided.cache[0].is_contiguous()
    assert torch.equal(compare(strided), case.run("triton"))


def test_offsets_beyond_two_gibi_elements(device: str) -> None:
    """Positions so far apart that their offset needs 64 bits although the stride does not; the gaps stay untouched."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    apart = 2**29
    storage = torch.empty(4 * apart + 64, dtype=torch.float16, device=device)
    cache = storage.as_strided((1, 5, 1, 64), (64, apart, 64, 1))
    case = draw(2, 5, batch=1, heads=(1, 1), dtype=torch.float16, device=device)
    cache.copy_(case.cache[0])
    compare(replace(case, cache=(cache, cache)))


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_a_chain_is_plain_causal_attention(device: str, impl: str) -> None:
    """The rows of a chain see what torch's causal attention lets them see."""
    visible_BMM = tree_visibility((torch.arange(6) - 1).expand(2, -1)).to(device)
    assert torch.equal(visible_BMM[0], torch.ones(7, 7, device=device).tril().bool())
    whole = torch.randn(2, 11 + 7, 2, 64, generator=torch.Generator().manual_seed(1)).to(device)
    query_BMHP = torch.randn(2, 7, 4, 64, generator=torch.Generator().manual_seed(2)).to(device)
    parts = (whole[:, :11], whole[:, :11]), (whole[:, 11:], whole[:, 11:])
    length_B = torch.full((2,), 11, device=device)
    found = tree_attention(query_BMHP, parts[0], length_B, parts[1], visible_BMM, impl=impl)
    before = torch.zeros(2, 11, 4, 64, device=device)
    wide = whole.repeat_interleave(2, 2).transpose(1, 2)
    queries = torch.cat([before, query_BMHP], 1).transpose(1, 2)
    plain = F.scaled_dot_product_attention(queries, wide, wide, is_causal=True).transpose(1, 2)[:, 11:]
    torch.testing.assert_close(found, plain, atol=2e-5, rtol=0)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_each_path_of_a_tree_is_a_sequence(device: str, impl: str) -> None:
    """A node's output is that of plain attention over the prefix and its path, laid out one behind the other."""
    parent_BN = torch.tensor([[-1, -1, 0, 1, 0, 3]])
    case = replace(draw(6, 13, batch=1, device=device, seed=3), visible_BMM=tree_visibility(parent_BN).to(device))
    fill = torch.Generator().manual_seed(4)
    case = replace(case, tree=tuple(torch.randn(1, 7, 2, 64, generator=fill).to(device) for _ in range(2)))  # type: ignore[arg-type]
    case = replace(case, query_BMHP=torch.randn(1, 7, 4, 64, generator=fill).to(device))
    found = case.run(impl)
    for row, path in enumerate([[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 1, 5], [0, 2, 4, 6]]):
        keys, values = (
            torch.cat([old, new[:, path]], 1).repeat_interleave(2, 2).transpose(1, 2)
            for old, new in zip(case.cache, case.tree, strict=True)
        )
        query = case.query_BMHP[:, row : row + 1].transpose(1, 2)
        plain = F.scaled_dot_product_attention(query, keys, values).transpose(1, 2)
        torch.testing.assert_close(found[:, row : row + 1], plain, atol=2e-5, rtol=0)


def test_a_request_does_not_depend_on_its_neighbours(device: str) -> None:
    case = draw(9, 300, dtype=torch.bfloat16, device=device)
    whole = case.run("triton")
    for row in range(3):
        cut = slice(row, row + 1)
        alone = Case(
            query_BMHP=case.query_BMHP[cut],
            cache=(case.cache[0][cut], case.cache[1][cut]),
            length_B=case.length_B[cut],
            tree=(case.tree[0][cut], case.tree[1][cut]),
            visible_BMM=case.visible_BMM[cut],
        )
        assert torch.equal(alone.run("triton"), whole[cut])


def test_the_scale_can_be_given(device: str) -> None:
    case = draw(4, 20, device=device)
    arguments = (case.cache, case.length_B, case.tree, case.visible_BMM)
    found = tree_attention(case.query_BMHP * 2, *arguments, scale=0.0625, impl="triton")
    torch.testing.assert_close(found, case.run("triton"), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_BMHP": torch.zeros(2, 4, 64)}, r"need \[B, M, H, P\]"),
        ({"query_BMHP": torch.zeros(2, 4, 3, 64)}, "3 heads: not a multiple of 2 kv heads"),
        ({"query_BMHP": torch.zeros(2, 5, 4, 64)}, "shapes do not fit"),
        ({"query_BMHP": torch.zeros(2, 4, 4, 64).half()}, "dtypes differ"),
        ({"query_BMHP": torch.zeros(2, 4, 4, 64, device="meta")}, "different devices"),
        ({"cache": (torch.zeros(2, 9, 2, 64), torch.zeros(2, 8, 2, 64))}, "shapes do not fit"),
        ({"tree": (torch.zeros(2, 4, 1, 64), torch.zeros(2, 4, 2, 64))}, "shapes do not fit"),
        ({"length_B": torch.zeros(3, dtype=torch.long)}, "shapes do not fit"),
        ({"length_B": torch.zeros(2, dtype=torch.int32)}, r"lengths torch\.int32: need torch\.bool, torch\.int64"),
        ({"visible_BMM": torch.zeros(2, 4, 4)}, r"visible torch\.float32"),
        ({"visible_BMM": torch.zeros(2, 4, 5, dtype=torch.bool)}, "shapes do not fit"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change: dict[str, object], message: str) -> None:
    fine = draw(3, 9, batch=2)
    fine.run("reference")
    with pytest.raises(ValueError, match=message):
        replace(fine, **change).run("reference")  # type: ignore[arg-type]


def test_what_the_kernel_cannot_do_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match="head dim 260"):
        draw(1, 3, 260, device=device).run("triton")
    with pytest.raises(ValueError, match=r"torch\.float64"):
        draw(1, 3, dtype=torch.float64, device=device).run("triton")
