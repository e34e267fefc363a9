"""One optimiser step: micro batches, their gradients, and what a pack's forward pass gives."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from drafthead.data.batches import Pack
from drafthead.pipeline.cores import side_by_side
from drafthead.pipeline.heads.base import HeadBatch, HeadOutput, Objective
from drafthead.pipeline.launch import loss_scale
from drafthead.pipeline.recipe import TrainConfig
from drafthead.pipeline.train_inputs import Inputs
from drafthead.pipeline.train_log import Tally
from torch import Tensor, nn


def take_step(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    packs: Iterator[Pack],
    inputs: Inputs,
    total_slots: int,
    settings: TrainConfig,
    tally: Tally,
    threads: ThreadPoolExecutor | None,
) -> float:
    """Accumulate one optimiser step; returns the gradient norm before clipping."""
    micro_batches = list(itertools.islice(packs, settings.accumulation))
    if threads is not None:
        outputs = _gradients_in_threads(accelerator, model, micro_batches, inputs, total_slots, settings, threads)
        norm = accelerator.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    else:
        outputs, norm = [], 0.0
        for pack in micro_batches:
            with accelerator.accumulate(model):
                output = run_head(accelerator, model, pack, inputs, settings, settings.depth)
                accelerator.backward(output.loss / total_slots * loss_scale(accelerator))
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
            outputs.append(output)
    for output, pack in zip(outputs, micro_batches, strict=True):
        tally.add(output, len(pack.tokens_T))
    return float(norm) if norm is not None else float("nan")


def micro_batch_threads(accelerator: Accelerator, accumulation: int) -> ThreadPoolExecutor | None:
    """Threads that run the micro batches of a step at once; None where they cannot or gain nothing."""
    alone = accelerator.device.type == "cpu" and accelerator.distributed_type == DistributedType.NO
    return side_by_side(accumulation) if alone and accumulation > 1 else None


def _gradients_in_threads(
    accelerator: Accelerator,
    model: nn.Module,
    micro_batches: list[Pack],
    inputs: Inputs,
    total_slots: int,
    settings: TrainConfig,
    threads: ThreadPoolExecutor,
) -> list[HeadOutput]:
    """Run the micro batches side by side and add their gradients up in their order, so that runs repeat exactly."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def run_one(pack: Pack) -> tuple[HeadOutput, tuple[Tensor, ...]]:
        output = run_head(accelerator, model, pack, inputs, settings, settings.depth)
        return output, torch.autograd.grad(output.loss / total_slots, parameters)

    outputs, gradients = zip(*threads.map(run_one, micro_batches), strict=True)
    for parameter, first, *others in zip(parameters, *gradients, strict=True):
        for other in others:
            first.add_(other)
        parameter.grad = first
    return list(outputs)


def run_head(
    accelerator: Accelerator,
    model: nn.Module,
    pack: Pack,
    inputs: Inputs,
    settings: TrainConfig,
    depth: int,
) -> HeadOutput:
    """One forward pass of the head over a pack."""
    tensors = {name: value.to(accelerator.device) for name, value in vars(pack).items() if isinstance(value, Tensor)}
    batch = HeadBatch(**tensors, documents=pack.documents, opening=inputs.opening)
    objective = Objective(
        depth=depth,
        loss=settings.loss,
        step_weight=settings.step_weight,
        only_surviving=settings.only_surviving,
        context_weight=settings.context_weight if model.training else 0.0,
    )
    output: HeadOutput = model(batch, inputs.scored if model.training else inputs.frozen, objective)
    return output
