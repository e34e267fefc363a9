"""The optimiser and its schedule: AdamW, linear warm-up, cosine to zero."""

import math

import torch
from drafthead.pipeline.recipe import TrainConfig
from torch import nn


def build_optimizer(head: nn.Module, settings: TrainConfig) -> torch.optim.Optimizer:
    """AdamW over the parameters that train; fp32 moments."""
    parameters = [parameter for parameter in head.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        parameters,
        lr=settings.learning_rate,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def learning_rate(step: int, total: int, settings: TrainConfig) -> float:
    """Rate of optimiser step `step` (0-based) of `total`: reaches its peak after the warm-up, and 0 at `total`."""
    warmup = max(1, round(settings.warmup_ratio * total))
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
