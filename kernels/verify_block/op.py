"""Public block verification: checks and launch.

Shapes: B requests, K draft steps, Q = K + 1 queries, V target vocabulary, U draft vocabulary, S tiles of V.
"""

from typing import Any

import torch
from drafthead.kernels.backend import runs_triton
from drafthead.kernels.verify_block import reference
from drafthead.kernels.verify_sampling.inputs import Sampling, check_inputs, empty_outputs
from torch import Tensor


def verify_block(
    logits_BQV: Tensor,
    draft_BK: Tensor,
    num_draft_B: Tensor,
    sampling: Sampling,
    draft_BKU: Tensor | None = None,
    target_ids_U: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept draft tokens by their joint probability; the output is distributed as by `verify_sampling`.

    In expectation it accepts at least as many (Sun et al. 2024, "Block verification accelerates speculative decoding";
    vLLM's v1/worker/gpu/spec_decode/rejection_sampler_utils.py). The rule stands in `reference`.

    Args:
        logits_BQV: As for `verify_sampling`, like the other arguments.
        draft_BK: Draft token ids.
        num_draft_B: How many draft tokens each request has.
        sampling: Temperature, top-k, top-p, seed and position of each request.
        draft_BKU: Probabilities that the draft tokens were sampled from; None for greedy drafts.
        target_ids_U: Target id of each draft vocabulary entry.
        impl: See `backend.runs_triton`.

    Returns:
        accepted_B (int64), output_BQ (int64, -1 behind the tokens of this round), accepted_BK (bool).

    Raises:
        ValueError: Shapes, dtypes or devices do not fit.
    """
    check_inputs(logits_BQV, draft_BK, num_draft_B, sampling, draft_BKU, target_ids_U)
    if not runs_triton(impl, logits_BQV):
        return reference.verify_block(logits_BQV, draft_BK, num_draft_B, sampling, draft_BKU, target_ids_U)
    if len(logits_BQV) == 0:
        return empty_outputs(draft_BK)
    with torch.cuda.device_of(logits_BQV):
        return _launch(logits_BQV, draft_BK, num_draft_B, sampling, draft_BKU, target_ids_U)


def _launch(
    logits_BQV: Tensor,
    draft_BK: Tensor,
    num_draft_B: Tensor,
    sampling: Sampling,
    draft_BKU: Tensor | None,
    target_ids_U: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    import triton
    from drafthead.kernels.verify_block import kernel
    from drafthead.kernels.verify_sampling import launch

    prepared = launch.prepare(logits_BQV, draft_BK, num_draft_B, sampling, draft_BKU, target_ids_U)
    batch, queries, vocab = logits_BQV.shape
    block = launch.block_of(vocab, kernel.RACE_BLOCK)
    # one-hot drafts leave R_i in closed form
    tiles = 1 if draft_BKU is None else -(-vocab // block)
    joint_BQ = torch.empty(batch, queries, device=logits_BQV.device)
    left_BKS = torch.empty(batch, queries - 1, tiles, device=logits_BQV.device)
    found: dict[str, Any] = {"joint_ptr": joint_BQ, "left_ptr": left_BKS}
    kernel.chain[(batch,)](**prepared.arguments, **found, **prepared.constants, num_warps=1)
    found["left_tiles"] = tiles
    if draft_BKU is not None and queries > 1:
        grid = (batch * (queries - 1) * tiles,)
        kernel.leftover[grid](
            **prepared.arguments, **found, **prepared.constants, BLOCK=block, num_warps=kernel.LEFTOVER_WARPS
        )
    return launch.accept_and_race(kernel.sample_block, prepared, **found, LEFT_TILES=triton.next_power_of_2(tiles))
