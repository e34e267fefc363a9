"""The speculative loop with draft trees: all nodes in one target pass, the accepted path kept.

A round's accept length is that of a tree: it is not that of a chain, which is what vLLM serves.

Shapes: B requests, N draft nodes, M = N + 1 rows of a target pass (the newest token, then the nodes), Q tokens of a
round at most (the tree's depth + 1), V target vocabulary.
"""

import torch
from drafthead.eval.decode import Answer, DecodeOptions, OnProgress, Round, run_rounds
from drafthead.eval.protocols import TreeDrafter, TreeTarget
from drafthead.eval.tree_dynamic import DynamicTree, grow_tree
from drafthead.eval.tree_search import TreeShape
from drafthead.eval.typical import accept_typical
from drafthead.kernels.verify_tree.op import verify_tree_greedy, verify_tree_sampling
from drafthead.kernels.verify_tree.structure import tree_depth, tree_visibility
from torch import Tensor


def decode_tree(
    target: TreeTarget,
    drafter: TreeDrafter,
    prompts: list[list[int]],
    shape: TreeShape | DynamicTree,
    options: DecodeOptions,
    on_progress: OnProgress = lambda count: None,
) -> list[Answer]:
    """Generate answers with a tree of drafts a round; at temperature 0 they are those of plain decoding.

    Args:
        target: The target; its cache is started anew.
        drafter: Proposes the nodes' tokens.
        prompts: Token ids of each request.
        shape: The tree, the same in every round, or how one is grown in each.
        options: Length, end-of-turn ids, temperature.
        on_progress: Told how many requests finished, as they do.
    """

    def tree_round(token_B: Tensor, known_B: Tensor, seed_B: Tensor) -> Round:
        draft_BN, parent_BN = _draft(drafter, shape)
        visible_BMM = tree_visibility(parent_BN)
        result = target.step_tree(torch.cat([token_B[:, None], draft_BN], 1), known_B, visible_BMM)
        accepted_B, output_BM, path_BN = _verify(result.logits_BQV, draft_BN, parent_BN, options, seed_B, known_B + 1)
        # the root, then the path; behind it the root again, at positions that the next pass writes anew
        row_BQ = torch.nn.functional.pad(path_BN[:, : shape.depth] + 1, (1, 0))
        position_BQ = known_B[:, None] + torch.arange(shape.depth + 1, device=token_B.device)
        target.keep_path(row_BQ, position_BQ)
        return Round(
            drafted_B=tree_depth(visible_BMM).amax(-1),
            accepted_B=accepted_B,
            new_BQ=output_BM[:, : shape.depth + 1],
            states=result.states_at(row_BQ),
            position_BQ=position_BQ,
        )

    return run_rounds(target, drafter, tree_round, shape.depth, prompts, options, on_progress)


def _draft(drafter: TreeDrafter, shape: TreeShape | DynamicTree) -> tuple[Tensor, Tensor]:
    """Token and parent of each node."""
    if isinstance(shape, DynamicTree):
        return grow_tree(drafter, shape)
    draft_BN = drafter.draft_tree(shape)
    return draft_BN, shape.parent_N(draft_BN.device).expand_as(draft_BN)


def _verify(
    logits_BMV: Tensor,
    draft_BN: Tensor,
    parent_BN: Tensor,
    options: DecodeOptions,
    seed_B: Tensor,
    position_B: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Number of accepted nodes, new tokens and path; a drafter chooses siblings with certainty, so q is one-hot."""
    if options.temperature == 0:
        return verify_tree_greedy(logits_BMV, draft_BN, parent_BN)
    sampling = options.sampling(seed_B, position_B)
    if options.typical is not None:
        return accept_typical(logits_BMV, draft_BN, parent_BN, sampling, options.typical)
    return verify_tree_sampling(logits_BMV, draft_BN, parent_BN, sampling)
