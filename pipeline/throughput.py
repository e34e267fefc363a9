"""How fast a training is, and where the time of its steps goes.

What it costs: a few clock readings a step, and a Python call for every linear layer that runs.
"""

import os
import time
from typing import Any

import torch
from torch import Tensor, nn

PARTS = ("data", "forward", "backward", "optimizer")
PEAK_BF16_FLOPS = (
    ("B200", 2250e12),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("RTX 4090", 165e12),
)
"""Dense products a second by the vendor's data sheet; the first part of a device's name that fits."""


class StepClock:
    """Time of each part of a step; on CUDA by events, read when the step has been waited for anyway.

    Attributes:
        lanes: Micro batches that run at once, whose times overlap.
    """

    def __init__(self, device: torch.device | None = None, lanes: int = 1):
        self.on_cuda = device is not None and device.type == "cuda"
        self.lanes = lanes
        self.spans: list[tuple[str, Any, Any]] = []

    def now(self) -> Any:
        """The present, for `add`."""
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, part: str, start: Any) -> Any:
        """Count the time since `start` for a part; returns the present. Several threads may."""
        end = self.now()
        self.spans.append((part, start, end))
        return end

    def seconds(self) -> dict[str, float]:
        """Of each part, since the clock was made; on CUDA all work must have been waited for."""
        totals = dict.fromkeys(PARTS, 0.0)
        for part, start, end in self.spans:
            totals[part] += start.elapsed_time(end) / 1e3 if self.on_cuda else end - start
        return {part: total / (self.lanes if part in PARTS[1:3] else 1) for part, total in totals.items()}


def lanes_of(accumulation: int, *, threads: bool) -> int:
    """How many micro batches run at once; see `cores.side_by_side`."""
    return max(1, min(accumulation, len(os.sched_getaffinity(0)))) if threads else 1


class FlopCounter:
    """Counts the multiplications and additions of a module's linear layers while it trains, backward pass included.

    Attention, norms and the loss are not among them; for the loss see `loss_flops`.
    """

    def __init__(self, model: nn.Module):
        self.counts: list[int] = []
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(self._count)

    def _count(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(module, nn.Linear)
        if torch.is_grad_enabled():
            products = 3 if module.weight.requires_grad else 2  # the output, the input's gradient, the weight's
            self.counts.append(2 * products * inputs[0].numel() * module.out_features)

    def take(self) -> int:
        """The count since the last time."""
        counts, self.counts = self.counts, []
        return sum(counts)


def loss_flops(rows_K: list[float], lm_head: int, *, trained: bool) -> int:
    """Of the logits of target and head by an lm_head of so many weights, and of the head's gradients."""
    if not rows_K:
        return 0
    products = 3 if trained else 2
    return int(2 * lm_head * (rows_K[0] + products * sum(rows_K)))


def peak_flops(device: torch.device, precision: str) -> float | None:
    """What the device could do at most in the products' type; None where that is not known, as for every CPU."""
    if device.type != "cuda" or precision != "bf16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_BF16_FLOPS if part in name), None)
