"""`drafthead cost`: what drafting and verification cost on this machine by batch size and k, and whether that predicts
what vLLM does.

    drafthead cost runs/eagle3 --batches 1,8,32 --k 1,2,3,5
    drafthead cost runs/eagle3 --serve

Writes `cost.json` into the run, from which `drafthead plan` takes its costs; those of another drafter than the run's
head (`--drafter`) are shown and not kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from drafthead.data.encoding import read_rows
from drafthead.data.errors import InputError
from drafthead.data.files import read_json, write_json
from drafthead.eval.cost_grid import BatchTimes, describe_batch, measure_batch, room_for
from drafthead.eval.engine import Request
from drafthead.eval.served_cost import describe_served, measure_steps, num_answers
from drafthead.pipeline.advise import of_run
from drafthead.pipeline.drafters import DrafterSpec, parse_drafter
from drafthead.pipeline.evaluate import load_prompts
from drafthead.pipeline.loop import BATCH_TOKENS, MAX_K, SpeculativeLoop
from drafthead.pipeline.measured_costs import COST_FILE, head_key, loop_cost
from drafthead.pipeline.progress import progress
from drafthead.pipeline.recipe import MedusaConfig
from drafthead.pipeline.run_dir import Run, provenance, utc_now
from drafthead.pipeline.serve_check import engine_config

BATCHES = (1, 2, 4, 8, 16, 32)
KS = (1, 2, 3, 5)
REPEATS = 7
SERVED_BATCHES = (1, 4, 16)
SERVED_PROMPTS = 16
SERVED_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class CostOptions:
    """What a user may choose."""

    batches: tuple[int, ...] = BATCHES
    k: tuple[int, ...] | None = None
    """Draft tokens per round; `KS`, as far as the head goes, unless given."""
    context: int = 256
    """Tokens of each request before the first round."""
    serve: tuple[int, ...] | None = None
    """Batch sizes at which vLLM is timed as well; `SERVED_BATCHES` where none is named."""
    drafter: str | None = None
    """Drafts instead of the run's head (`pipeline/drafters.py`)."""


def measure_cost(run: Run, options: CostOptions) -> dict[str, Any]:
    """Measure the loop, and vLLM if asked. What vLLM was timed at before is kept for the same head.

    Returns:
        The object of `drafthead cost --json`, and of `cost.json`.

    Raises:
        InputError: The run is not finished through what is measured, or its head cannot draft so many tokens.
    """
    if options.drafter is not None:
        return measure_drafter(run, options, parse_drafter(options.drafter))
    ks = choose_ks(run, options.k)
    key, path = head_key(run), run.path / COST_FILE
    before = read_json(path) if path.is_file() else {}
    report = {
        "drafter": run.recipe.head.type,
        "head_key": key,
        "loop": measure_loop(run, options, ks),
        "served": before.get("served") if before.get("head_key") == key else None,
        **provenance(),
    }
    write_json(path, report)
    if options.serve is not None:
        report["served"] = measure_served(run, report["loop"], options.serve or SERVED_BATCHES, ks)
        write_json(path, report)
    return report


def measure_drafter(run: Run, options: CostOptions, spec: DrafterSpec) -> dict[str, Any]:
    """The same of a drafter without a trained head, in our loop alone; the run's files stay as they are.

    Raises:
        InputError: vLLM was to be timed as well.
    """
    if options.serve is not None:
        raise InputError("cost: --serve times the run's head, whose acceptance is known; leave out --drafter")
    loop = measure_loop(run, options, sorted(set(options.k or KS)), spec)
    return {"drafter": str(spec), "head_key": None, "loop": loop, "served": None, **provenance()}


def choose_ks(run: Run, asked: Sequence[int] | None) -> list[int]:
    """Draft tokens per round, ascending.

    Raises:
        InputError: The head cannot draft as many as were asked for.
    """
    head = run.recipe.head
    most = head.num_heads if isinstance(head, MedusaConfig) else MAX_K
    if asked is not None and max(asked) > most:
        raise InputError(f"k: {max(asked)}; this head drafts at most {most} tokens")
    return [k for k in sorted(set(asked or KS)) if k <= most]


# ---- our loop --------------------------------------------------------------------------------------------


def measure_loop(run: Run, options: CostOptions, ks: Sequence[int], spec: DrafterSpec | None = None) -> dict[str, Any]:
    """Rounds of target and drafter in transformers, at every batch size that memory allows.

    Raises:
        InputError: It allows none.
    """
    loop = SpeculativeLoop(run, spec=spec)
    found: list[BatchTimes] = []
    left_out: dict[str, str] = {}
    wanted = sorted(set(options.batches))
    with progress(len(wanted) * (REPEATS + 1) * (1 + len(ks)), "time rounds", "round") as bar:
        for batch in wanted:
            if loop.device == "cpu" and batch * options.context > BATCH_TOKENS:
                left_out[str(batch)] = f"more than {BATCH_TOKENS} tokens of context; give a smaller --context"
                continue
            contexts = contexts_of(run, batch, options.context, room_for(ks, REPEATS))
            try:
                found.append(measure_batch(loop.target, loop.drafter, contexts, ks, REPEATS, bar.update))
            except torch.OutOfMemoryError:
                left_out[str(batch)] = "out of memory"
    if not found:
        raise InputError(f"cost: no batch size could be measured: {next(iter(left_out.values()))}")
    return {
        "measured": utc_now(),
        "device": describe_device(loop.device),
        "dtype": run.recipe.eval.dtype,
        "context": options.context,
        "repeats": REPEATS,
        "left_out": left_out,
        "by_batch": [describe_batch(times) for times in found],
    }


def contexts_of(run: Run, count: int, length: int, room: int) -> list[list[int]]:
    """Pieces of the run's held-out conversations, one after the other, of `length` tokens each.

    Raises:
        InputError: The target has too few positions for them and `room` tokens more.
    """
    most = run.served_target.config.max_position_embeddings
    if length + room > most:
        raise InputError(f"context: {length}; this target has {most} positions, and the rounds need {room}")
    rows = read_rows(run.input("encode") / "heldout.parquet")
    text = [token for row in rows for token in row.input_ids]
    if not text:
        raise InputError(f"{run.path}: no held-out answers, whose text the rounds begin with; set prompts.heldout")
    text *= 1 + count * length // len(text)
    return [text[place * length : (place + 1) * length] for place in range(count)]


def describe_device(device: str) -> str:
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, without CUDA graphs"
    return f"CPU, {torch.get_num_threads()} threads"


# ---- vLLM ------------------------------------------------------------------------------------------------


def measure_served(run: Run, loop: dict[str, Any], batches: Sequence[int], ks: Sequence[int]) -> dict[str, Any]:
    """vLLM's own steps plain and with the head, beside what both cost models predict for them.

    One engine after the other: plain, every k, and plain again, which shows how steady the machine was.
    """
    acceptance, cost = of_run(run), loop_cost(loop)
    prompts = load_prompts(run, None, SERVED_PROMPTS, SERVED_TOKENS).prompts
    requests = [
        Request(key=str(number), prompt_ids=prompt.ids, max_new_tokens=SERVED_TOKENS)
        for number, prompt in enumerate(prompts)
    ]
    batches = sorted(set(batches))
    order: list[int | None] = [None, *ks, None]
    found = []
    with progress(len(order) * num_answers(len(requests), batches), "time vLLM", "answer") as bar:
        for k in order:
            name = "plain" if k is None else f"k{k}"
            bar.set_postfix_str(name)
            log_path = run.path / "logs" / f"cost-{name}.log"
            config = replace(engine_config(run, k), max_num_seqs=batches[-1])
            found.append(measure_steps(config, requests, batches, log_path, bar.update))
    before, *drafted, after = found
    return {
        "measured": utc_now(),
        "dtype": run.recipe.serve_check.dtype,
        "prompts": len(prompts),
        "max_new_tokens": SERVED_TOKENS,
        "rates_from": acceptance.source,
        "by_batch": [
            describe_served(
                (before[place], after[place]),
                {k: of_k[place] for k, of_k in zip(ks, drafted, strict=True)},
                acceptance.rates,
                cost,
            )
            for place in range(len(batches))
        ],
    }
