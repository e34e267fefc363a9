"""What a model card says, gathered from a run's reports and manifests: `card.py` only writes it down.

Every number is one of a report.json, a manifest or `drafthead plan`, so that the card cannot differ from the run.
"""

from pathlib import Path
from typing import Any

from drafthead.data.errors import InputError
from drafthead.data.files import read_json
from drafthead.data.sources import looks_like_file
from drafthead.pipeline.advise import AdviceOptions, advise
from drafthead.pipeline.export.base_model import describe_base
from drafthead.pipeline.export.folder import serve_command
from drafthead.pipeline.recipe import Recipe
from drafthead.pipeline.run_dir import MANIFEST, Run


def card_facts(run: Run) -> dict[str, Any]:
    """The object that `card.model_card` takes, from what is there by now.

    Raises:
        InputError: The run is not exported yet.
    """
    recipe = run.recipe
    has_served = run.has("serve-check")
    described = read_json(run.input("train") / "head.json")
    provenance = read_json(run.folder("serve-check" if has_served else "eval") / MANIFEST)
    base = describe_base(recipe.target, run.target.path)
    return {
        "name": recipe.run.name,
        "head": recipe.head.type,
        "target": recipe.target,
        "base": base,
        "fingerprint": run.served_target.fingerprint,
        "target_quality": run.report("train").get("target_quality"),
        "eval": run.report("eval"),
        "serve_check": run.report("serve-check") if has_served else None,
        "advice": find_advice(run),
        "data": data_facts(run),
        "datasets": hub_datasets(recipe),
        "recipe": recipe_facts(run),
        "versions": {**provenance["versions"], "drafthead commit": provenance["commit"]},
        "trained_length": described["trained_length"],
        "position_limit": run.target.config.to_dict().get("max_position_embeddings"),  # some families have none
        "quantization": _quantization(run),
        "serve_command": serve_command(run.served_target.path, run.folder("export")),
    }


def find_advice(run: Run) -> dict[str, Any] | str:
    """What `drafthead plan RUN_DIR` says, or why it cannot say anything yet."""
    try:
        advice = advise(AdviceOptions(), run)
    except InputError as error:
        return str(error).replace(f"{run.path}/", "").replace(str(run.path), "RUN_DIR")
    # the path of a machine of one's own says nothing to others
    return {**advice, "costs_from": advice["costs_from"].replace(f"{run.path}/", "")}


# ---- data ------------------------------------------------------------------------------------------------


def data_facts(run: Run) -> dict[str, Any]:
    """Where the prompts are from, who wrote the answers, how many tokens they are."""
    prompts, encoded, vocab = run.report("prompts"), run.report("encode"), run.report("draft-vocab")
    train = encoded["train"]
    return {
        "training conversations": prompts["train"],
        **source_facts(run.recipe, prompts["sources"]),
        "held-out conversations": prompts["heldout"],
        "answers written by": _who_answered(run),
        "training rows (assistant turns)": train["kept"],
        "training tokens": train["tokens"],
        "supervised tokens": train["supervised_tokens"],
        "tokens trained on, epochs included": run.report("train")["tokens"],
        "draft vocabulary": f"{vocab['size']} of {vocab['target_vocab']}",
        "its coverage of held-out answers": vocab["coverage_heldout"],
    }


def source_facts(recipe: Recipe, sources: dict[str, int]) -> dict[str, int]:
    """Prompts taken from each source, which are counted before a share of them is held out."""
    split = ", the held-out ones among them" if isinstance(recipe.prompts.heldout, float) else ""
    return {f"taken from `{_public_name(name)}`{split}": count for name, count in sources.items()}


def hub_datasets(recipe: Recipe) -> list[str]:
    """Data sets on the hub among the sources of the training prompts."""
    names = [one.source for one in recipe.prompts.sources]
    return [name for name in names if "/" in name and not looks_like_file(name)]


def _who_answered(run: Run) -> str:
    settings = run.recipe.respond
    if settings.engine == "off":
        return "the data set (`respond.engine=off`), not checked to be the target"
    how = "greedy" if settings.temperature == 0 else f"temperature {settings.temperature:g}"
    dtype = run.report("respond")["dtype"]
    return f"the target itself ({settings.engine}, {dtype}, {how}, at most {settings.max_new_tokens} new tokens)"


def _public_name(source: str) -> str:
    """Of a file only its own name."""
    return Path(source).name if looks_like_file(source) else source


# ---- recipe ----------------------------------------------------------------------------------------------


def recipe_facts(run: Run) -> dict[str, Any]:
    """The settings by which the head was trained."""
    recipe, report = run.recipe, run.report("train")
    settings = recipe.train
    head = recipe.head.model_dump(exclude_none=True, exclude={"type"})
    start = {"begun with": Path(settings.init_from).name} if settings.init_from is not None else {}
    return {
        "head": ", ".join(f"{name} {_plain(value)}" for name, value in head.items()),
        **start,
        "states captured as": recipe.capture.dtype,
        "optimiser steps": report["steps"],
        "head taken from step": report["taken_step"],
        "tokens of a step, at most": f"{settings.batch_tokens} x {settings.accumulation} (launch {recipe.run.launch})",
        "depth (draft steps trained)": settings.depth,
        "loss": f"{settings.loss}, step j weighs {settings.step_weight:g} ** j",
        "learning rate": f"{settings.learning_rate:g}",
        "seed": recipe.run.seed,
    }


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{name} {_plain(one)}" for name, one in value.items()) + ")"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _quantization(run: Run) -> str | None:
    """How the target's weights are quantised, None where they are not."""
    config = run.target.whole_config.to_dict().get("quantization_config")
    return None if config is None else str(config.get("quant_method", "in an unnamed way"))
