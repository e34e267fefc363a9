"""Train a head on stored states: one loop, the same under every launch file.

    drafthead train runs/eagle3                                   # the stage; starts the workers
    python -m drafthead.pipeline.train runs/eagle3                # one worker

Notable: the loss of a step is a sum over all its supervised slots divided by their global count, so packing,
accumulation and ranks do not change it; what is watched on held-out answers is the walk (pipeline/heldout.py). Where
the target is trained too (Medusa-2), a `JointModel` takes the head's place, and the target that results is written
beside the head.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from drafthead.data.batches import plan_steps, supervised_slots
from drafthead.data.errors import InputError
from drafthead.data.files import write_atomically, write_json
from drafthead.pipeline.checkpoint import BestHead, load_newest, newest_state, resumed_accumulation
from drafthead.pipeline.cores import fastest_dtype
from drafthead.pipeline.export.folder import initial_digests
from drafthead.pipeline.heads.build import build_head, describe_head
from drafthead.pipeline.heads.warm_start import load_warm_start
from drafthead.pipeline.heldout import flat_walk, heldout_walk, render_walk
from drafthead.pipeline.joint import JointModel, head_weights
from drafthead.pipeline.launch import Precision, build_ops, full_weights, launch_command, make_accelerator, read_launch
from drafthead.pipeline.merged_target import compare_quality, quality_lines, write_merged
from drafthead.pipeline.optim import build_optimizer
from drafthead.pipeline.ranks import BAD_INPUT, forget_failures, say_once
from drafthead.pipeline.recipe import Recipe, lora_of
from drafthead.pipeline.run_dir import MERGED_TARGET, Run
from drafthead.pipeline.target import Target
from drafthead.pipeline.tracking import Tracker
from drafthead.pipeline.train_inputs import Inputs
from drafthead.pipeline.train_log import Sinks, TrainLog, unlearned
from drafthead.pipeline.train_loop import train_steps
from torch import Tensor, nn

PR_SET_PDEATHSIG = 1


def train(run: Run) -> dict[str, Any]:
    """The stage: start the workers and wait for their head."""
    launch = run.recipe.run.launch
    folder = run.folder("train")
    folder.mkdir(parents=True, exist_ok=True)
    forget_failures(folder)
    build_ops(launch)
    command, extra = launch_command(launch, "drafthead.pipeline.train", [str(run.path)])
    # a session of its own: Ctrl-C reaches this process alone, which says so once and ends the workers
    try:
        done = subprocess.run(command, env=_environment(extra), start_new_session=True, preexec_fn=end_with_parent)
    except KeyboardInterrupt:
        print(file=sys.stderr)  # the worker's bar ends in mid-line
        raise
    if forget_failures(folder) or (done.returncode == BAD_INPUT and launch == "single"):
        sys.exit(BAD_INPUT)  # a worker has said why, in the one line
    if done.returncode:
        raise InputError(
            f"{folder}: training stopped with exit code {done.returncode}; the reason is above, "
            f"the same command goes on from the last checkpoint"
        )
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def end_with_parent() -> None:
    """Ask Linux to kill this process when the one that started it dies, so that no orphan trains on beside its heir."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _environment(extra: dict[str, str]) -> dict[str, str]:
    # a W&B service of whoever started us would outlive a killed worker and hold its run
    inherited = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    return {**inherited, **extra}


def work(run: Run) -> None:
    """One worker: prepare, go on from the newest checkpoint, train, save the head."""
    folder = run.folder("train")
    folder.mkdir(parents=True, exist_ok=True)
    recipe = resolve_settings(run.recipe, newest_state(folder / "checkpoints"))
    settings = recipe.train
    accelerator = make_accelerator(
        recipe.run.launch,
        precision=resolve_precision(recipe),
        accumulation=settings.accumulation,
        max_grad_norm=settings.max_grad_norm,
    )
    inputs = Inputs.open(run)
    inputs.place(accelerator.device, settings.precision)
    layer_ids = inputs.store.info.layer_ids
    head = build_head(recipe.head, run.target, inputs.frozen, len(layer_ids), recipe.run.seed)
    head.calibrate(inputs.store.get(inputs.rows[0].key)[1], inputs.frozen)
    if settings.init_from is not None:
        load_warm_start(head, recipe, run.target, inputs.frozen)
    description = {
        **describe_head(head, layer_ids),
        "initial_digests": initial_digests(head.state_dict()),
        "trained_length": max(len(row.input_ids) for row in inputs.rows),
        "target_fingerprint": run.target.fingerprint,
    }
    lora = lora_of(recipe.head)
    joint = None if lora is None else JointModel(head, run.target, lora, recipe.run.seed)
    lengths = [len(row.input_ids) for row in inputs.rows]
    ranks = accelerator.num_processes
    slots = [supervised_slots(row) for row in inputs.rows]
    steps = plan_steps(
        lengths, slots, settings.batch_tokens, recipe.run.seed, ranks * settings.accumulation, settings.tokens
    )
    if accelerator.is_main_process:
        _print_plan(accelerator, joint or head, lengths, sum(slots), len(steps), recipe)

    model, optimizer = accelerator.prepare(
        joint or head, build_optimizer(head, settings, joint.adapters() if joint else [])
    )
    state = load_newest(accelerator, folder / "checkpoints") or {"step": 0, "tokens": 0}
    log = TrainLog(folder / "log.jsonl", state["step"]) if accelerator.is_main_process else None
    best = BestHead(folder / "checkpoints") if settings.keep == "best" else None
    config = recipe.model_dump(mode="json")
    with Tracker(
        recipe.tracking.project, str(recipe.run.name), config, run.path, is_main=accelerator.is_main_process
    ) as metrics:
        train_steps(accelerator, model, optimizer, inputs, steps, state, recipe, folder, Sinks(log, metrics), best)
        final = heldout_walk(accelerator, model, inputs, recipe)
        weights, taken = choose_head(accelerator, model, len(steps), final, best)
        if accelerator.is_main_process:
            _save_head(folder, head_weights(weights) if joint else weights, description)
            if told := unlearned(folder / "log.jsonl"):
                print(told, file=sys.stderr)
            report: dict[str, Any] = {"steps": len(steps), "tokens": sum(_step_tokens(steps, lengths)), **taken}
            if joint:
                joint.load_state_dict(weights)
                report["target_quality"] = _save_target(folder, joint, run, inputs)
                metrics.log(
                    {f"target/{name}_drop": one for name, one in report["target_quality"]["drop"].items()}, len(steps)
                )
            write_json(folder / "report.json", report)
            metrics.log({f"heldout/{name}": value for name, value in flat_walk(final).items()}, len(steps))
    accelerator.wait_for_everyone()
    accelerator.end_training()


def resolve_settings(recipe: Recipe, checkpoint: dict[str, Any] | None) -> Recipe:
    """The recipe as this worker carries it out: with a precision, and with steps of the size that a checkpoint has.

    Raises:
        InputError: See `resumed_accumulation`.
    """
    changes: dict[str, Any] = {"precision": resolve_precision(recipe)}
    if checkpoint is not None:
        launch = read_launch(recipe.run.launch)
        ranks = 1 if launch.distributed_type == "NO" else int(os.environ.get("WORLD_SIZE", "1"))
        deepspeed = launch.distributed_type == "DEEPSPEED"
        changes["accumulation"] = resumed_accumulation(checkpoint, ranks, deepspeed=deepspeed)
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=changes)})


def resolve_precision(recipe: Recipe) -> Precision:
    """`train.precision`; ranks that each timed their products could disagree, so `auto` is bf16 for several."""
    if recipe.train.precision != "auto":
        return recipe.train.precision
    return "fp32" if recipe.run.launch == "single" and fastest_dtype() == "float32" else "bf16"


def choose_head(
    accelerator: Accelerator, model: nn.Module, num_steps: int, final: dict[str, Any], best: BestHead | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights to keep (on the main process), and what the report says of them: which step's, and their walk."""
    last = {"walk": final, "taken_step": num_steps}
    if best is None:
        return full_weights(accelerator, model), last
    best.offer(accelerator, model, num_steps, final)
    accelerator.wait_for_everyone()
    found = best.read()
    assert found is not None
    if accelerator.is_main_process and found["step"] != num_steps:
        print(
            f"train: the head of step {found['step']:,} of {num_steps:,} is taken: its held-out walk is longer, "
            f"{render_walk(found['walk'])}, than the last one's, {render_walk(final)}",
            file=sys.stderr,
        )
    taken = {"walk": found["walk"], "taken_step": found["step"], "last_walk": final}
    return (best.weights() if accelerator.is_main_process else {}), taken


def _save_head(folder: Path, weights: dict[str, Tensor], description: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
    if initial_digests(tensors)["float32"] == description["initial_digests"]["float32"]:
        raise InputError(f"{folder}: training did not change the head; is train.learning_rate too small?")
    write_atomically(folder / "head.safetensors", lambda temporary: save_file(tensors, temporary))
    write_json(folder / "head.json", description)


def _save_target(folder: Path, joint: JointModel, run: Run, inputs: Inputs) -> dict[str, Any]:
    """Write the target as the adapters have made it; returns `compare_quality` of it and of the recipe's target."""
    write_merged(folder / MERGED_TARGET, run.target, joint.merged_tensors())
    quality = compare_quality(run.target, Target(folder / MERGED_TARGET), inputs.heldout_rows)
    print("\n".join(quality_lines(quality)), file=sys.stderr)
    return quality


def _step_tokens(steps: list[list[list[int]]], lengths: list[int]) -> Iterator[int]:
    return (sum(lengths[row] for pack in step for row in pack) for step in steps)


def _print_plan(
    accelerator: Accelerator,
    head: nn.Module,
    lengths: list[int],
    slots: int,
    num_steps: int,
    recipe: Recipe,
) -> None:
    trainable = sum(parameter.numel() for parameter in head.parameters() if parameter.requires_grad)
    print(
        f"train: {trainable / 1e6:.1f} M parameters, {len(lengths):,} rows, {sum(lengths):,} tokens "
        f"({slots:,} supervised slots), {num_steps:,} steps = {recipe.train.tokens / sum(lengths):.1f} epochs on "
        f"{accelerator.num_processes} x {accelerator.device} ({recipe.train.precision}, launch {recipe.run.launch})",
        file=sys.stderr,
    )


def main() -> None:
    from drafthead.pipeline.run_dir import open_run
    from drafthead.pipeline.stages import STAGES

    end_with_parent()
    path = Path(sys.argv[1])
    with say_once(path / "train"):
        work(open_run(path, STAGES, []))


if __name__ == "__main__":
    main()
