"""Public verification of draft trees: checks and launch.

Shapes: B requests, N draft nodes, M = N + 1 rows (row 0 the root, row n + 1 node n), V target vocabulary, U draft
vocabulary. How `parent_BN` describes a tree: `structure.py`.
"""

import torch
from drafthead.kernels.backend import runs_triton
from drafthead.kernels.verify_sampling.inputs import Sampling, check_inputs
from drafthead.kernels.verify_tree import reference
from drafthead.kernels.verify_tree.structure import PADDING
from torch import Tensor

LOGITS = (torch.bfloat16, torch.float16, torch.float32)


def verify_tree_greedy(
    logits_BMV: Tensor, draft_BN: Tensor, parent_BN: Tensor, impl: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept the path from the root that the target would have written itself.

    Args:
        logits_BMV: Target logits after the root and after each node, of any strides: bf16, fp16 or fp32 (the reference
            takes float64 too). Rows behind a request's last node are not read.
        draft_BN: Token of each node, int32 or int64; of siblings with the same token the first counts.
        parent_BN: Parent of each node, int64.
        impl: See `backend.runs_triton`.

    Returns:
        accepted_B: Number of accepted nodes.
        output_BM: The tokens that this round yields: accepted ones, then the target's own; -1 behind.
        path_BN: The accepted nodes from the root on; -1 behind.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit.
    """
    _check(logits_BMV, draft_BN, parent_BN)
    if not runs_triton(impl, logits_BMV):
        return reference.verify_tree_greedy(logits_BMV, draft_BN, parent_BN)
    if logits_BMV.dtype not in LOGITS:
        raise ValueError(f"logits of {logits_BMV.dtype}: the kernel takes bf16, fp16 or fp32")
    # Triton takes half a second to import and does not exist everywhere
    from drafthead.kernels.verify_tree import launch

    if len(logits_BMV) == 0:
        return launch.empty_results(draft_BN)
    with torch.cuda.device_of(logits_BMV):
        return launch.walk_greedily(logits_BMV, draft_BN, parent_BN, _last_nodes(parent_BN))


def verify_tree_sampling(
    logits_BMV: Tensor,
    draft_BN: Tensor,
    parent_BN: Tensor,
    sampling: Sampling,
    draft_BMU: Tensor | None = None,
    target_ids_U: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept nodes so that the tokens are distributed as the target's own sampling.

    Multi-round speculative sampling (SpecInfer, Miao et al. 2023), without replacement among siblings. A request's
    tokens depend on its own inputs only, whatever else is in the batch; for a chain they are those of
    `verify_sampling`.

    Args:
        logits_BMV: As for `verify_tree_greedy`.
        draft_BN: Token of each node. Siblings are tried in their order. They were either drawn one after another
            without replacement, or chosen with certainty (the k most likely).
        parent_BN: Parent of each node, int64.
        sampling: Temperature, top-k, top-p, seed and position of each request.
        draft_BMU: Probabilities that the children of each row were drawn from, over the target vocabulary or, with
            `target_ids_U`, over the draft vocabulary; None for children chosen with certainty.
        target_ids_U: Target id of each draft vocabulary entry, all different; the others have q = 0.
        impl: See `backend.runs_triton`.

    Returns:
        As `verify_tree_greedy`.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit.
    """
    _check(logits_BMV, draft_BN, parent_BN)
    if draft_BMU is not None and draft_BMU.shape[:2] != logits_BMV.shape[:2]:
        raise ValueError(
            f"shapes do not fit: draft probabilities {tuple(draft_BMU.shape)} for logits {tuple(logits_BMV.shape)}; "
            f"wanted a row for the root and one for each node"
        )
    # the chain has no probabilities behind its last token, the tree has
    probs_BNU = None if draft_BMU is None else draft_BMU[:, 1:]
    num_draft_B = _last_nodes(parent_BN)
    check_inputs(logits_BMV, draft_BN, num_draft_B, sampling, probs_BNU, target_ids_U)
    if not runs_triton(impl, logits_BMV):
        return reference.verify_tree_sampling(logits_BMV, draft_BN, parent_BN, sampling, draft_BMU, target_ids_U)
    if logits_BMV.dtype not in LOGITS:
        raise ValueError(f"logits of {logits_BMV.dtype}: the kernel takes bf16, fp16 or fp32")
    from drafthead.kernels.verify_tree import launch

    if len(logits_BMV) == 0:
        return launch.empty_results(draft_BN)
    with torch.cuda.device_of(logits_BMV):
        return launch.walk_by_sampling(logits_BMV, draft_BN, parent_BN, num_draft_B, sampling, draft_BMU, target_ids_U)


def _check(logits_BMV: Tensor, draft_BN: Tensor, parent_BN: Tensor) -> None:
    shapes = f"logits {tuple(logits_BMV.shape)}, draft {tuple(draft_BN.shape)}, parents {tuple(parent_BN.shape)}"
    if logits_BMV.dim() != 3 or 0 in logits_BMV.shape[1:]:
        raise ValueError(f"shapes do not fit: {shapes}; wanted [B, N + 1, V], V at least 1")
    wanted = (len(logits_BMV), logits_BMV.shape[1] - 1)
    for name, ids in (("draft tokens", draft_BN), ("parents", parent_BN)):
        if ids.shape != wanted:
            raise ValueError(f"shapes do not fit: {shapes}; wanted [B, N + 1, V], [B, N], [B, N]")
        if ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} of {ids.dtype}: wanted int32 or int64")
        if ids.device != logits_BMV.device:
            raise ValueError(f"{name} on {ids.device}, logits on {logits_BMV.device}")


def _last_nodes(parent_BN: Tensor) -> Tensor:
    """How many nodes each request has, padding between them counted; what lies behind is not read."""
    count_N = torch.arange(1, parent_BN.shape[1] + 1, device=parent_BN.device)
    return torch.nn.functional.pad(count_N * (parent_BN != PADDING), (1, 0)).amax(-1)
