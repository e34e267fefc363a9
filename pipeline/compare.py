"""Compare: the same prompts through the speculative loops of several runs, in one process.

    drafthead compare runs/eagle3 runs/medusa runs/mtp --prompts spec_bench.jsonl --k 3

Nothing is taken from the runs' own evaluations: every number here was measured side by side, greedily, with one copy of
the target. Times are those of batch 1 and of our own loop in transformers; a server's are others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from drafthead.data.errors import InputError
from drafthead.data.files import write_json, write_text
from drafthead.eval.acceptance import summarize
from drafthead.eval.cost import Cost, Timing, time_answer
from drafthead.eval.decode import Answer, DecodeOptions
from drafthead.pipeline.compare_plot import render_svg
from drafthead.pipeline.evaluate import EvalOptions, Prompt, PromptSet, SpeculativeLoop, load_prompts, requests_of
from drafthead.pipeline.progress import progress
from drafthead.pipeline.recipe import load_recipe
from drafthead.pipeline.run_dir import Run, difference
from torch import nn

NEEDED = ("draft-vocab", "train")
TIMED_PROMPTS = 3
"""Prompts decoded one by one for the times, after one that is not counted."""


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """What a user may choose; None is what the runs' recipes agree on."""

    prompts: Path | None = None
    k: int | None = None
    max_new_tokens: int | None = None
    limit: int | None = None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all runs are measured with."""

    k: int
    max_new_tokens: int
    limit: int | None
    dtype: str


def compare(runs: Sequence[Run], options: CompareOptions, out: Path) -> dict[str, Any]:
    """Measure the runs side by side; write `compare.json` and `compare.svg` below `out`.

    Returns:
        The object of `drafthead compare --json`: what was measured with, `plain_ms_per_token` of the target alone,
        and under `runs`, in the order given, each run's numbers (`summarize`, `Cost`).

    Raises:
        InputError: The runs cannot be compared; names what differs and both values.
    """
    settings = check_comparable(runs, options)
    chosen = common_prompts(runs, options.prompts, settings)
    target = runs[0].served_target.load(getattr(torch, settings.dtype), "cuda" if torch.cuda.is_available() else "cpu")
    loops = [SpeculativeLoop(run, target) for run in runs]
    evaluation = EvalOptions(k=settings.k, temperature=0.0, max_new_tokens=settings.max_new_tokens, limit=None)
    plain = loops[0].generate(chosen.prompts, evaluation, k=0)
    drafted = [loop.generate(chosen.prompts, evaluation, k=settings.k) for loop in loops]
    plain_cost, costs = measure_costs(loops, chosen.prompts, settings)
    names = run_names(runs)
    report = {
        "target": str(runs[0].served_target.path),
        "prompts_file": None if options.prompts is None else str(options.prompts),
        "prompts": len(chosen.prompts),
        "left_out": chosen.left_out,
        "k": settings.k,
        "temperature": 0.0,
        "max_new_tokens": settings.max_new_tokens,
        "dtype": settings.dtype,
        "timed_prompts": min(TIMED_PROMPTS, len(chosen.prompts)),
        "method": "speculative loops in transformers, chains of greedy drafts, full vocabulary; times at batch 1",
        "plain_ms_per_token": plain_cost.ms_per_token,
        "runs": [
            {
                "name": name,
                "path": str(run.path),
                **describe_run(run, loop.head.head),
                **acceptance(chosen.prompts, answers, plain, settings.k),
                **described_cost(cost, plain_cost),
            }
            for name, run, loop, answers, cost in zip(names, runs, loops, drafted, costs, strict=True)
        ],
    }
    write_text(out / "compare.svg", render_svg(report))
    report["plot"] = str((out / "compare.svg").resolve())
    write_json(out / "compare.json", report)
    return report


# ---- what can be compared --------------------------------------------------------------------------------


def check_comparable(runs: Sequence[Run], options: CompareOptions) -> Settings:
    """Refuse runs that are unfinished, of other targets, or measured with other settings.

    Raises:
        InputError: Naming both values and the option that settles it.
    """
    if len(runs) < 2:
        raise InputError(f"{runs[0].path}: one run alone; give two or more run directories to compare")
    first = runs[0]
    for number_, run in enumerate(runs):
        if run.path.resolve() in [other.path.resolve() for other in runs[:number_]]:
            raise InputError(f"{run.path}: given twice; give each run directory once")
    for run in runs:
        for stage in NEEDED:
            run.input(stage)
        if run.served_target.fingerprint != first.served_target.fingerprint:
            raise InputError(
                f"the runs have different targets: {first.path} {_named_target(first)}, "
                f"{run.path} {_named_target(run)}; compare heads of one target"
            )
    settings = Settings(
        k=_agreed(runs, "k", options.k),
        max_new_tokens=_agreed(runs, "max_new_tokens", options.max_new_tokens),
        limit=options.limit if options.limit or options.prompts else _agreed(runs, "limit", None),
        dtype=_agreed(runs, "dtype", None),
    )
    for run in runs:  # a head may draft fewer tokens
        load_recipe(str(run.path / "recipe.yaml"), [f"eval.k={settings.k}"])
    return settings


def _named_target(run: Run) -> str:
    target = run.served_target
    name = run.recipe.target if target is run.target else target.path  # a joint training changed it
    return f"{name} ({target.fingerprint})"


def _agreed(runs: Sequence[Run], name: str, given: Any) -> Any:
    """The value that was given, or that of `eval` in every recipe."""
    if given is not None:
        return given
    first = runs[0]
    value = getattr(first.recipe.eval, name)
    for run in runs:
        other = getattr(run.recipe.eval, name)
        if other != value:
            remedy = "set one in both recipes" if name == "dtype" else f"give --{name.replace('_', '-')}"
            raise InputError(f"eval.{name} is {value} in {first.path} and {other} in {run.path}; {remedy}")
    return value


def common_prompts(runs: Sequence[Run], path: Path | None, settings: Settings) -> PromptSet:
    """The prompts as each run renders them, which must be the same token for token.

    Raises:
        InputError: They differ; names the settings that make them differ.
    """
    first = runs[0]
    chosen = load_prompts(first, path, settings.limit, settings.max_new_tokens)
    for run in runs[1:]:
        other = load_prompts(run, path, settings.limit, settings.max_new_tokens)
        if other.prompts != chosen.prompts:
            found = difference(_prompt_settings(first), _prompt_settings(run), (str(first.path), str(run.path)))
            raise InputError(
                f"{first.path} and {run.path} do not see the same prompts ({found or 'their files differ'}); "
                "give --prompts FILE, or compare runs with the same prompts and encode settings"
            )
    return chosen


def _prompt_settings(run: Run) -> dict[str, Any]:
    """All that decides which prompts `load_prompts` gives."""
    recipe = run.recipe
    return {
        "prompts": recipe.prompts.model_dump(mode="json"),
        "encode.template_kwargs": recipe.encode.template_kwargs,
        "serve_check.max_model_len": recipe.serve_check.max_model_len,
        "run.seed": recipe.run.seed,
        "prompt files": run.ingredients("prompts")["extra"],
    }


def run_names(runs: Sequence[Run]) -> list[str]:
    """Folder names, or whole paths where these are not distinct."""
    names = [run.path.resolve().name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.path) for run in runs]


# ---- one run's numbers -----------------------------------------------------------------------------------


def acceptance(prompts: list[Prompt], answers: list[Answer], plain: list[Answer], k: int) -> dict[str, Any]:
    same = sum(one.tokens == other.tokens for one, other in zip(answers, plain, strict=True))
    return {**summarize(requests_of(prompts, answers), k), "identical_to_plain": f"{same}/{len(plain)}"}


def describe_run(run: Run, head: nn.Module) -> dict[str, Any]:
    """What the head is and what it was trained on."""
    trains_lm_head = run.recipe.head.train_lm_head
    trained = [
        parameter.numel()
        for name, parameter in head.named_parameters()
        if trains_lm_head or not name.startswith("lm_head.")
    ]
    return {
        "head": run.recipe.head.type,
        "trained_parameters": sum(trained),
        "draft_vocab_size": run.report("draft-vocab")["size"],
        "trained_tokens": run.report("train")["tokens"],
    }


def described_cost(cost: Cost, plain: Cost) -> dict[str, Any]:
    ours, alone = cost.ms_per_token, plain.ms_per_token
    return {
        "draft_s": cost.draft_s,
        "verify_s": cost.target_s,
        "draft_cost": cost.ratio,
        "plain_ms_per_token": alone,
        "speculative_ms_per_token": ours,
        "speedup": alone / ours if alone and ours else None,
    }


def measure_costs(loops: list[SpeculativeLoop], prompts: list[Prompt], settings: Settings) -> tuple[Cost, list[Cost]]:
    """Times of plain decoding and of every run, taken in turn, prompt by prompt, so that all see the same machine."""
    options = DecodeOptions(max_new_tokens=settings.max_new_tokens, end_ids=loops[0].end_ids)
    contestants: list[tuple[SpeculativeLoop, bool]] = [(loops[0], False), *((loop, True) for loop in loops)]
    timings: list[list[Timing]] = [[] for _ in contestants]
    chosen = prompts[:TIMED_PROMPTS]
    with progress((1 + len(chosen)) * len(contestants), "time at batch 1", "answer") as bar:
        for number_, prompt in enumerate([chosen[0], *chosen]):
            for (loop, drafts), taken in zip(contestants, timings, strict=True):
                drafter = loop.drafter if drafts else None
                timing = time_answer(loop.target, drafter, prompt.ids, settings.k, options)
                if number_ and timing is not None:  # the first is warm-up
                    taken.append(timing)
                bar.update()
    plain, *others = [Cost.of(taken) for taken in timings]
    return plain, others
