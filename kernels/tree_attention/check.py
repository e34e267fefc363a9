"""Tree attention on random inputs against float64; see `drafthead.kernels.testing`.

Shapes: B requests, M rows of the tree (row 0 the root), H heads, G kv heads, P head dim, L cache slots.
"""

from dataclasses import dataclass

import torch
from drafthead.kernels.testing import within_budget
from drafthead.kernels.tree_attention import reference
from drafthead.kernels.tree_attention.op import tree_attention
from drafthead.kernels.verify_tree.check import random_parents
from drafthead.kernels.verify_tree.structure import tree_visibility
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EPS = {torch.float32: 4e-6}
"""On a GPU a product in fp32 is three in tf32, a little less exact."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Arguments of `tree_attention`."""

    query_BMHP: Tensor
    cache: tuple[Tensor, Tensor]
    length_B: Tensor
    tree: tuple[Tensor, Tensor]
    visible_BMM: Tensor

    def run(self, impl: str) -> Tensor:
        return tree_attention(self.query_BMHP, self.cache, self.length_B, self.tree, self.visible_BMM, impl=impl)

    def exact(self) -> Tensor:
        query_BMHP = self.query_BMHP.double()
        cache, tree = ((keys.double(), values.double()) for keys, values in (self.cache, self.tree))
        scale = query_BMHP.shape[-1] ** -0.5
        return reference.tree_attention(query_BMHP, cache, self.length_B, tree, self.visible_BMM, scale)


def draw(
    nodes: int,
    slots: int,
    head_dim: int = 64,
    batch: int = 3,
    heads: tuple[int, int] = (4, 2),
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> Case:
    """Random inputs, with NaN wherever nobody may look: cache slots behind the prefix, padding rows of the tree."""
    generator = torch.Generator().manual_seed(seed)
    visible_BMM = tree_visibility(random_parents(batch, nodes, generator))
    length_B = torch.randint(slots + 1, (batch,), generator=generator)
    length_B[:1] = slots
    padding_BM = ~visible_BMM.diagonal(dim1=1, dim2=2)
    behind_BL = torch.arange(slots) >= length_B[:, None]

    def normal(length: int, count: int, hidden: Tensor) -> Tensor:
        values = torch.randn(batch, length, count, head_dim, generator=generator)
        return values.masked_fill(hidden[..., None, None], float("nan")).to(device, dtype)

    return Case(
        query_BMHP=normal(nodes + 1, heads[0], padding_BM),
        cache=(normal(slots, heads[1], behind_BL), normal(slots, heads[1], behind_BL)),
        length_B=length_B.to(device),
        tree=(normal(nodes + 1, heads[1], padding_BM), normal(nodes + 1, heads[1], padding_BM)),
        visible_BMM=visible_BMM.to(device),
    )


def compare(case: Case) -> Tensor:
    """Assert that the kernel is no less exact than the reference in the same dtype."""
    found = case.run("triton")
    shapes = f"query {list(case.query_BMHP.shape)}, cache {list(case.cache[0].shape)}, output"
    within_budget(found, case.exact(), case.run("reference"), eps=EPS.get(found.dtype), what=shapes)
    return found


def check(seed: int, device: str) -> None:
    """Compare a few shapes and dtypes."""
    generator = torch.Generator().manual_seed(seed)

    def choose(*options: int) -> int:
        return options[int(torch.randint(len(options), (1,), generator=generator))]

    for dtype in DTYPES:
        groups, per_group = choose(1, 2), choose(1, 3, 4)
        case = draw(
            nodes=choose(0, 1, 7, 20),
            slots=choose(0, 1, 63, 257),
            head_dim=choose(64, 80, 96, 128, 256),
            batch=choose(0, 1, 2),
            heads=(groups * per_group, groups),
            dtype=dtype,
            device=device,
            seed=seed,
        )
        compare(case)
