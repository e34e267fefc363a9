"""The stages of a run, in order: what each reads, which settings it depends on, and who does it."""

from typing import Any

from drafthead.pipeline.capture import capture, last_kept
from drafthead.pipeline.encode import encode, make_draft_vocab
from drafthead.pipeline.evaluate import evaluate
from drafthead.pipeline.export.stage import export
from drafthead.pipeline.heads.warm_start import warm_start_hash
from drafthead.pipeline.prompts import collect_prompts, file_hashes
from drafthead.pipeline.recipe import Recipe
from drafthead.pipeline.respond import respond
from drafthead.pipeline.run_dir import Stage
from drafthead.pipeline.serve_check import serve_check
from drafthead.pipeline.shipped import shipped_hash
from drafthead.pipeline.train import train


def _respond_settings(recipe: Recipe) -> dict[str, Any]:
    """What changes the answers: not how many are written at once."""
    settings = recipe.respond.model_dump(exclude={"max_num_seqs", "kv_cache_gib"})
    return {**settings, "template_kwargs": recipe.encode.template_kwargs, "seed": recipe.run.seed}


def _prompts_settings(recipe: Recipe) -> dict[str, Any]:
    heldout = recipe.prompts.heldout
    sources = [*recipe.prompts.sources, *([] if isinstance(heldout, float) else heldout)]
    uses_self = any(source.source == "self" for source in sources)
    writer: dict[str, Any] = {}
    if uses_self:
        writer = {
            "respond": recipe.respond.model_dump(include={"engine", "dtype"}),
            "template_kwargs": recipe.encode.template_kwargs,
        }
    return {**recipe.prompts.model_dump(), "seed": recipe.run.seed, **writer}


def _encode_settings(recipe: Recipe) -> dict[str, Any]:
    """`turns` came later: not used, it changes no key. A null among the template's arguments is one that it sees."""
    return recipe.encode.model_dump(exclude=None if recipe.encode.turns else {"turns"})


def _capture_settings(recipe: Recipe) -> dict[str, Any]:
    """`backend` came later: transformers, from which vLLM differs in the last bits, changes no key."""
    names = {"dtype", "aux_layers"} | ({"backend"} if recipe.capture.backend == "vllm" else set())
    return {**recipe.capture.model_dump(include=names), "last": last_kept(recipe)}


def _train_settings(recipe: Recipe) -> dict[str, Any]:
    return {
        "head": recipe.head.model_dump(exclude_none=True),  # an option that came later and is not used changes no key
        "train": recipe.train.model_dump(exclude={"log_every", "keep_checkpoints", "checkpoint_every"}),
        "launch": recipe.run.launch,
        "seed": recipe.run.seed,
    }


def _eval_settings(recipe: Recipe) -> dict[str, Any]:
    """`temperatures` came later: not used, it changes no key."""
    settings = recipe.eval.model_dump(exclude=None if recipe.eval.temperatures else {"temperatures"})
    return {"eval": settings, "dtype": recipe.export.dtype}


STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage(
            name="prompts",
            reads=(),
            settings=_prompts_settings,
            work=collect_prompts,
            shared=True,
            version=2,
            extra=file_hashes,
        ),
        Stage(
            name="respond",
            reads=("prompts",),
            settings=_respond_settings,
            work=respond,
            shared=True,
            version=2,
            extra=shipped_hash,
        ),
        Stage(
            name="encode",
            reads=("prompts", "respond"),
            settings=_encode_settings,
            work=encode,
            shared=True,
            version=2,
        ),
        Stage(
            name="draft-vocab",
            reads=("encode",),
            settings=lambda recipe: recipe.draft_vocab,
            work=make_draft_vocab,
            shared=True,
            extra=lambda run: warm_start_hash(run.recipe),
        ),
        Stage(
            name="capture",
            reads=("encode",),
            settings=_capture_settings,
            work=capture,
            shared=True,
            version=2,
            extra=lambda run: "online" if run.recipe.capture.mode == "online" else None,
        ),
        Stage(
            name="train",
            reads=("encode", "draft-vocab", "capture"),
            settings=_train_settings,
            work=train,
            version=3,
        ),
        Stage(
            name="eval",
            reads=("prompts", "encode", "draft-vocab", "train"),
            settings=_eval_settings,
            work=evaluate,
        ),
        Stage(
            name="export",
            reads=("encode", "draft-vocab", "train", "eval"),
            settings=lambda recipe: recipe.export,
            work=export,
        ),
        Stage(
            name="serve-check",
            reads=("prompts", "draft-vocab", "train", "export"),
            settings=lambda recipe: recipe.serve_check,
            work=serve_check,
        ),
    )
}
