"""Public speculative sampling: checks and launch.

Shapes: B requests, K draft steps, Q = K + 1 queries, V target vocabulary, U draft vocabulary.
"""

import torch
from drafthead.kernels.backend import runs_triton
from drafthead.kernels.verify_sampling import reference
from drafthead.kernels.verify_sampling.inputs import Sampling, check_inputs, empty_outputs
from torch import Tensor


def verify_sampling(
    logits_BQV: Tensor,
    draft_BK: Tensor,
    num_draft_B: Tensor,
    sampling: Sampling,
    draft_BKU: Tensor | None = None,
    target_ids_U: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept draft token x with probability min(1, p(x) / q(x)); at the first rejection sample from (p - q)+.

    The tokens are distributed as p, the target's own sampling (Leviathan et al. 2023, Chen et al. 2023). A request's
    tokens depend on its own inputs only, whatever else is in the batch.

    Args:
        logits_BQV: Target logits after the last known token and after each draft token, of any strides: bf16, fp16 or
            fp32 (the reference takes float64 too). Queries behind a request's last draft token + 1 are not read.
        draft_BK: Draft token ids, int32 or int64; an id outside the vocabulary is never accepted.
        num_draft_B: How many draft tokens each request has, 0 to K (taken as the nearer bound outside).
        sampling: Temperature, top-k, top-p, seed and position of each request.
        draft_BKU: Probabilities that the draft tokens were sampled from, over the target vocabulary or, with
            `target_ids_U`, over the draft vocabulary; None for greedy drafts, which q gives with certainty.
        target_ids_U: Target id of each draft vocabulary entry, all different; the others have q = 0.
        impl: See `backend.runs_triton`.

    Returns:
        accepted_B (int64), output_BQ (int64, -1 behind the tokens of this round), accepted_BK (bool).

    Raises:
        ValueError: Shapes, dtypes or devices do not fit.
    """
    check_inputs(logits_BQV, draft_BK, num_draft_B, sampling, draft_BKU, target_ids_U)
    if not runs_triton(impl, logits_BQV):
        return reference.verify_sampling(logits_BQV, draft_BK, num_draft_B, sampling, draft_BKU, target_ids_U)
    from drafthead.kernels.verify_sampling import kernel, launch

    if len(logits_BQV) == 0:
        return empty_outputs(draft_BK)
    with torch.cuda.device_of(logits_BQV):
        prepared = launch.prepare(logits_BQV, draft_BK, num_draft_B, sampling, draft_BKU, target_ids_U)
        return launch.accept_and_race(kernel.sample, prepared)
