"""Typical acceptance (Cai et al. 2024, Medusa, section 2.3.1): NOT lossless, the text is no longer the target's own.

A node is acceptable when the target finds its token likely enough, whatever the drafter thought of it:

    p(x) > min(epsilon, delta * exp(-H(p)))

with p the target's distribution behind the node's parent, temperature included, and H its entropy. The longest path of
acceptable nodes is kept, of equally long ones the most likely, and the token behind it is sampled from p. The lossless
rules are those of `kernels/verify_*`.

Shapes: B requests, N draft nodes, M = N + 1 rows (root and nodes), V target vocabulary.
"""

from dataclasses import dataclass

import torch
from drafthead.kernels.verify_sampling.inputs import Sampling
from drafthead.kernels.verify_sampling.op import verify_sampling
from drafthead.kernels.verify_sampling.reference import target_probs
from drafthead.kernels.verify_tree.structure import PADDING, tree_depth, tree_visibility
from torch import Tensor

NEEDS_SAMPLING = "eval.typical: typical acceptance is a rule for sampling; give a temperature above 0"


@dataclass(frozen=True, kw_only=True)
class Typical:
    """The two numbers of the rule, the paper's unless given."""

    epsilon: float = 0.09
    """Whatever is likelier than this is acceptable."""
    delta: float = 0.3
    """Share of exp(-entropy) that is enough where the target is unsure."""


def accept_typical(
    logits_BMV: Tensor, draft_BN: Tensor, parent_BN: Tensor, sampling: Sampling, rule: Typical
) -> tuple[Tensor, Tensor, Tensor]:
    """Keep the longest path of acceptable nodes.

    Args:
        logits_BMV: Target logits behind the root and each node.
        draft_BN: Token of each node, inside the vocabulary.
        parent_BN: Parent of each node (`verify_tree.structure`); a chain is -1, 0, 1, ...
        sampling: Temperature above 0; it may cut p by top-k and top-p.
        rule: The threshold.

    Returns:
        accepted_B, output_BM and path_BN, as of `verify_tree.op`.
    """
    batch, nodes = draft_BN.shape
    request_B1 = torch.arange(batch, device=draft_BN.device)[:, None]
    p_BMV = target_probs(logits_BMV, sampling)
    above_BN = (parent_BN + 1).clamp_min(0)
    p_BN = p_BMV[request_B1, above_BN, draft_BN]
    enough_BM = (rule.delta * torch.exp(-torch.special.entr(p_BMV).sum(-1))).clamp_max(rule.epsilon)
    fits_BN = (p_BN > enough_BM.gather(1, above_BN)) & (parent_BN != PADDING)

    visible_BMM = tree_visibility(parent_BN)
    fits_BM = torch.nn.functional.pad(fits_BN, (1, 0), value=True)
    reached_BM = fits_BM & ~(visible_BMM & ~fits_BM[:, None]).any(-1)
    length_BM = tree_depth(visible_BMM).masked_fill(~reached_BM, -1)
    accepted_B = length_BM.amax(-1)
    log_p_BM = torch.nn.functional.pad(p_BN.log(), (1, 0))
    path_log_p_BM = log_p_BM[:, None].expand_as(visible_BMM).masked_fill(~visible_BMM, 0).sum(-1)
    last_B = path_log_p_BM.masked_fill(length_BM < accepted_B[:, None], -torch.inf).argmax(-1)

    # nodes of the path first, in their order, which is the path's
    on_path_BN = visible_BMM[request_B1[:, 0], last_B, 1:]
    order_BN = (~on_path_BN).byte().argsort(dim=-1, stable=True)
    index_M = torch.arange(nodes + 1, device=draft_BN.device)
    path_BN = order_BN.where(index_M[:-1] < accepted_B[:, None], -1)
    token_B1 = _sample(logits_BMV[request_B1, last_B[:, None]], sampling)
    output_BM = torch.nn.functional.pad(draft_BN.long().gather(1, order_BN), (0, 1))
    output_BM = output_BM.where(index_M < accepted_B[:, None], -1)
    return accepted_B, output_BM.scatter(1, accepted_B[:, None], token_B1), path_BN


def _sample(logits_BQV: Tensor, sampling: Sampling) -> Tensor:
    """A token [B, 1] of the target's own: verification of no drafts."""
    draft_BK = torch.empty(len(logits_BQV), 0, dtype=torch.long, device=logits_BQV.device)
    _, token_B1, _ = verify_sampling(logits_BQV, draft_BK, torch.zeros_like(sampling.seed_B), sampling)
    return token_B1
