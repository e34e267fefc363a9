"""The target's logits behind stored last states: norm + lm_head, by way of the tensors on disk.

Independent of the head's code on purpose: gates hold states against it.

Shapes: D hidden, V vocabulary.
"""

import torch
from drafthead.pipeline.target import Target
from torch import Tensor

LOGIT_TOLERANCE = {"float32": 1e-3, "bfloat16": 3e-2, "float16": 5e-3}
"""Largest |difference| / largest |logit| by type; the half types round the stored state itself."""


class StateLogits:
    """A target's final norm and lm_head, fp32."""

    def __init__(self, target: Target, device: str = "cpu"):
        self.norm_D = target.final_norm_D.float().to(device)
        self.head_VD = target.lm_head_VD.float().to(device)
        self.eps = float(target.config.rms_norm_eps)

    def __call__(self, last: Tensor) -> Tensor:
        """Logits [..., V] for states before the final norm [..., D] on the same device."""
        wide = last.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * self.norm_D
        return normed @ self.head_VD.T
