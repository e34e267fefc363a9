"""The loop of a training: steps, held-out walks, checkpoints; the same under every launch file."""

import contextlib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from drafthead.data.batches import load_ahead, supervised_slots
from drafthead.data.errors import InputError
from drafthead.pipeline.checkpoint import BestHead, save_checkpoint
from drafthead.pipeline.heldout import flat_walk, heldout_walk, render_walk
from drafthead.pipeline.optim import learning_rates
from drafthead.pipeline.progress import progress
from drafthead.pipeline.recipe import Recipe
from drafthead.pipeline.throughput import FlopCounter, StepClock, lanes_of, loss_flops, peak_flops
from drafthead.pipeline.train_inputs import Inputs, loader_of
from drafthead.pipeline.train_log import Sinks, Tally
from drafthead.pipeline.train_step import micro_batch_threads, take_step
from torch import nn


def train_steps(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    inputs: Inputs,
    steps: list[list[list[int]]],
    state: dict[str, Any],
    recipe: Recipe,
    folder: Path,
    sinks: Sinks,
    best: BestHead | None,
) -> None:
    """Take the steps that `state` has not seen yet; `best` keeps the head with the longest walk on the way."""
    settings = recipe.train
    rank, ranks = accelerator.process_index, accelerator.num_processes
    slots = [supervised_slots(row) for row in inputs.rows]
    lengths = [len(row.input_ids) for row in inputs.rows]
    todo = steps[state["step"] :]
    own = [[inputs.rows[row] for row in pack] for step in todo for pack in step[rank::ranks]]
    packs = load_ahead(own, loader_of(inputs.store))
    threads = micro_batch_threads(accelerator, settings.accumulation)
    lanes = lanes_of(settings.accumulation, threads=threads is not None)
    measure = speedometer(accelerator, model, inputs, recipe)
    tally = Tally(StepClock(accelerator.device, lanes))
    model.train()
    shown = accelerator.is_main_process
    with progress(len(steps), "train", "step", state["step"]) if shown else contextlib.nullcontext() as bar:
        for number, step in enumerate(todo, start=state["step"]):
            total_slots = max(1, sum(slots[row] for pack in step for row in pack))
            rate, *_ = rates = learning_rates(number, len(steps), recipe)
            for group, group_rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = group_rate
            norm = take_step(accelerator, model, optimizer, packs, inputs, total_slots, settings, tally, threads)
            check_finite(number + 1, tally.loss, norm)
            tokens = sum(lengths[row] for pack in step for row in pack)
            tally.count_step(tokens)
            state["tokens"] += tokens
            done = number + 1
            if bar is not None:
                bar.update()
            if done % settings.log_every == 0 or done == len(steps):
                values = {**measure(tally), "learning_rate": rate, "grad_norm": norm, "tokens": state["tokens"]}
                sinks.write(done, values, "train")
                tally = Tally(StepClock(accelerator.device, lanes))
                if bar is not None:
                    bar.set_postfix(loss=f"{values['loss']:.3f}", tok_s=f"{values['tokens_per_s']:.0f}")
            if done % settings.evaluate_every == 0 and done < len(steps):
                found = heldout_walk(accelerator, model, inputs, recipe)
                sinks.write(done, flat_walk(found), "heldout")
                if bar is not None:
                    bar.write(f"step {done}: held-out walk {render_walk(found)}", file=sys.stderr)
                if best is not None:
                    best.offer(accelerator, model, done, found)
                model.train()
                tally = Tally(StepClock(accelerator.device, lanes))
            if done % settings.checkpoint_every == 0 and done < len(steps):
                save_checkpoint(
                    accelerator,
                    folder / "checkpoints",
                    done,
                    {"tokens": state["tokens"]},
                    settings.keep_checkpoints,
                )


def check_finite(step: int, loss: float, norm: float | None) -> None:
    """Stop at the first step that learns from no number: it makes all weights NaN, and no later one mends them.

    Raises:
        InputError: Naming the step.
    """
    if not math.isfinite(loss) or (norm is not None and not math.isfinite(norm)):
        raise InputError(
            f"train: step {step:,}: the loss is {loss:.4g}, the gradient's norm {norm}: nothing can be learned now, "
            f"the checkpoints before it are whole; lower train.learning_rate, or see whether the states are sound "
            f"(`drafthead store verify`)"
        )


def speedometer(
    accelerator: Accelerator, model: nn.Module, inputs: Inputs, recipe: Recipe
) -> Callable[[Tally], dict[str, float]]:
    """Give a function that says what a tally has counted; with the share of the device's peak where that is known."""
    counter = FlopCounter(accelerator.unwrap_model(model))
    peak = peak_flops(accelerator.device, recipe.train.precision)
    lm_head = inputs.scored_tokens * inputs.frozen.lm_head_UD.shape[1]

    def measure(tally: Tally) -> dict[str, float]:
        loss = loss_flops(tally.run, lm_head, trained=recipe.head.train_lm_head)
        values = tally.metrics(counter.take() + loss)
        return values if peak is None else {**values, "mfu": values["tflops"] * 1e12 / peak}

    return measure
