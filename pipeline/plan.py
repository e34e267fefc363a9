"""What a run would do: stages, sizes, disk, memory and time, before anything is done (`--plan`)."""

import shutil
from pathlib import Path
from typing import Any

import torch
from drafthead.data.errors import InputError
from drafthead.data.sources import PROMPTS, SELF_WRITTEN, looks_like_file
from drafthead.data.store_format import LAST_LEAD
from drafthead.eval.layer_kinds import NO_TREES, runs_trees
from drafthead.pipeline.cache import cache_dir
from drafthead.pipeline.capture import MOST_OF_DISK, check_disk, last_kept, store_info
from drafthead.pipeline.heads.build import check_target
from drafthead.pipeline.heads.warm_start import check_warm_start, draft_vocab_size
from drafthead.pipeline.prompts import DEFAULT_SELF_PROMPTS, SELF
from drafthead.pipeline.recipe import MedusaConfig, MTPConfig, Recipe, SourceConfig, lora_of
from drafthead.pipeline.run_dir import Run
from drafthead.pipeline.servable import check_served
from drafthead.pipeline.shipped import ShippedAnswers
from drafthead.pipeline.stages import STAGES
from drafthead.pipeline.target import Target, open_target

RATES_CPU = {"respond": 500.0, "capture": 1400.0, "train": 3700.0}
"""Tokens/s of the built-in target on two CPU cores (docs/performance.md); other targets scale with their size. What
rows begin with alike is captured once, and counts here for every row."""
REFERENCE_PARAMETERS = 135e6
MEAN_PROMPT_TOKENS = 110
UNKNOWN_SOURCE_PROMPTS = 100_000


def check_head(recipe: Recipe, target: Target) -> None:
    """Refuse, before any work, a head that cannot be made for the target.

    Raises:
        InputError: See `check_warm_start`, `check_target`, `check_served` and `Target.resolve_aux_layers`.
        GateError: See `check_target`.
    """
    target.resolve_aux_layers(recipe.capture.aux_layers)
    check_warm_start(recipe, target)
    check_target(recipe.head, draft_vocab_size(recipe, target), target)
    check_served(recipe.head.type, target)
    # the evaluation gives its prompts no more room than the server has
    if recipe.eval.tree is not None and not runs_trees(target.config, recipe.serve_check.max_model_len):
        raise InputError(NO_TREES)


def make_plan(recipe: Recipe) -> dict[str, Any]:
    """Estimate every stage; the numbers of prompts of files and hub data sets are counted or assumed, and marked so.

    Raises:
        InputError: The target or a setting cannot be used.
    """
    target = open_target(recipe.target)
    check_head(recipe, target)
    prompts, exact = count_prompts(recipe)
    answers = prompts * recipe.respond.max_new_tokens
    info = store_info(recipe, target)
    tokens, last_states = most_states(recipe, prompts)
    on_gpu = torch.cuda.is_available()
    size = num_parameters(recipe, target)
    layers_disk, disk = (info.num_bytes(tokens, last) if writes_states(recipe) else 0 for last in (0, last_states))
    free = shutil.disk_usage(existing(cache_dir())).free
    run = Run(path=Path(recipe.run.dir) / str(recipe.run.name), recipe=recipe, stages=STAGES)
    written = (prompts - count_shipped(run)) * recipe.respond.max_new_tokens
    seconds = {} if on_gpu else estimate_seconds(recipe, size["target"], written, tokens)
    return {
        "recipe": recipe.run.name,
        "run_dir": str(run.path),
        "target": {
            "path": str(target.path),
            "layers": target.num_layers,
            "hidden": target.hidden_size,
            "tensors": target.tensor_names,
        },
        "aux_layer_ids": info.layer_ids,
        "prompts": {"count": prompts, "exact": exact},
        "answer_tokens_at_most": answers,
        "row_tokens": tokens,
        "parameters": size,
        "disk": {
            "states_gb": round(disk / 1e9, 2),
            "layers_gb": round(layers_disk / 1e9, 2),
            "last_states": last_states,
            "dtype": info.dtype,
            "bytes_per_token": round(disk / tokens, 1),
            "free_gb": round(free / 1e9, 1),
            "fits": disk <= MOST_OF_DISK * free,
        },
        "memory": {"training_gb": round(training_bytes(recipe, target, size) / 1e9, 2)},
        "stages": [
            {"name": name, "finished": run.is_finished(name), "estimated_s": seconds.get(name)} for name in STAGES
        ],
    }


def most_states(recipe: Recipe, prompts: int) -> tuple[int, int]:
    """Tokens, and last states kept, of so many prompts if every answer is as long as it may be."""
    answer = recipe.respond.max_new_tokens
    tokens = prompts * min(recipe.encode.max_length, MEAN_PROMPT_TOKENS + answer)
    return tokens, tokens if last_kept(recipe) == "all" else min(tokens, prompts * (answer + LAST_LEAD))


def writes_states(recipe: Recipe) -> bool:
    return recipe.capture.mode == "store"


def check_states(recipe: Recipe, target: Target) -> None:
    """Refuse, before any work, a run whose states would not fit on the disk if every answer is as long as it may be.

    Not where the prompts are only assumed: the capture stage counts, and refuses before the target is loaded.

    Raises:
        InputError: See `check_disk`.
    """
    prompts, exact = count_prompts(recipe)
    run = Run(path=Path(recipe.run.dir) / str(recipe.run.name), recipe=recipe, stages=STAGES)
    if exact and writes_states(recipe) and not run.is_finished("capture"):
        check_disk(cache_dir(), store_info(recipe, target), *most_states(recipe, prompts))


def count_prompts(recipe: Recipe) -> tuple[int, bool]:
    """Training prompts in all, and whether that is a count or partly an assumption."""
    counts = [count_source(source) for source in recipe.prompts.sources]
    total = sum(count for count, _ in counts)
    if recipe.prompts.limit is not None:
        total = min(total, recipe.prompts.limit)
    return total, all(exact for _, exact in counts)


def count_source(source: SourceConfig) -> tuple[int, bool]:
    path = Path(source.source).expanduser()
    if source.source == "builtin:self-written":
        count, exact = count_lines(PROMPTS / "train" / SELF_WRITTEN), True
    elif source.source == "builtin":
        files = (file for file in (PROMPTS / "train").glob("*.jsonl") if file.name != SELF_WRITTEN)
        count, exact = sum(count_lines(file) for file in files), True
    elif source.source == SELF:
        count, exact = DEFAULT_SELF_PROMPTS, True
    elif looks_like_file(source.source):
        if not path.is_file():
            raise InputError(f"prompts.sources: {source.source}: no such file")
        count, exact = count_lines(path), True
    else:
        count, exact = UNKNOWN_SOURCE_PROMPTS, False
    return (count if source.limit is None else min(count, source.limit)), exact or source.limit is not None


def count_shipped(run: Run) -> int:
    """Training prompts at most whose answers come with them."""
    sources = [one for one in run.recipe.prompts.sources if one.source == "builtin:self-written"]
    asked = sum(count_source(source)[0] for source in sources)
    return min(asked, len(ShippedAnswers.of(run).completions)) if asked else 0


def count_lines(path: Path) -> int:
    with open(path, "rb") as file:
        return sum(1 for line in file if line.strip())


def num_parameters(recipe: Recipe, target: Target) -> dict[str, int]:
    """Parameters of the target (a Llama-shaped estimate) and trainable ones of the head."""
    config = target.config
    size, middle = config.hidden_size, config.intermediate_size
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    width = getattr(config, "head_dim", None) or size // heads
    attention, mlp = size * width * (2 * heads + 2 * groups), 3 * size * middle
    of_target = config.num_hidden_layers * (attention + mlp) + config.vocab_size * size
    draft_vocab = draft_vocab_size(recipe, target)
    num_lm_heads = 1
    if isinstance(recipe.head, MedusaConfig):
        head = recipe.head.num_heads * recipe.head.num_layers * size * size
        num_lm_heads = 1 if recipe.head.shared_lm_head else recipe.head.num_heads
    elif isinstance(recipe.head, MTPConfig):
        head = 2 * size * size + attention + mlp
    else:
        num_aux = 3 if recipe.capture.aux_layers is None else len(recipe.capture.aux_layers)
        head = num_aux * size * size + attention + size * width * (heads + 2 * groups) + mlp
    return {"target": of_target, "head": head + (num_lm_heads * draft_vocab * size if recipe.head.train_lm_head else 0)}


def training_bytes(recipe: Recipe, target: Target, size: dict[str, int]) -> int:
    """Weights, gradients and moments in fp32, frozen embeddings, and the logits of one micro batch."""
    head = size["head"]
    draft_vocab = draft_vocab_size(recipe, target)
    frozen = (target.vocab_size + draft_vocab) * target.hidden_size * 2
    logits = recipe.train.batch_tokens * draft_vocab * (4 + 2 * recipe.train.depth)
    states = recipe.train.batch_tokens * target.hidden_size * 16 * recipe.train.depth
    return int(head * 16 + frozen + logits + states) + joint_bytes(recipe, target, size["target"])


def joint_bytes(recipe: Recipe, target: Target, parameters: int) -> int:
    """What training the target too takes: its weights, and what its layers keep of a micro batch for the gradient."""
    if lora_of(recipe.head) is None:
        return 0
    kept = target.num_layers * (10 * target.hidden_size + 4 * target.config.intermediate_size)
    return int(4 * (parameters + recipe.train.batch_tokens * kept))


def estimate_seconds(recipe: Recipe, target_parameters: int, answers: int, tokens: int) -> dict[str, int]:
    """Of the stages that take long, for so many tokens of answers to write and of rows."""
    scale = target_parameters / REFERENCE_PARAMETERS
    train = recipe.train.depth / 3 / RATES_CPU["train"]
    if lora_of(recipe.head) is not None:
        train += 2 / RATES_CPU["capture"]  # the target, forward and backward
    return {
        "respond": round(answers * scale / RATES_CPU["respond"]),
        "capture": round(tokens * scale / RATES_CPU["capture"]),
        "train": round(recipe.train.tokens * scale * train),
    }


def existing(path: Path) -> Path:
    """The nearest folder above that exists."""
    while not path.exists():
        path = path.parent
    return path


def name_tensors(names: dict[str, str]) -> str:
    """One line that says under which names the target's embedding, lm_head and final norm were found."""
    tied = " (tied)" if names["lm_head"] == names["embedding"] else ""
    return f"embedding {names['embedding']}, lm_head {names['lm_head']}{tied}, final norm {names['final norm']}"


def render_plan(plan: dict[str, Any]) -> str:
    prompts, disk = plan["prompts"], plan["disk"]
    lines = [
        f"recipe    {plan['recipe']} -> {plan['run_dir']}",
        f"target    {plan['target']['path']} ({plan['parameters']['target'] / 1e6:,.0f} M parameters, "
        f"{plan['target']['layers']} layers, hidden {plan['target']['hidden']})",
        f"tensors   {name_tensors(plan['target']['tensors'])}",
        f"states    layers {plan['aux_layer_ids']} and the last one, {disk['dtype']}, "
        f"{disk['bytes_per_token']:,} bytes/token",
        f"prompts   {prompts['count']:,}{'' if prompts['exact'] else ' (assumed: the source is not counted yet)'}",
        f"answers   at most {plan['answer_tokens_at_most']:,} tokens",
        f"disk      {disk['states_gb']:,} GB of states, {disk['layers_gb']:,} GB of these the layers'; "
        f"{disk['free_gb']:,} GB free{'' if disk['fits'] else ': they do not fit, the run will be refused'}",
        f"training  {plan['parameters']['head'] / 1e6:.1f} M parameters, about {plan['memory']['training_gb']} GB",
        "",
    ]
    for stage in plan["stages"]:
        time = (
            "done" if stage["finished"] else "" if stage["estimated_s"] is None else f"about {stage['estimated_s']} s"
        )
        lines.append(f"  {stage['name']:<12} {time}")
    return "\n".join(lines)
