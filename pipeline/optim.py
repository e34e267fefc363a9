"""The optimiser and its schedule: AdamW, linear warm-up, cosine to zero."""

import math
from collections.abc import Sequence

import torch
from drafthead.pipeline.recipe import Recipe, TrainConfig, lora_of
from torch import nn


def build_optimizer(
    head: nn.Module, settings: TrainConfig, adapters: Sequence[nn.Parameter] = ()
) -> torch.optim.Optimizer:
    """AdamW over the parameters that train, those of the target's adapters in a group of their own; fp32 moments."""
    parameters = [parameter for parameter in head.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        [{"params": group} for group in (parameters, list(adapters)) if group],
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


def learning_rates(step: int, total: int, recipe: Recipe) -> list[float]:
    """Rate of each parameter group of `build_optimizer`: the head's, and that of the target's adapters."""
    rate = learning_rate(step, total, recipe.train)
    lora = lora_of(recipe.head)
    return [rate] if lora is None else [rate, rate * lora.learning_rate / recipe.train.learning_rate]
