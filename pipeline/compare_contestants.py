"""Who takes part in a comparison, and whether they can be compared: runs of one target, and drafters beside them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from drafthead.data.errors import InputError
from drafthead.pipeline.drafters import DrafterSpec, parse_drafter
from drafthead.pipeline.evaluate import PromptSet, load_prompts
from drafthead.pipeline.loop import MAX_K, SpeculativeLoop
from drafthead.pipeline.recipe import load_recipe
from drafthead.pipeline.run_dir import Run, difference
from torch import nn

NEEDED = ("draft-vocab", "train")


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """What a user may choose; None is what the runs' recipes agree on."""

    prompts: Path | None = None
    k: int | None = None
    max_new_tokens: int | None = None
    limit: int | None = None
    drafters: tuple[str, ...] = ()
    """Specs of drafters that take part beside the runs' heads."""
    temperatures: tuple[float, ...] = (0.0,)
    """Everything is measured at each."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all contestants are measured with."""

    k: int
    max_new_tokens: int
    limit: int | None
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A head or a drafter in its speculative loop."""

    name: str
    loop: SpeculativeLoop
    about: dict[str, Any]
    """What it is, for the report."""


def open_contestants(runs: Sequence[Run], options: CompareOptions, settings: Settings) -> list[Contestant]:
    """The runs, then the drafters, around one copy of the target."""
    first = runs[0]
    model = first.served_target.load(getattr(torch, settings.dtype), "cuda" if torch.cuda.is_available() else "cpu")
    heads = [(name, run, SpeculativeLoop(run, model)) for name, run in zip(run_names(runs), runs, strict=True)]
    drafters = [(text, spec, SpeculativeLoop(first, model, spec)) for text, spec in parsed(options)]
    return [
        *(Contestant(name=name, loop=loop, about=describe_run(run, loop.trained.head)) for name, run, loop in heads),
        *(Contestant(name=text, loop=loop, about=describe_drafter(spec)) for text, spec, loop in drafters),
    ]


def parsed(options: CompareOptions) -> list[tuple[str, DrafterSpec]]:
    return [(text, parse_drafter(text)) for text in options.drafters]


# ---- what can be compared --------------------------------------------------------------------------------


def check_comparable(runs: Sequence[Run], options: CompareOptions) -> Settings:
    """Refuse runs that are unfinished, of other targets, or measured with other settings.

    Raises:
        InputError: Naming both values and the option that settles it.
    """
    first, drafters = runs[0], parsed(options)
    if len(runs) + len(drafters) < 2:
        raise InputError(
            f"{first.path}: one run alone; give two or more run directories to compare, or --drafter ngram beside it"
        )
    for place, run in enumerate(runs):
        if run.path.resolve() in [other.path.resolve() for other in runs[:place]]:
            raise InputError(f"{run.path}: given twice; give each run directory once")
    for place, (text, spec) in enumerate(drafters):
        if spec in [other for _, other in drafters[:place]]:
            raise InputError(f"--drafter {text}: given twice; give each drafter once")
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
    if settings.k > MAX_K:
        raise InputError(f"--k {settings.k}: at most {MAX_K} draft tokens")
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


# ---- what they are ---------------------------------------------------------------------------------------


def run_names(runs: Sequence[Run]) -> list[str]:
    """Folder names, or whole paths where these are not distinct."""
    names = [run.path.resolve().name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.path) for run in runs]


def describe_run(run: Run, head: nn.Module) -> dict[str, Any]:
    """What the head is and what it was trained on."""
    trains_lm_head = run.recipe.head.train_lm_head
    trained = [
        parameter.numel()
        for name, parameter in head.named_parameters()
        if trains_lm_head or not name.startswith("lm_head.")
    ]
    return {
        "kind": "run",
        "path": str(run.path),
        "head": run.recipe.head.type,
        "drafter": None,
        "trained_parameters": sum(trained),
        "draft_vocab_size": run.report("draft-vocab")["size"],
        "trained_tokens": run.report("train")["tokens"],
    }


def describe_drafter(spec: DrafterSpec) -> dict[str, Any]:
    """The same names; what only a trained head has is None."""
    return {
        "kind": "drafter",
        "path": None,
        "head": None,
        "drafter": str(spec),
        "trained_parameters": None,
        "draft_vocab_size": None,
        "trained_tokens": None,
    }
