"""Tree verification on random inputs against float64; see `drafthead.kernels.testing`.

Shapes: B requests, N draft nodes, M = N + 1 rows, V target vocabulary, U draft vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from drafthead.kernels.testing import same
from drafthead.kernels.verify_sampling.inputs import Sampling
from drafthead.kernels.verify_tree import reference
from drafthead.kernels.verify_tree.op import verify_tree_greedy, verify_tree_sampling
from drafthead.kernels.verify_tree.structure import PADDING
from torch import Tensor

KINDS = ("chosen", "dense", "sparse")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SPECIAL = (float("inf"), float("-inf"), float("nan"))


@dataclass(frozen=True, kw_only=True)
class TreeRound:
    """Arguments of `verify_tree_sampling`, by name."""

    logits_BMV: Tensor
    draft_BN: Tensor
    parent_BN: Tensor
    sampling: Sampling
    draft_BMU: Tensor | None
    target_ids_U: Tensor | None

    def arguments(self) -> dict[str, Tensor | Sampling | None]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def map(self, function: Callable[[Tensor], Tensor]) -> "TreeRound":
        """The same with every tensor changed, the ids of the draft vocabulary apart."""
        sampling = Sampling(**{name: function(value) for name, value in self.sampling.tensors().items()})
        batched = ("logits_BMV", "draft_BN", "parent_BN") + (() if self.draft_BMU is None else ("draft_BMU",))
        return replace(self, sampling=sampling, **{name: function(getattr(self, name)) for name in batched})

    def to(self, device: str) -> "TreeRound":
        ids = self.target_ids_U
        return replace(self.map(lambda tensor: tensor.to(device)), target_ids_U=None if ids is None else ids.to(device))


def random_parents(batch: int, nodes: int, generator: torch.Generator) -> Tensor:
    """Each parent is any earlier node or the root; the first tree is whole, the others may lack nodes."""
    index_N = torch.arange(nodes)
    parent_BN = (torch.rand(batch, nodes, generator=generator) * (index_N + 1)).long() - 1
    count_B = torch.randint(nodes + 1, (batch,), generator=generator)
    count_B[:1] = nodes
    return parent_BN.masked_fill(index_N >= count_B[:, None], PADDING)


def draw_children(
    draft_BMU: Tensor, parent_BN: Tensor, target_ids_U: Tensor | None, generator: torch.Generator | None
) -> Tensor:
    """Tokens of all nodes: siblings one after another from their row without replacement, or its most likely ones.

    Args:
        draft_BMU: Draft probabilities of each row.
        parent_BN: Parent of each node.
        target_ids_U: Target id of each draft vocabulary entry, or None.
        generator: None for the most likely ones.
    """
    nodes = parent_BN.shape[1]
    # the order of perturbed log probabilities is an order of draws without replacement
    score_BMU = draft_BMU.log()
    if generator is not None:
        score_BMU = score_BMU - torch.rand(draft_BMU.shape, generator=generator).log().neg().log()
    order_BMU = score_BMU.argsort(-1, descending=True)
    is_older_BNN = (parent_BN[:, :, None] == parent_BN[:, None, :]) & torch.ones(nodes, nodes).tril(-1).bool()
    rank_BN = is_older_BNN.sum(-1).clamp_max(draft_BMU.shape[-1] - 1)
    row_BN = (parent_BN + 1).clamp_min(0)
    index_BN = order_BMU[torch.arange(len(parent_BN))[:, None], row_BN, rank_BN]
    return index_BN if target_ids_U is None else target_ids_U[index_BN]


def random_round(
    generator: torch.Generator,
    shape: tuple[int, int, int],
    kind: str = "dense",
    filtered: bool = False,
    dtype: torch.dtype = torch.float32,
    special: bool = False,
) -> TreeRound:
    """Drafts close enough to the target for every outcome to occur.

    Args:
        generator: Source of everything.
        shape: Requests, nodes, target vocabulary.
        kind: One of `KINDS`; a sparse draft vocabulary holds half the tokens.
        filtered: With top-k and top-p.
        dtype: Of the logits.
        special: With infinities, NaN, and rows that are all -inf.
    """
    batch, nodes, vocab = shape

    def uniform() -> Tensor:
        return torch.rand(batch, generator=generator)

    def integers(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (batch,), generator=generator)

    logits_BMV = (2 * torch.randn(batch, nodes + 1, vocab, generator=generator)).to(dtype)
    near_BMV = logits_BMV.float() + torch.randn(logits_BMV.shape, generator=generator)
    target_ids_U = torch.randperm(vocab, generator=generator)[: vocab // 2 + 1] if kind == "sparse" else None
    draft_BMU = (near_BMV if target_ids_U is None else near_BMV[..., target_ids_U]).softmax(-1)
    parent_BN = random_parents(batch, nodes, generator)
    draft_BN = draw_children(draft_BMU, parent_BN, target_ids_U, None if kind == "chosen" else generator)
    if special:
        chosen_BMV = torch.randint(40 * len(SPECIAL), logits_BMV.shape, generator=generator)
        for index, value in enumerate(SPECIAL):
            logits_BMV[chosen_BMV == index] = value
        logits_BMV[1::5] = float("-inf")
    sampling = Sampling(
        temperature_B=torch.where(uniform() < 0.2, 0.0, uniform() + 0.3),
        seed_B=integers(-(2**63), 2**63 - 1),
        position_B=integers(0, 2**40),
        top_k_B=integers(0, vocab + 1) if filtered else None,
        top_p_B=uniform() + 0.2 if filtered else None,
    )
    return TreeRound(
        logits_BMV=logits_BMV,
        draft_BN=draft_BN,
        parent_BN=parent_BN,
        sampling=sampling,
        draft_BMU=None if kind == "chosen" else draft_BMU,
        target_ids_U=target_ids_U,
    )


def compare(given: TreeRound, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Assert that kernels and references decide alike; rounding may tip one sampled request in a thousand."""
    given = given.to(device)
    what = f"logits {list(given.logits_BMV.shape)} {given.logits_BMV.dtype}"
    plain = (given.logits_BMV, given.draft_BN, given.parent_BN)
    found = verify_tree_greedy(*plain, impl="triton")
    exact = reference.verify_tree_greedy(plain[0].double(), *plain[1:])
    for name, one, other in zip(("accepted", "output", "path"), found, exact, strict=True):
        same(one, other, f"greedy {name} for {what}")
    found = verify_tree_sampling(**given.arguments(), impl="triton")  # type: ignore[arg-type]
    exact = reference.verify_tree_sampling(**given.arguments())  # type: ignore[arg-type]
    tipped_B = (found[1] != exact[1]).any(-1)
    kept_B = ~tipped_B if tipped_B.sum() <= len(tipped_B) // 1000 else torch.ones_like(tipped_B)
    for name, one, other in zip(("accepted", "output", "path"), found, exact, strict=True):
        same(one[kept_B], other[kept_B], f"sampled {name} for {what}")
    return found


def check(seed: int, device: str) -> None:
    """Compare trees of every kind of draft."""
    generator = torch.Generator().manual_seed(seed)

    def choose(*options: int) -> int:
        return options[int(torch.randint(len(options), (1,), generator=generator))]

    for index, kind in enumerate(KINDS):
        shape = (choose(0, 1, 2), choose(0, 1, 5, 12), choose(1, 2, 63, 257, 4100))
        dtype, special = DTYPES[choose(0, 1, 2)], choose(0, 1) == 1
        compare(random_round(generator, shape, kind, filtered=index == 1, dtype=dtype, special=special), device)
