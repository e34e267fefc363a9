"""How often each of a drafter's most likely tokens is the right one: what a static tree is searched from.

Counted over the full vocabulary at every slot of a text's answer, whether serving would start a round there or not: a
token that the draft vocabulary lacks is right for no rank. Each draft step stands by itself, given that the tokens
before it are the text's: for Medusa, whose heads do not see each other's tokens, these are the paper's marginal
accuracies; for a recursive head they are conditional on a path that is right so far, which is what a product along a
path wants.

Shapes: B texts, Q slots of a pass, K draft steps, R ranks.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from drafthead.data.errors import InputError
from drafthead.eval.protocols import TargetModel, TreeDrafter
from torch import Tensor

NUM_RANKS = 10
"""Tokens of a step that a tree may use, as in Medusa's own search."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """A prompt and the answer that the target wrote to it."""

    ids: list[int]
    context_length: int
    """Tokens of the prompt."""


def measure_accuracy(
    target: TargetModel,
    drafter: TreeDrafter,
    batches: Iterable[list[Text]],
    depth: int,
    num_ranks: int = NUM_RANKS,
    on_progress: Callable[[int], None] = lambda count: None,
) -> Tensor:
    """Share of slots where the token of rank r of draft step j is the text's.

    Args:
        target: Gives the states; its cache is started anew for each batch.
        drafter: Whose tokens are ranked.
        batches: Texts that are run together.
        depth: Draft steps to rank.
        num_ranks: Ranks to count, fewer if the draft vocabulary is smaller.
        on_progress: Told how many texts are done, batch by batch.

    Returns:
        accuracy_KR, float64, on the CPU.

    Raises:
        InputError: No text has an answer of two tokens.
    """
    hits: Tensor | None = None
    slots_K = torch.zeros(depth, dtype=torch.long)
    for texts in batches:
        for hit_BKR, counted_BK in _ranked_slots(target, drafter, texts, depth, num_ranks):
            summed_KR = hit_BKR.sum(0).cpu()
            hits = summed_KR if hits is None else hits + summed_KR
            slots_K += counted_BK.sum(0).cpu()
        on_progress(len(texts))
    if hits is None or slots_K[0] == 0:
        raise InputError("eval.tree: no held-out text with an answer of two tokens or more to measure accuracies on")
    return hits.double() / slots_K.clamp_min(1)[:, None]


def _ranked_slots(
    target: TargetModel, drafter: TreeDrafter, texts: list[Text], depth: int, num_ranks: int
) -> Iterable[tuple[Tensor, Tensor]]:
    """For one slot of every text at a time: hits [B, K, R], and which steps [B, K] have a token to predict.

    From the last slot back to the first: what a drafter caches of draft steps lies behind the slot that they start
    from, where no earlier slot looks.
    """
    width = max(len(text.ids) for text in texts)
    states = target.start([text.ids for text in texts], width)
    device = states.last_BQD.device
    padded = [text.ids + [0] * (width + depth + 1 - len(text.ids)) for text in texts]
    tokens_BQ = torch.tensor(padded, device=device)
    length_B = torch.tensor([len(text.ids) for text in texts], device=device)
    first_B = torch.tensor([text.context_length - 1 for text in texts], device=device)
    position_BQ = torch.arange(width, device=device).expand(len(texts), -1)
    drafter.start([text.ids for text in texts], width + depth)
    drafter.observe(tokens_BQ[:, 1 : width + 1], states, position_BQ, length_B - 1)
    step_K = torch.arange(depth, device=device)
    # slot i drafts tokens i + 2 and on, so the last one with something to predict is the third from the end
    for back in range(int((length_B - 2 - first_B).max())):
        slot_B1 = (length_B - 3 - back)[:, None]
        live_B1 = slot_B1 >= first_B[:, None]
        slot_B1 = torch.maximum(slot_B1, first_B[:, None])
        drafter.observe(tokens_BQ.gather(1, slot_B1 + 1), states.states_at(slot_B1), slot_B1, torch.ones_like(length_B))
        wanted_BK = tokens_BQ.gather(1, slot_B1 + 2 + step_K)
        counted_BK = live_B1 & (slot_B1 + 2 + step_K < length_B[:, None])
        top_BKR = drafter.rank_tokens(wanted_BK, num_ranks)
        yield (top_BKR == wanted_BK[..., None]) & counted_BK[..., None], counted_BK
