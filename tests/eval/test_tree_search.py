"""The search of a static tree against all trees, and the accuracies it is searched from against slot-by-slot counts.

Shapes: K draft steps, R ranks, V vocabulary.
"""

import itertools
from typing import Any

import pytest
import torch
from drafthead.data.errors import InputError
from drafthead.eval.hf_target import HFTarget
from drafthead.eval.protocols import TreeDrafter
from drafthead.eval.states import StateRecorder
from drafthead.eval.tree_accuracy import Text, measure_accuracy
from drafthead.eval.tree_search import TreeShape, search_tree
from drafthead.kernels.verify_tree.structure import ROOT
from torch import Tensor

from tests.eval.speculation import AUX, make_eagle3, make_medusa, pass_over


def paths(shape: TreeShape) -> list[tuple[int, ...]]:
    """Ranks from the root to each node."""
    found: list[tuple[int, ...]] = []
    for parent, rank in zip(shape.parents, shape.ranks, strict=True):
        found.append((*(() if parent == ROOT else found[parent]), rank))
    return found


def test_the_most_probable_paths_come_first() -> None:
    shape = search_tree(torch.tensor([[0.5, 0.3], [0.4, 0.1]]), nodes=5, depth=2)
    assert paths(shape) == [(0,), (1,), (0, 0), (1, 0), (0, 1)]
    assert shape.parents == (ROOT, ROOT, 0, 1, 0)
    assert shape.heads == (0, 0, 1, 1, 1)
    assert shape.expected_accept_length == pytest.approx(1 + 0.5 + 0.3 + 0.2 + 0.12 + 0.05)
    assert (shape.num_nodes, shape.depth) == (5, 2)


@pytest.mark.parametrize("seed", range(4))
def test_no_tree_of_that_size_expects_more(seed: int) -> None:
    accuracy_KR = torch.rand(3, 2, generator=torch.Generator().manual_seed(seed)) / 2
    everything = [path for length in (1, 2, 3) for path in itertools.product(range(2), repeat=length)]
    chance = {
        path: float(torch.stack([accuracy_KR[step, rank] for step, rank in enumerate(path)]).double().prod())
        for path in everything
    }
    for nodes in (1, 3, 6):
        trees = (set(tree) for tree in itertools.combinations(everything, nodes))
        best = max(
            sum(chance[path] for path in tree)
            for tree in trees
            if all(path[:-1] in tree for path in tree if len(path) > 1)
        )
        shape = search_tree(accuracy_KR, nodes=nodes, depth=3)
        assert shape.expected_accept_length == pytest.approx(1 + best)
        assert sum(chance[path] for path in paths(shape)) == pytest.approx(best)


def test_equal_probabilities_prefer_shallow_nodes_then_low_ranks() -> None:
    """0.5 * 0.5 ties with 0.25; and a search gives the same tree every time."""
    accuracy_KR = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.5, 0.0]])
    shape = search_tree(accuracy_KR, nodes=5, depth=2)
    assert paths(shape) == [(0,), (1,), (2,), (0, 0), (0, 1)]
    assert shape == search_tree(accuracy_KR, nodes=5, depth=2)


def test_defaults_give_63_nodes_of_depth_4_at_most() -> None:
    accuracy_KR = torch.tensor([[0.6**rank / 2 for rank in range(10)]] * 6)
    shape = search_tree(accuracy_KR)
    assert (shape.num_nodes, shape.depth) == (63, 4)
    assert search_tree(accuracy_KR[:2]).depth == 2, "never deeper than there are heads"


def test_tokens_that_were_never_right_are_left_out() -> None:
    accuracy_KR = torch.tensor([[0.5, 0.0], [0.0, 0.0]])
    assert paths(search_tree(accuracy_KR, nodes=63, depth=2)) == [(0,)]
    with pytest.raises(InputError, match=r"eval\.tree: no draft token was right"):
        search_tree(torch.zeros(3, 5))


# ---- accuracies ------------------------------------------------------------------------------------------


def count_slot_by_slot(model: Any, drafter: TreeDrafter, texts: list[Text], depth: int, num_ranks: int) -> Tensor:
    """Every slot by itself: a drafter that has seen nothing but the text up to there."""
    recorder = StateRecorder(model, AUX)
    hits_KR, slots_K = torch.zeros(depth, num_ranks), torch.zeros(depth)
    for text in texts:
        for slot in range(text.context_length - 1, len(text.ids) - 2):
            prefix = text.ids[: slot + 1]
            drafter.start([prefix], len(prefix) + depth)
            position_BQ = torch.arange(len(prefix))[None]
            next_BQ = torch.tensor([text.ids[1 : slot + 2]])
            drafter.observe(next_BQ, pass_over(recorder, prefix), position_BQ, torch.tensor([len(prefix)]))
            ahead = text.ids[slot + 2 : slot + 2 + depth]
            wanted_K = torch.tensor(ahead + [0] * (depth - len(ahead)))
            top_KR = drafter.rank_tokens(wanted_K[None], num_ranks)[0]
            hits_KR[: len(ahead)] += (top_KR == wanted_K[:, None])[: len(ahead)]
            slots_K[: len(ahead)] += 1
    return hits_KR / slots_K[:, None]


@pytest.mark.parametrize("make", [make_eagle3, make_medusa], ids=["eagle3", "medusa"])
def test_accuracies_equal_those_of_slot_by_slot_drafts(
    model: Any, target: HFTarget, prompts: list[list[int]], texts: list[list[int]], make: Any
) -> None:
    """Texts of different lengths in one batch, one of them too short to say anything."""
    cut = [
        Text(ids=text[: len(text) - 3 * number], context_length=len(prompt))
        for number, (text, prompt) in enumerate(zip(texts, prompts, strict=True))
    ]
    cut[5] = Text(ids=texts[5][: len(prompts[5]) + 1], context_length=len(prompts[5]))
    drafter = make(model)
    done: list[int] = []
    found_KR = measure_accuracy(target, drafter, [cut[:3], cut[3:]], 3, 4, on_progress=done.append)
    assert done == [3, 5]
    torch.testing.assert_close(found_KR.float(), count_slot_by_slot(model, drafter, cut, 3, 4))
    assert found_KR[0].sum() < 1, "tokens that the draft vocabulary lacks count as missed"
    assert found_KR.max() > 0


def test_fewer_draft_tokens_than_ranks_are_no_fault(
    model: Any, target: HFTarget, prompts: list[list[int]], texts: list[list[int]]
) -> None:
    batch = [Text(ids=text, context_length=len(prompt)) for text, prompt in zip(texts, prompts, strict=True)]
    assert measure_accuracy(target, make_eagle3(model), [batch], 2, 99).shape == (2, 10)


def test_texts_without_answers_are_refused(model: Any, target: HFTarget) -> None:
    with pytest.raises(InputError, match="no held-out text"):
        measure_accuracy(target, make_eagle3(model), [[Text(ids=[1, 2, 3], context_length=2)]], 2)
