"""The loop of a training: steps, held-out walks, checkpoints; the same under every launch file."""

import contextlib
import sys
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from drafthead.data.batches import prefetch, supervised_slots
from drafthead.pipeline.checkpoint import save_checkpoint
from drafthead.pipeline.heldout import flat_walk, heldout_walk, render_walk
from drafthead.pipeline.optim import learning_rates
from drafthead.pipeline.progress import progress
from drafthead.pipeline.recipe import Recipe
from drafthead.pipeline.train_inputs import Inputs
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
) -> None:
    settings = recipe.train
    rank, ranks = accelerator.process_index, accelerator.num_processes
    slots = [supervised_slots(row) for row in inputs.rows]
    todo = steps[state["step"] :]
    own = [[inputs.rows[row] for row in pack] for step in todo for pack in step[rank::ranks]]
    packs = prefetch(own, inputs.store)
    lengths = [len(row.input_ids) for row in inputs.rows]
    threads = micro_batch_threads(accelerator, settings.accumulation)
    tally = Tally()
    model.train()
    shown = accelerator.is_main_process
    with progress(len(steps), "train", "step", state["step"]) if shown else contextlib.nullcontext() as bar:
        for number, step in enumerate(todo, start=state["step"]):
            total_slots = sum(slots[row] for pack in step for row in pack)
            rate, *_ = rates = learning_rates(number, len(steps), recipe)
            for group, group_rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = group_rate
            norm = take_step(accelerator, model, optimizer, packs, inputs, total_slots, settings, tally, threads)
            state["tokens"] += sum(lengths[row] for pack in step for row in pack)
            done = number + 1
            if bar is not None:
                bar.update()
            if done % settings.log_every == 0 or done == len(steps):
                values = {**tally.metrics(), "learning_rate": rate, "grad_norm": norm, "tokens": state["tokens"]}
                sinks.write(done, values, "train")
                tally = Tally()
                if bar is not None:
                    bar.set_postfix(loss=f"{values['loss']:.3f}", tok_s=f"{values['tokens_per_s']:.0f}")
            if done % settings.evaluate_every == 0 and done < len(steps):
                found = heldout_walk(accelerator, model, inputs, recipe)
                sinks.write(done, flat_walk(found), "heldout")
                if bar is not None:
                    bar.write(f"step {done}: held-out walk {render_walk(found)}", file=sys.stderr)
                model.train()
                tally = Tally()
            if done % settings.checkpoint_every == 0 and done < len(steps):
                save_checkpoint(
                    accelerator,
                    folder / "checkpoints",
                    done,
                    {"tokens": state["tokens"]},
                    settings.keep_checkpoints,
                )
