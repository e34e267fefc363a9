"""Trees grown by the drafter's confidence: against a search in plain Python, plain decoding, and softmax.

Shapes: B requests, Q nodes run together, N draft nodes, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from drafthead.eval.decode import DecodeOptions, decode
from drafthead.eval.hf_target import HFTarget
from drafthead.eval.tree_decode import decode_tree
from drafthead.eval.tree_dynamic import DynamicTree, grow_tree
from drafthead.kernels.verify_tree.structure import ROOT
from drafthead.pipeline.heads.recursive import RecursiveDrafter
from torch import Tensor

from tests.eval.speculation import (
    DRAFTED,
    NO_END,
    V,
    chi_square_p,
    make_eagle3,
    make_medusa,
    observed,
    tokens_of,
)
from tests.eval.test_tree_decode import TEMPERATURE, true_distributions

Path = tuple[int, ...]
LogProbs = Callable[[Path], Tensor]
"""Of the draft vocabulary behind a path of tokens."""

SHAPES = {
    "12 nodes": DynamicTree(nodes=12, levels=3, width=3),
    "wide": DynamicTree(nodes=20, levels=2, width=20),
    "one level": DynamicTree(nodes=3, levels=1, width=5),
    "all that was seen": DynamicTree(nodes=99, levels=3, width=2),
    "fewer nodes than levels": DynamicTree(nodes=2, levels=3, width=4),
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
makers = pytest.mark.parametrize("make", [make_eagle3, make_medusa], ids=["eagle3", "medusa"])


def search_by_hand(log_probs: LogProbs, shape: DynamicTree) -> list[Path]:
    """EAGLE-2 for one request, path by path."""
    found: dict[Path, float] = {}
    beam: list[tuple[Path, float]] = [((), 0.0)]
    for _ in range(shape.levels):
        level: dict[Path, float] = {}
        for path, confidence in beam:
            log_q_U = log_probs(path)
            for number in log_q_U.argsort(descending=True)[: shape.width].tolist():
                level[(*path, DRAFTED[number])] = confidence + float(log_q_U[number])
        found |= level
        beam = sorted(level.items(), key=lambda entry: -entry[1])[: shape.width]
    return sorted(found, key=lambda path: -found[path])[: shape.nodes]


def log_probs_of(drafter: Any) -> LogProbs:
    """By a chain that is drafted along the path, without any tree."""

    def of_medusa(path: Path) -> Tensor:
        log_q_U: Tensor = drafter.logits(len(path))[0].log_softmax(-1)
        return log_q_U

    def of_recursive(path: Path) -> Tensor:
        seen: list[Tensor] = []

        def follow(out_BD: Tensor) -> Tensor:
            seen.append(drafter.head.lm_head(out_BD)[0].log_softmax(-1))
            return torch.tensor([[*path, 0][len(seen) - 1]])

        drafter._unroll(len(path) + 1, follow)
        return seen[-1]

    return of_recursive if isinstance(drafter, RecursiveDrafter) else of_medusa


def paths_of(tokens: list[int], parents: list[int]) -> list[Path]:
    paths: list[Path] = []
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        assert ROOT <= parent < node, "parents stand before their children"
        paths.append((*(paths[parent] if parent != ROOT else ()), token))
    return paths


# ---- growing ---------------------------------------------------------------------------------------------


@shapes
@makers
def test_a_tree_is_that_of_a_search_path_by_path(
    model: Any, target: HFTarget, prompts: list[list[int]], texts: list[list[int]], make: Any, shape: DynamicTree
) -> None:
    """For requests of different lengths at once, each against a drafter of its own."""
    drafter = observed(make, model, prompts, texts)
    draft_BN, parent_BN = grow_tree(drafter, shape)
    again_BN, _ = grow_tree(drafter, shape)
    assert torch.equal(draft_BN, again_BN), "growing leaves no traces"
    for request, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        alone = observed(make, model, [prompt], [text])
        found = paths_of(draft_BN[request].tolist(), parent_BN[request].tolist())
        assert len(found) == len(set(found))
        assert set(found) == set(search_by_hand(log_probs_of(alone), shape))
        for parent in {path[:-1] for path in found}:
            siblings = [DRAFTED.index(path[-1]) for path in found if path[:-1] == parent]
            chances = log_probs_of(alone)(parent)[siblings]
            assert torch.equal(chances, chances.sort(descending=True).values), "the likeliest is tried first"


@makers
def test_trees_of_different_requests_have_different_shapes(
    model: Any, target: HFTarget, prompts: list[list[int]], texts: list[list[int]], make: Any
) -> None:
    """Else a static tree would do."""
    _, parent_BN = grow_tree(observed(make, model, prompts, texts), SHAPES["12 nodes"])
    assert len(parent_BN.unique(dim=0)) > len(prompts) // 2


def test_a_child_as_confident_as_its_parent_does_not_stand_alone() -> None:
    """A drafter that is certain gives a chain of equal confidences, of which any number is kept from the front."""

    class Certain:
        def open_tree(self) -> "Certain":
            return self

        def first(self, count: int) -> tuple[Tensor, Tensor]:
            return torch.tensor([[[7, 8]]]), torch.tensor([[[0.0, -torch.inf]]])

        def deeper(self, parent_BQ: Tensor, token_BQ: Tensor, count: int) -> tuple[Tensor, Tensor]:
            token_B1R, log_q_B1R = self.first(count)
            return token_B1R.expand(-1, 2, -1), log_q_B1R.expand(-1, 2, -1)

    drafter: Any = Certain()
    for nodes in range(1, 10):
        draft_BN, parent_BN = grow_tree(drafter, DynamicTree(nodes=nodes, levels=3, width=2))
        assert paths_of(draft_BN[0].tolist(), parent_BN[0].tolist())[0] == (7,)
        if nodes <= 3:
            assert (draft_BN.tolist(), parent_BN.tolist()) == ([[7] * nodes], [[ROOT, 0, 1][:nodes]])


@pytest.mark.parametrize(
    ("shape", "nodes", "depth"),
    [
        (DynamicTree(nodes=63, levels=4, width=10), 63, 4),
        (DynamicTree(nodes=63, levels=1, width=10), 10, 1),
        (DynamicTree(nodes=2, levels=4, width=10), 2, 2),
    ],
    ids=["usual", "all seen", "few"],
)
def test_sizes(shape: DynamicTree, nodes: int, depth: int) -> None:
    assert (shape.num_nodes, shape.depth) == (nodes, depth)


# ---- the loop --------------------------------------------------------------------------------------------


@shapes
@makers
@pytest.mark.parametrize("end", [[NO_END], [7, 11]], ids=["no end", "two end ids"])
def test_the_text_is_that_of_plain_decoding(
    model: Any, target: HFTarget, prompts: list[list[int]], make: Any, shape: DynamicTree, end: list[int]
) -> None:
    options = DecodeOptions(max_new_tokens=17, end_ids=end)
    answers = decode_tree(target, make(model), prompts, shape, options)
    assert tokens_of(answers) == tokens_of(decode(target, None, prompts, 0, options))
    assert all(count <= shape.depth for answer in answers for count in answer.accepted)


def test_each_round_accepts_the_longest_right_path_of_its_tree(
    model: Any, target: HFTarget, prompts: list[list[int]], texts: list[list[int]]
) -> None:
    """Counts of the loop against trees grown by hand from the text itself, round by round."""
    shape = SHAPES["12 nodes"]
    options = DecodeOptions(max_new_tokens=17, end_ids=[NO_END])
    answers = decode_tree(target, make_eagle3(model), prompts, shape, options)
    for answer, prompt, text in zip(answers, prompts, texts, strict=True):
        slot, expected = len(prompt) - 1, []
        while slot + 1 < len(prompt) + 16:
            drafter = observed(make_eagle3, model, [text[: slot + 1]], [text])
            paths = search_by_hand(log_probs_of(drafter), shape)
            ahead = text[slot + 2 :]
            expected.append(max((len(path) for path in paths if list(path) == ahead[: len(path)]), default=0))
            slot += expected[-1] + 1
        assert answer.accepted == expected
    assert len({count for answer in answers for count in answer.accepted}) > 2


def test_a_tree_of_one_child_each_accepts_what_the_chain_does(
    model: Any, target: HFTarget, prompts: list[list[int]]
) -> None:
    options = DecodeOptions(max_new_tokens=17, end_ids=[4, 7])
    shape = DynamicTree(nodes=3, levels=3, width=1)
    for make in (make_eagle3, make_medusa):
        assert decode_tree(target, make(model), prompts, shape, options) == decode(
            target, make(model), prompts, 3, options
        )


def test_sampled_texts_follow_the_targets_softmax(model: Any, target: HFTarget, prompts: list[list[int]]) -> None:
    first_V, pair_X = true_distributions(model, prompts[3])
    options = DecodeOptions(max_new_tokens=3, end_ids=[NO_END], temperature=TEMPERATURE, seed=11)
    shape = DynamicTree(nodes=6, levels=2, width=3)
    answers = decode_tree(target, make_eagle3(model), [prompts[3]] * 8000, shape, options)
    pairs = [one.tokens[1] * V + one.tokens[2] for one in answers]
    assert chi_square_p([one.tokens[0] for one in answers], first_V) > 1e-3
    assert chi_square_p(pairs, pair_X) > 1e-3
    assert chi_square_p(pairs, pair_X.view(V, V).T.flatten()) < 1e-6, "the test has power"
    assert any(count for one in answers for count in one.accepted)
