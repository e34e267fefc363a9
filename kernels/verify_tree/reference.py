"""Verification of a draft tree, the definition: walk from the root until no child is accepted.

A parent stands before its children, so one pass over the nodes in their order is the walk: a node counts when its
parent is where the walk stands.

Shapes: B requests, N draft nodes, M = N + 1 rows (root and nodes), V target vocabulary, U draft vocabulary.
"""

import torch
from drafthead.kernels import philox
from drafthead.kernels.verify_sampling.inputs import Sampling
from drafthead.kernels.verify_sampling.reference import draft_probs, of_tokens, target_probs
from torch import Tensor


def verify_tree_greedy(logits_BMV: Tensor, draft_BN: Tensor, parent_BN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Follow the child that is the target's argmax (the lowest id among equals, NaN above all) while there is one.

    See `op.verify_tree_greedy`.
    """
    own_BM = logits_BMV.argmax(-1)
    walk = Walk(draft_BN)
    for node in range(draft_BN.shape[1]):
        own_B = own_BM.gather(1, walk.row_B[:, None])[:, 0]
        walk.accept(node, (parent_BN[:, node] + 1 == walk.row_B) & (draft_BN[:, node] == own_B))
    return walk.finish(own_BM.gather(1, walk.row_B[:, None])[:, 0])


def verify_tree_sampling(
    logits_BMV: Tensor,
    draft_BN: Tensor,
    parent_BN: Tensor,
    sampling: Sampling,
    draft_BMU: Tensor | None = None,
    target_ids_U: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Try the children of a node in order: accept x with probability min(1, p(x) / q(x)), else p <- norm((p - q)+).

    With every rejected child q loses x and is normalised anew. See `op.verify_tree_sampling`.
    """
    batch, nodes = draft_BN.shape
    vocab = logits_BMV.shape[-1]
    seed_B, position_B = sampling.seed_B.long(), sampling.position_B.long()
    walk = Walk(draft_BN)
    p_BMV = target_probs(logits_BMV, sampling)
    q_BMV = None if draft_BMU is None else draft_probs(walk.path_BM, vocab, draft_BMU, target_ids_U)
    p_BV = p_BMV[:, 0]
    q_BV = torch.zeros_like(p_BV) if q_BMV is None else q_BMV[:, 0]
    tried_B = torch.zeros_like(walk.row_B)
    for node in range(nodes):
        child_B = parent_BN[:, node] + 1 == walk.row_B
        x_BV = draft_probs(draft_BN[:, node, None], vocab, None, None)[:, 0]
        if q_BMV is None:
            q_BV = x_BV
        p_of_x_B, q_of_x_B = (of_tokens(each_BV, draft_BN[:, node]) for each_BV in (p_BV, q_BV))
        # index 0 for the first child, as in a chain
        uniform_BC = philox.uniform(seed_B, position_B, walk.accepted_B, philox.ACCEPT, node + 1)
        taken_B = child_B & (uniform_BC.gather(1, tried_B[:, None])[:, 0] * q_of_x_B < p_of_x_B)
        # q gives no x that it has given before: such a node says nothing
        refused_B = child_B & ~taken_B & (q_of_x_B > 0)
        tried_B = torch.where(taken_B, 0, tried_B + child_B)
        p_BV = torch.where(refused_B[:, None], residual(p_BV, q_BV), p_BV)
        p_BV = torch.where(taken_B[:, None], p_BMV[:, node + 1], p_BV)
        if q_BMV is not None:
            q_BV = torch.where(refused_B[:, None], without(q_BV, x_BV), q_BV)
            q_BV = torch.where(taken_B[:, None], q_BMV[:, node + 1], q_BV)
        walk.accept(node, taken_B)
    # where rounding left nothing of the residual, the token comes from the target's own probabilities
    own_BV = p_BMV[torch.arange(batch, device=p_BMV.device), walk.row_B]
    weight_BV = torch.where((p_BV > 0).any(-1, keepdim=True), p_BV, own_BV)
    race_BV = philox.exponential(seed_B, position_B, walk.accepted_B, vocab)
    return walk.finish((weight_BV / race_BV).argmax(-1))


class Walk:
    """Where each request stands, and how it came there."""

    def __init__(self, draft_BN: Tensor):
        self.draft_BN = draft_BN.long()
        self.row_B = torch.zeros(len(draft_BN), dtype=torch.long, device=draft_BN.device)
        self.accepted_B = self.row_B.clone()
        self.path_BM = torch.nn.functional.pad(torch.full_like(self.draft_BN, -1), (0, 1), value=-1)

    def accept(self, node: int, taken_B: Tensor) -> None:
        """Step on to this node where it was accepted."""
        place_B1 = self.accepted_B[:, None]
        value_B1 = torch.where(taken_B[:, None], node, self.path_BM.gather(1, place_B1))
        self.path_BM.scatter_(1, place_B1, value_B1)
        self.accepted_B = self.accepted_B + taken_B
        self.row_B = torch.where(taken_B, node + 1, self.row_B)

    def finish(self, token_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The three results of the ops, with the token that follows the path."""
        draft_BM = torch.nn.functional.pad(self.draft_BN, (0, 1), value=-1)
        output_BM = draft_BM.gather(1, self.path_BM.clamp_min(0)).masked_fill(self.path_BM < 0, -1)
        output_BM.scatter_(1, self.accepted_B[:, None], token_B[:, None])
        return self.accepted_B, output_BM, self.path_BM[:, :-1]


def residual(p_BV: Tensor, q_BV: Tensor) -> Tensor:
    """What p becomes when a token of q was refused: the part of it that q does not cover."""
    return _normalized((p_BV - q_BV).clamp_min(0))


def without(q_BV: Tensor, x_BV: Tensor) -> Tensor:
    """What the next sibling was drawn from: q without the token x, given as one-hot."""
    return _normalized(q_BV * (1 - x_BV))


def _normalized(weight_BV: Tensor) -> Tensor:
    total_B1 = weight_BV.sum(-1, keepdim=True)
    return weight_BV / torch.where(total_B1 > 0, total_B1, 1.0)
