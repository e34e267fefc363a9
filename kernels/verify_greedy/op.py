"""Public greedy verification; the reference serves every device until the Triton kernel exists."""

from drafthead.kernels.verify_greedy import reference
from torch import Tensor


def verify_greedy(logits_BQV: Tensor, draft_BK: Tensor, num_draft_B: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference.verify_greedy`.

    Raises:
        ValueError: Shapes do not fit together.
    """
    batch, queries, _ = logits_BQV.shape
    if draft_BK.shape != (batch, queries - 1) or num_draft_B.shape != (batch,):
        raise ValueError(
            f"shapes do not fit: logits {tuple(logits_BQV.shape)}, draft {tuple(draft_BK.shape)}, "
            f"lengths {tuple(num_draft_B.shape)}"
        )
    return reference.verify_greedy(logits_BQV, draft_BK, num_draft_B)
