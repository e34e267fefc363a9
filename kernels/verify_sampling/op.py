"""Public speculative sampling; the reference serves every device until the Triton kernel exists."""

import torch
from drafthead.kernels.verify_sampling import reference
from torch import Tensor


def verify_sampling(
    target_BQV: Tensor,
    draft_BK: Tensor,
    draft_BKV: Tensor | None,
    num_draft_B: Tensor,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """See `reference.verify_sampling`.

    Raises:
        ValueError: Shapes do not fit together.
    """
    batch, queries, vocab = target_BQV.shape
    fits = draft_BK.shape == (batch, queries - 1) and num_draft_B.shape == (batch,)
    if draft_BKV is not None:
        fits = fits and draft_BKV.shape == (batch, queries - 1, vocab)
    if not fits:
        raise ValueError(
            f"shapes do not fit: target {tuple(target_BQV.shape)}, draft {tuple(draft_BK.shape)}, "
            f"q {None if draft_BKV is None else tuple(draft_BKV.shape)}, lengths {tuple(num_draft_B.shape)}"
        )
    return reference.verify_sampling(target_BQV, draft_BK, draft_BKV, num_draft_B, generator)
