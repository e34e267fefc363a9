"""One optimiser step: micro batches, their gradients, and what a pack's forward pass gives."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from drafthead.data.batches import Pack
from drafthead.pipeline.cores import side_by_side
from drafthead.pipeline.heads.base import HeadBatch, HeadOutput, Objective
from drafthead.pipeline.launch import loss_scale
from drafthead.pipeline.recipe import TrainConfig
from drafthead.pipeline.throughput import StepClock
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
) -> float | None:
    """Accumulate one optimiser step; returns the gradient norm before clipping, None where the engine keeps it."""
    clock = tally.clock
    begun = clock.now()
    micro_batches = list(itertools.islice(packs, settings.accumulation))
    begun = clock.add("data", begun)
    if threads is not None:
        outputs = _gradients_in_threads(
            accelerator, model, micro_batches, inputs, total_slots, settings, clock, threads
        )
        begun = clock.now()
        norm = accelerator.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        clock.add("optimizer", begun)
    else:
        outputs, norm = [], 0.0
        for pack in micro_batches:
            with accelerator.accumulate(model):
                output = run_head(accelerator, model, pack, inputs, settings, settings.depth)
                begun = clock.add("forward", begun)
                accelerator.backward(output.loss / total_slots * loss_scale(accelerator))
                begun = clock.add("backward", begun)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
                begun = clock.add("optimizer", begun)
            outputs.append(output)
    for output in outputs:
        tally.add(output)
    return None if norm is None else float(norm)


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
    clock: StepClock,
    threads: ThreadPoolExecutor,
) -> list[HeadOutput]:
    """Run the micro batches side by side and add their gradients up in their order, so that runs repeat exactly."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def run_one(pack: Pack) -> tuple[HeadOutput, tuple[Tensor, ...]]:
        begun = clock.now()
        output = run_head(accelerator, model, pack, inputs, settings, settings.depth)
        begun = clock.add("forward", begun)
        gradients = torch.autograd.grad(output.loss / total_slots, parameters)
        clock.add("backward", begun)
        return output, gradients

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
    """One forward pass of the head over a pack; one without a supervised slot gives zeros, and zero gradients.

    A rank must not stay away from the gradients' reduction, or the others would wait for it.
    """
    counts = has_slots(pack)
    if not counts:
        pack = replace(pack, supervised_T=torch.ones_like(pack.supervised_T))
    tensors = {name: value.to(accelerator.device) for name, value in vars(pack).items() if isinstance(value, Tensor)}
    batch = HeadBatch(**tensors, documents=pack.documents, opening=inputs.opening)
    objective = Objective(
        depth=depth,
        loss=settings.loss,
        step_weight=settings.step_weight,
        chains=settings.chains if model.training else "surviving",
        context_weight=settings.context_weight if model.training else 0.0,
    )
    output: HeadOutput = model(batch, inputs.scored(pack) if model.training else inputs.frozen, objective)
    return output if counts else without_slots(output)


def has_slots(pack: Pack) -> bool:
    """Whether any slot predicts a supervised token."""
    return bool((pack.supervised_T & (pack.position_T >= 2)).any())


def without_slots(output: HeadOutput) -> HeadOutput:
    """Nothing of these rows counts."""
    sums = {name: torch.zeros_like(value) for name, value in vars(output).items() if name != "loss"}
    return HeadOutput(loss=output.loss * 0.0, **sums)
