"""A toy training worker: three AdamW steps on the same 16 rows, however many ranks and micro batches.

python -m toy_worker LAUNCH PRECISION ACCUMULATION OUT.pt        # started by test_launch.py
"""

import sys
from typing import Any

import torch
from drafthead.pipeline.launch import full_weights, loss_scale, make_accelerator
from torch import Tensor, nn

ROWS = 16
LEARNING_RATES = (1e-2, 3e-2, 2e-2)
MAX_GRAD_NORM = 0.5


class SquaredError(nn.Module):
    """A sum over supervised positions, as the losses of heads are; the mask differs from row to row."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, input_BTD: Tensor, target_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        error_BTD = self.layers(input_BTD).float() - target_BTD
        return (error_BTD.square().sum(-1) * mask_BT).sum()


def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    input_BTD = torch.randn(ROWS, 5, 8, generator=generator)
    target_BTD = torch.randn(ROWS, 5, 4, generator=generator)
    # later rows are supervised less, so that a mean of means is not the mean
    share_B1 = torch.linspace(0.9, 0.1, ROWS)[:, None]
    return input_BTD, target_BTD, (torch.rand(ROWS, 5, generator=generator) < share_B1).float()


def main(launch: str, precision: Any, accumulation: int, out: str) -> None:
    accelerator = make_accelerator(launch, precision=precision, accumulation=accumulation, max_grad_norm=MAX_GRAD_NORM)
    torch.manual_seed(0)
    model = SquaredError()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95))
    model, optimizer = accelerator.prepare(model, optimizer)
    norms = []
    rows = ROWS // (accelerator.num_processes * accumulation)
    for step, learning_rate in enumerate(LEARNING_RATES):
        tensors = batch(step)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        for micro in range(accumulation):
            start = (micro * accelerator.num_processes + accelerator.process_index) * rows
            with accelerator.accumulate(model):
                loss = model(*(tensor[start : start + rows].to(accelerator.device) for tensor in tensors))
                accelerator.backward(loss / tensors[2].sum() * loss_scale(accelerator))
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)))
                optimizer.step()
                optimizer.zero_grad()
    weights = full_weights(accelerator, model)
    if accelerator.is_main_process:
        found = {"weights": weights, "norms": norms, "num_processes": accelerator.num_processes}
        torch.save({**found, "kind": accelerator.distributed_type.value}, out)
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
