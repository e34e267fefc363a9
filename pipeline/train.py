"""Train a head on stored states: one loop, the same under every launch file.

    drafthead train runs/eagle3                                   # the stage; starts the workers
    python -m drafthead.pipeline.train runs/eagle3                # one worker

Notable: the loss of a step is a sum over all its supervised slots divided by their global count, so packing,
accumulation and ranks do not change it; what is watched on held-out answers is the walk (eval/acceptance.py), not an
average over slots. Where the target is trained too (Medusa-2), a `JointModel` takes the head's place, and the target
that results is written beside the head.
"""

import contextlib
import ctypes
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from drafthead.data.batches import Pack, plan_epoch, plan_steps, prefetch, supervised_slots
from drafthead.data.draft_vocab import DraftVocab
from drafthead.data.encoding import Row, read_rows
from drafthead.data.errors import InputError
from drafthead.data.files import read_partial_jsonl, write_atomically, write_json, write_jsonl
from drafthead.data.shards import Store
from drafthead.eval.acceptance import RequestRounds, summarize, walk
from drafthead.pipeline.checkpoint import load_newest, save_checkpoint
from drafthead.pipeline.cores import fastest_dtype, side_by_side
from drafthead.pipeline.export.folder import initial_digests
from drafthead.pipeline.heads.base import FrozenTarget, HeadBatch, HeadOutput, Objective
from drafthead.pipeline.heads.build import build_frozen_target, build_head, describe_head
from drafthead.pipeline.heads.warm_start import load_warm_start
from drafthead.pipeline.joint import JointModel, head_weights
from drafthead.pipeline.launch import Precision, build_ops, full_weights, launch_command, loss_scale, make_accelerator
from drafthead.pipeline.merged_target import compare_quality, quality_lines, write_merged
from drafthead.pipeline.optim import build_optimizer, learning_rates
from drafthead.pipeline.progress import progress
from drafthead.pipeline.recipe import Recipe, TrainConfig, lora_of
from drafthead.pipeline.respond import SPLITS
from drafthead.pipeline.run_dir import MERGED_TARGET, Run
from drafthead.pipeline.target import Target
from drafthead.pipeline.tracking import Tracker
from torch import Tensor, nn

BAD_INPUT = 2
"""Exit code of a worker that stopped with an InputError."""
PR_SET_PDEATHSIG = 1


def train(run: Run) -> dict[str, Any]:
    """The stage: start the workers and wait for their head."""
    launch = run.recipe.run.launch
    build_ops(launch)
    command, extra = launch_command(launch, "drafthead.pipeline.train", [str(run.path)])
    # a session of its own: Ctrl-C reaches this process alone, which says so once and ends the workers
    try:
        done = subprocess.run(command, env=_environment(extra), start_new_session=True, preexec_fn=end_with_parent)
    except KeyboardInterrupt:
        print(file=sys.stderr)  # the worker's bar ends in mid-line
        raise
    if done.returncode == BAD_INPUT and launch == "single":
        sys.exit(BAD_INPUT)  # the worker has said why, in the one line
    if done.returncode:
        raise InputError(
            f"{run.path}/train: training stopped with exit code {done.returncode}; the reason is above, "
            f"the same command goes on from the last checkpoint"
        )
    report: dict[str, Any] = json.loads((run.folder("train") / "report.json").read_text())
    return report


def end_with_parent() -> None:
    """Ask Linux to kill this process when the one that started it dies, so that no orphan trains on beside its heir."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _environment(extra: dict[str, str]) -> dict[str, str]:
    # a W&B service of whoever started us would outlive a killed worker and hold its run
    inherited = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    return {**inherited, **extra}


@dataclass
class Inputs:
    """What the loop reads of the stages before it."""

    rows: list[Row]
    store: Store
    heldout_rows: list[Row]
    heldout_store: Store
    frozen: FrozenTarget
    scored: FrozenTarget
    """What the loss looks at; `frozen` but for `train.loss_vocab`."""
    opening: int
    """Tokens that all training rows begin with alike."""

    @classmethod
    def open(cls, run: Run) -> "Inputs":
        """Open the stores, keeping the rows whose states were captured.

        Raises:
            InputError: The states come from another target, or none is left.
        """
        vocab = DraftVocab.load(run.input("draft-vocab") / "draft_vocab.safetensors")
        frozen = build_frozen_target(run.target, vocab)
        opened = []
        for split in SPLITS:
            store = Store(run.input("capture") / split)
            if store.info.fingerprint != run.target.fingerprint:
                raise InputError(
                    f"{store.folder}: states of target {store.info.fingerprint}, this run's is {run.target.fingerprint}"
                )
            rows = [row for row in read_rows(run.input("encode") / f"{split}.parquet") if row.key in store.where]
            if not rows:
                raise InputError(f"{store.folder}: no row of {split}.parquet has states")
            opened.append((rows, store))
        (rows, store), (heldout_rows, heldout_store) = opened
        scored = frozen
        if size := run.recipe.train.loss_vocab:
            scored = frozen.restricted(most_frequent(rows, size, frozen.target_ids_U, run.target.vocab_size))
        return cls(rows, store, heldout_rows, heldout_store, frozen, scored, common_opening(rows))


def most_frequent(rows: list[Row], size: int, target_ids_U: Tensor, vocab_size: int) -> Tensor:
    """Those of the given ids that the target wrote most often, ascending; of equals the lowest."""
    written = [token for row in rows for token in row.input_ids[row.context_length :]]
    counts_U = torch.bincount(torch.tensor(written), minlength=vocab_size)[target_ids_U]
    return target_ids_U[counts_U.argsort(descending=True, stable=True)[:size].sort().values]


def common_opening(rows: list[Row]) -> int:
    """How many context tokens all rows share at their beginning."""
    shortest = min(row.context_length for row in rows)
    first = rows[0].input_ids
    agree = (all(row.input_ids[place] == first[place] for row in rows) for place in range(shortest))
    return next((place for place, same in enumerate(agree) if not same), shortest)


@dataclass
class Tally:
    """Sums of the steps since the last log line."""

    loss: float = 0.0
    slots: int = 0
    tokens: int = 0
    survived: list[float] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    overlap: list[float] = field(default_factory=list)
    start: float = field(default_factory=time.monotonic)

    def add(self, output: HeadOutput, tokens: int) -> None:
        self.loss += float(output.loss.detach())
        self.slots += int(output.rows_K[0])
        self.tokens += tokens
        survived, chances = output.survived_K.tolist(), output.rows_K.tolist()
        self.survived = _added(self.survived, survived)
        self.chances = _added(self.chances, chances)
        self.overlap = _added(self.overlap, output.overlap_K.tolist())

    def metrics(self) -> dict[str, float]:
        """Values of this process.

        `slot_survival_*` averages over slots and so overestimates serving; `draft_vocab_overlap_*` is sum min(p, q) of
        the slots that were trained on, with p renormalised over the draft vocabulary.
        """
        values = {
            "loss": self.loss / max(1, self.slots),
            "tokens_per_s": self.tokens / (time.monotonic() - self.start),
        }
        columns = zip(self.survived, self.overlap, self.chances, strict=True)
        for step, (hit, overlap, chance) in enumerate(columns, start=1):
            values[f"slot_survival_{step}"] = hit / max(1, chance)
            values[f"draft_vocab_overlap_{step}"] = overlap / max(1, chance)
        return values


def _added(sums: list[float], values: list[float]) -> list[float]:
    return [a + b for a, b in zip(sums, values, strict=True)] if sums else values


def work(run: Run) -> None:
    """One worker: prepare, go on from the newest checkpoint, train, save the head."""
    recipe, settings = run.recipe, run.recipe.train
    folder = run.folder("train")
    folder.mkdir(parents=True, exist_ok=True)
    precision = resolve_precision(recipe)
    accelerator = make_accelerator(
        recipe.run.launch,
        precision=precision,
        accumulation=settings.accumulation,
        max_grad_norm=settings.max_grad_norm,
    )
    inputs = Inputs.open(run)
    for frozen in {inputs.frozen, inputs.scored}:
        frozen.to(accelerator.device)
        if precision == "fp32":
            frozen.lm_head_UD = frozen.lm_head_UD.float()  # once, instead of at every step
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
    steps = plan_steps(lengths, settings.batch_tokens, recipe.run.seed, ranks * settings.accumulation, settings.tokens)
    if accelerator.is_main_process:
        _print_plan(accelerator, joint or head, inputs, lengths, len(steps), recipe, precision)

    model, optimizer = accelerator.prepare(
        joint or head, build_optimizer(head, settings, joint.adapters() if joint else [])
    )
    state = load_newest(accelerator, folder / "checkpoints") or {"step": 0, "tokens": 0}
    log = TrainLog(folder / "log.jsonl", state["step"]) if accelerator.is_main_process else None
    config = recipe.model_dump(mode="json")
    with Tracker(
        recipe.tracking.project, str(recipe.run.name), config, run.path, is_main=accelerator.is_main_process
    ) as metrics:
        _loop(accelerator, model, optimizer, inputs, steps, state, recipe, folder, Sinks(log, metrics))
        final = heldout_walk(accelerator, model, inputs, recipe)
        weights = full_weights(accelerator, model)
        if accelerator.is_main_process:
            _save_head(folder, head_weights(weights) if joint else weights, description)
            report: dict[str, Any] = {"steps": len(steps), "tokens": sum(_step_tokens(steps, lengths)), "walk": final}
            if joint:
                report["target_quality"] = _save_target(folder, joint, run, inputs)
                metrics.log(
                    {f"target/{name}_drop": one for name, one in report["target_quality"]["drop"].items()}, len(steps)
                )
            write_json(folder / "report.json", report)
            metrics.log({f"heldout/{name}": value for name, value in flat_walk(final).items()}, len(steps))
    accelerator.wait_for_everyone()
    accelerator.end_training()


def resolve_precision(recipe: Recipe) -> Precision:
    """`train.precision`; ranks that each timed their products could disagree, so `auto` is bf16 for several."""
    if recipe.train.precision != "auto":
        return recipe.train.precision
    return "fp32" if recipe.run.launch == "single" and fastest_dtype() == "float32" else "bf16"


@dataclass
class Sinks:
    """Where the main process writes its numbers."""

    log: "TrainLog | None"
    tracker: Tracker

    def write(self, step: int, values: dict[str, Any], prefix: str) -> None:
        if self.log is None:
            return
        self.log.append({"step": step, **values})
        self.tracker.log({f"{prefix}/{name}": value for name, value in values.items()}, step)


def _loop(
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
            norm = _take_step(accelerator, model, optimizer, packs, inputs, total_slots, settings, tally, threads)
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


def _take_step(
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


def heldout_walk(accelerator: Accelerator, model: nn.Module, inputs: Inputs, recipe: Recipe) -> dict[str, Any]:
    """Walk the held-out answers with drafts of `eval.k` tokens; every rank does the same, each row counts once."""
    model.eval()
    rows = inputs.heldout_rows
    packs = plan_epoch([len(row.input_ids) for row in rows], recipe.train.batch_tokens, 0, 0)
    requests: list[RequestRounds] = []
    with torch.no_grad():
        loaded = prefetch([[rows[row] for row in pack] for pack in packs], inputs.heldout_store)
        for pack, numbers in zip(loaded, packs, strict=True):
            output = run_head(accelerator, model, pack, inputs, recipe.train, recipe.eval.k)
            for number, (start, length) in zip(numbers, pack.documents, strict=True):
                survived = output.survived_TK[start : start + length].cpu()
                requests.append(walk_row(rows[number], survived))
    model.train()
    return summarize(requests, recipe.eval.k)


def walk_row(row: Row, survived_TK: Tensor) -> RequestRounds:
    """The rounds that serving would run over one answer, from the unroll's survival flags."""
    last = len(row.input_ids) - 1
    accepted = walk(survived_TK, first=row.context_length - 1, last=last)
    return RequestRounds(domain=row.domain, accepted=accepted, num_tokens=last - row.context_length)


def flat_walk(summary: dict[str, Any]) -> dict[str, Any]:
    values = {f"walk_position_{i + 1}": rate for i, rate in enumerate(summary["per_position"])}
    return {**values, "walk_accept_length": summary["mean_acceptance_length"]}


def render_walk(summary: dict[str, Any]) -> str:
    rates = " ".join(f"{rate:.3f}" for rate in summary["per_position"] if rate is not None)
    return f"{rates}  accept length {summary['mean_acceptance_length']:.3f}"


class TrainLog:
    """log.jsonl: one object a line; lines of steps that will be trained again are cut off on resume."""

    def __init__(self, path: Path, step: int):
        self.path = path
        write_jsonl(path, [row for row in read_partial_jsonl(path) if row["step"] <= step])

    def append(self, row: dict[str, Any]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


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
    inputs: Inputs,
    lengths: list[int],
    num_steps: int,
    recipe: Recipe,
    precision: Precision,
) -> None:
    trainable = sum(parameter.numel() for parameter in head.parameters() if parameter.requires_grad)
    slots = sum(supervised_slots(row) for row in inputs.rows)
    print(
        f"train: {trainable / 1e6:.1f} M parameters, {len(lengths):,} rows, {sum(lengths):,} tokens "
        f"({slots:,} supervised slots), {num_steps:,} steps = {recipe.train.tokens / sum(lengths):.1f} epochs on "
        f"{accelerator.num_processes} x {accelerator.device} ({precision}, launch {recipe.run.launch})",
        file=sys.stderr,
    )


def main() -> None:
    from drafthead.pipeline.cli import report_errors
    from drafthead.pipeline.run_dir import open_run
    from drafthead.pipeline.stages import STAGES

    end_with_parent()
    with report_errors():
        work(open_run(Path(sys.argv[1]), STAGES, []))


if __name__ == "__main__":
    main()
