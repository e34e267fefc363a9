"""Whether the speculative loop computes what its model computes by itself (`LoopGate`).

The loop builds masks and keeps a cache of its own, and reads logits as lm_head(decoder): right for the families that it
was written for. A text that is wrong in the same way with and without drafts equals itself: equal texts prove nothing.
"""

from typing import Any

import torch
from drafthead.data.errors import GateError
from torch import Tensor

TOLERANCE = 3e-2
"""Largest |difference| / largest |logit|; bf16 and another shape of the batch make less."""


def own_logits(model: Any, ids: list[int]) -> Tensor:
    """What the model itself gives behind a prompt: [V]."""
    with torch.inference_mode():
        logits: Tensor = model(
            input_ids=torch.tensor([ids], device=model.device), use_cache=False, logits_to_keep=1
        ).logits
    return logits[0, -1].float()


def check_logits(model: Any, loop_V: Tensor, own_V: Tensor) -> None:
    """Hold the loop's logits behind a prompt against the model's own.

    Raises:
        GateError: They differ.
    """
    difference = float((loop_V.float() - own_V).abs().max() / own_V.abs().max())
    if not difference <= TOLERANCE:
        raise GateError(
            "LoopGate",
            f"target {model.config.model_type}",
            f"behind a prompt the loop's logits differ by {difference:.3g} of their size from the model's own "
            f"(allowed: {TOLERANCE}): its attention or its logits are of a kind that this loop does not know; measure "
            f"with `drafthead serve-check`",
        )
