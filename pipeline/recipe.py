"""Recipes: strict, typed YAML that holds values and never import paths.

A recipe may name another one under `extends:` and override parts of it; the command line overrides both
(`train.learning_rate=5e-4`). An unknown key is an error that names the nearest valid one.
"""

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from drafthead.data.errors import InputError
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
SUFFIXES = {"k": 10**3, "M": 10**6, "B": 10**9}


def _count(value: object) -> object:
    """Read `200M`, `8k` or `1_000` as an integer."""
    if isinstance(value, str):
        text = value.strip().replace("_", "")
        scale = SUFFIXES.get(text[-1:], 1)
        try:
            return int(float(text[:-1] if scale > 1 else text) * scale)
        except (ValueError, OverflowError):
            return value
    return value


Count = Annotated[int, BeforeValidator(_count), Field(ge=1)]


def _off(value: object) -> object:
    """YAML reads a bare `off` as false."""
    return "off" if value is False else value


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RunConfig(Section):
    name: str | None = None
    """Folder below `dir`; the recipe's name unless given."""
    dir: str = "runs"
    seed: int = 0
    launch: str = "single"
    """A file of recipes/launch/ without `.yaml`: how many processes, which DeepSpeed stage."""


class SourceConfig(Section):
    source: str
    """`builtin`, `builtin:self-written`, `self`, a JSONL file, or a Hugging Face data set id."""
    split: str = "train"
    """Of a Hugging Face data set."""
    limit: Count | None = None
    share: float | None = Field(default=None, gt=0, le=1)
    """Part of all training prompts that this source gives; needs `prompts.limit`."""


class SelfPromptsConfig(Section):
    """How the target writes prompts itself (source `self`; the Magpie method)."""

    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=0.95, gt=0, le=1)
    max_new_tokens: Count = 200


class PromptsConfig(Section):
    sources: list[SourceConfig]
    limit: Count | None = None
    """Training prompts in all."""
    heldout: list[SourceConfig] | float = Field(default=0.02)
    """Sources of held-out prompts, or the share of the training sources that is held out."""
    heldout_limit: Count | None = None
    self_written: SelfPromptsConfig = SelfPromptsConfig()
    max_prompt_chars: Count = 16_000

    @model_validator(mode="before")
    @classmethod
    def _accept_one_source(cls, value: object) -> object:
        """`prompts: data.jsonl` is the same as `prompts: {sources: [{source: data.jsonl}]}`."""
        return {"sources": [{"source": value}]} if isinstance(value, str) else value


class RespondConfig(Section):
    engine: Annotated[Literal["vllm", "transformers", "off"], BeforeValidator(_off)] = "vllm"
    """`off` takes the answers that the conversations already hold."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """`auto`: bfloat16, but float32 on a CPU that multiplies it faster."""
    temperature: float = Field(default=0.0, ge=0)
    max_new_tokens: Count = 256
    max_model_len: Count = 2048
    shipped_answers: bool = True
    """Take answers that come with the built-in prompts where this target wrote them with these settings."""
    max_num_seqs: Count = 512
    kv_cache_gib: int = Field(default=4, ge=1)


class EncodeConfig(Section):
    max_length: Count = 2048
    template_kwargs: dict[str, Any] = {}
    """Given to the chat template exactly as the server will (`enable_thinking`, ...)."""
    turns: Literal["last"] | None = None
    """`last` trains on the last assistant turn of each conversation alone, all of them are trained on unless given."""


DEFAULT_DRAFT_VOCAB = 32_000


class DraftVocabConfig(Section):
    size: Count | None = None
    """Tokens that the head can draft: 32,000 unless given, and those of `train.init_from` in a warm start."""


class CaptureConfig(Section):
    mode: Literal["store", "online"] = "store"
    """`online` computes the states while the head trains and writes none: for when the disk is too small, or each row
    is seen about once. Every epoch and every held-out walk runs the target again."""
    backend: Literal["transformers", "vllm"] = "transformers"
    """`vllm` computes the states with the engine that serves, for targets that transformers cannot spread well."""
    dtype: Literal["bfloat16", "float16", "float32", "int8", "fp8"] = "bfloat16"
    """Of the stored states; `int8` and `fp8` (e4m3) take at most half of the disk. The target computes in it (for these
    two in bfloat16), or in float32 on a CPU that multiplies that faster."""
    max_bad_share: float = Field(default=0.01, ge=0, lt=1)
    """Rows whose states cannot be used are left out and counted; above this share of all rows capture and training
    stop."""
    last: Literal["read", "all"] = "read"
    """Last states of those positions that the head reads, or of all: one store for heads of every type."""
    aux_layers: list[int] | None = None
    """Layer ids (state ENTERING that layer); (2, N // 2, N - 3) unless given. `[]` where only the last state is read
    (Medusa, MTP)."""
    batch_tokens: Count = 4096
    shard_tokens: Count = 65_536


class Eagle3Config(Section):
    type: Literal["eagle3"] = "eagle3"
    init_from_target: bool = True
    """Layer from the target's last layer, fc the identity on the last aux state."""
    train_lm_head: bool = True
    """False keeps the target's rows: a third less work a step, and about the same acceptance in short runs."""
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


class LoraConfig(Section):
    """Medusa-2: low-rank adapters of the target, trained with the heads and merged into the target that is served."""

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32, gt=0)
    """An adapter's product weighs alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    targets: list[str] = Field(default=["q_proj", "k_proj", "v_proj", "o_proj"], min_length=1)
    """Matrices of every layer that get an adapter."""
    learning_rate: float = Field(default=1e-4, gt=0)
    """Of the adapters, on the schedule of `train.learning_rate`, which is the heads'."""
    target_weight: float = Field(default=1.0, gt=0)
    """Weight of the target's own loss, which holds it to what it was."""
    heads_weight: float = Field(default=0.2, gt=0)


class MedusaConfig(Section):
    type: Literal["medusa"]
    num_heads: int = Field(default=3, ge=1, le=16)
    """Draft tokens ahead, one head each; vLLM drafts at most as many."""
    num_layers: int = Field(default=1, ge=1, le=8)
    """Residual blocks of each head."""
    bias: bool = False
    """Whether a block adds a bias, as the original implementation's do."""
    shared_lm_head: bool = True
    """One lm_head for all heads (of the draft vocabulary); else each has its own, of the full vocabulary."""
    train_lm_head: bool = False
    """False keeps the target's rows; only a shared lm_head can be kept."""
    lora: LoraConfig | None = None
    """Medusa-2, which changes the target; Medusa-1 (the target stays as it is) unless given."""


class MTPConfig(Section):
    type: Literal["mtp"]
    layout: Literal["auto", "mimo", "qwen3_5", "deepseek"] = "auto"
    """Which architecture's MTP layer it is served as; `auto` goes by the target's."""
    start: Literal["fresh", "native"] = "fresh"
    """A new layer, begun as the target's last one, or the MTP layer that the target's checkpoint holds."""
    train_lm_head: Literal[False] = False
    """vLLM serves an MTP layer with the target's lm_head."""


HEAD_CONFIGS: dict[str, type[Section]] = {"eagle3": Eagle3Config, "medusa": MedusaConfig, "mtp": MTPConfig}


def _eagle3_unless_said(value: object) -> object:
    return {"type": "eagle3", **value} if isinstance(value, dict) else value


HeadConfig = Annotated[
    Annotated[Eagle3Config | MedusaConfig | MTPConfig, Field(discriminator="type")],
    BeforeValidator(_eagle3_unless_said),
]


def lora_of(head: HeadConfig) -> LoraConfig | None:
    """How the target is trained with the head; None where it stays as it is."""
    return head.lora if isinstance(head, MedusaConfig) else None


ChainsKept = Literal["all", "surviving", "served"]


class TrainConfig(Section):
    init_from: str | None = None
    """Folder of a published head to start from, in vLLM's or speculators' layout; its draft vocabulary is kept."""
    tokens: Count
    """Training tokens in all, over as many epochs as that takes."""
    batch_tokens: Count = 8192
    """Tokens of one micro batch on one process."""
    accumulation: Count = 1
    depth: int = Field(default=7, ge=1, le=16)
    """Training-time-test steps: how many draft tokens ahead the head is trained; `num_heads` of a Medusa head."""
    loss: Literal["soft_ce", "kl", "lk", "lk_hybrid", "hard_ce"] = "soft_ce"
    loss_vocab: Count | None = None
    """The loss of a micro batch looks at so many draft tokens only, which is cheaper by as much: the most frequent,
    those in its answers, and others drawn anew (pipeline/loss_vocab.py); for heads that keep the target's lm_head.
    Held-out walks and everything after look at all that the head drafts."""
    step_weight: float = Field(default=0.8, gt=0)
    """Step j of the unroll weighs step_weight ** j."""
    chains: ChainsKept = "all"
    """Draft chains that the later steps are trained on: those of `all` slots, the `surviving` ones, which have been
    right so far, or of these the ones that `served` rounds would run: a slot within a run of right drafts starts no
    round. Each takes less time a step than the one before."""
    context_weight: float = Field(default=0.0, ge=0)
    """Weight of slots that predict a prompt's token, against 1 for the target's own: more to learn from per state."""
    learning_rate: float = Field(default=1e-4, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0)
    warmup_ratio: float = Field(default=0.015, ge=0, lt=1)
    max_grad_norm: float = Field(default=0.5, gt=0)
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Of matrix products; weights and moments are fp32. `auto`: bf16, but fp32 on a CPU that multiplies it faster."""
    evaluate_every: Count = 500
    """Optimiser steps between held-out walks."""
    checkpoint_every: Count = 500
    keep_checkpoints: Count = 2
    keep: Literal["best", "last"] = "best"
    """Which head a training ends with: the one with the longest held-out walk of those that were evaluated on the way
    (every `evaluate_every` steps, and the last), or the last. The walks are taken anyway, and a head that has seen its
    rows too often is not kept; where few answers are held out, `last` is free of the luck of choosing by them."""
    log_every: Count = 10


class TreeConfig(Section):
    """A static tree of drafts, searched from accuracies on held-out answers; with `dynamic` another kind beside it."""

    nodes: Count = 63
    """Nodes at most; the target runs that many tokens and one more a round."""
    depth: int = Field(default=4, ge=1, le=16)
    """At most so deep, and at most as deep as a Medusa head has heads."""
    dynamic: bool = False
    """Also grow a tree in every round by the head's own confidence (EAGLE-2), with the same bounds."""
    width: int = Field(default=10, ge=1, le=32)
    """Nodes of a level that a growing tree goes on from, and tokens that it considers behind each."""


class TypicalConfig(Section):
    """Accept a draft token where p > min(epsilon, delta * exp(-entropy)); not lossless."""

    epsilon: float = Field(default=0.09, ge=0, le=1)
    delta: float = Field(default=0.3, ge=0)


class EvalConfig(Section):
    k: int = Field(default=3, ge=1, le=16)
    temperature: float = Field(default=0.0, ge=0)
    temperatures: list[Annotated[float, Field(ge=0)]] = []
    """Also evaluate at these; the report's own numbers are those of `temperature`."""
    max_new_tokens: Count = 96
    limit: Count | None = None
    """Held-out prompts used, spread over the domains."""
    batch_size: Count = 16
    """Requests decoded together; prompts are padded to the longest of a batch, so more is not faster on a CPU."""
    dtype: Literal["bfloat16", "float16", "float32"] = "float32"
    tree: TreeConfig | None = None
    """Evaluate a tree of drafts as well; vLLM serves chains, so its numbers stand apart."""
    typical: TypicalConfig | None = None
    """Evaluate typical acceptance as well, at the same temperature; its text is not the target's own."""


class ExportConfig(Section):
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    k: int = Field(default=3, ge=1, le=16)
    """`num_speculative_tokens` in speculative_config.json."""


class ServeCheckConfig(Section):
    k: list[int] = [3, 5]
    limit: Count | None = 33
    """Held-out prompts served, spread over the domains."""
    timed_prompts: Count = 5
    """Of these, how many are decoded one by one for the batch-1 time."""
    max_new_tokens: Count = 96
    dtype: Literal["bfloat16", "float16", "float32"] = "float32"
    kv_cache_gib: int = Field(default=2, ge=1)
    max_model_len: Count = 2048
    tolerance: float = Field(default=0.02, gt=0)
    """Largest |served - predicted| of any position."""


class TrackingConfig(Section):
    project: str = "drafthead"


class Recipe(Section):
    target: str
    """A folder, a hub id, or `builtin:smollm2-135m-instruct`."""
    head: HeadConfig = Eagle3Config()
    run: RunConfig = RunConfig()
    prompts: PromptsConfig
    respond: RespondConfig = RespondConfig()
    encode: EncodeConfig = EncodeConfig()
    draft_vocab: DraftVocabConfig = DraftVocabConfig()
    capture: CaptureConfig = CaptureConfig()
    train: TrainConfig
    eval: EvalConfig = EvalConfig()
    export: ExportConfig = ExportConfig()
    serve_check: ServeCheckConfig = ServeCheckConfig()
    tracking: TrackingConfig = TrackingConfig()

    @model_validator(mode="before")
    @classmethod
    def _depth_of_medusa(cls, values: Any) -> Any:
        """A Medusa head is trained as deep as it has heads, so the depth need not be said."""
        head, train = (values.get(name) if isinstance(values, dict) else None for name in ("head", "train"))
        if not isinstance(head, dict) or not isinstance(train, dict) or head.get("type") != "medusa":
            return values
        return {
            **values,
            "train": {"depth": head.get("num_heads", MedusaConfig.model_fields["num_heads"].default), **train},
        }

    @model_validator(mode="after")
    def _check_medusa(self) -> "Recipe":
        if not isinstance(self.head, MedusaConfig):
            return self
        count = self.head.num_heads
        if self.train.depth != count:
            raise ValueError(
                f"train.depth={self.train.depth}: head.num_heads is {count}, and each Medusa head is trained; "
                f"set train.depth={count}, or leave it out"
            )
        asked = {"eval.k": self.eval.k, "export.k": self.export.k, "serve_check.k": max(self.serve_check.k, default=1)}
        for name, k in asked.items():
            if k > count:
                raise ValueError(f"{name}={k}: a Medusa head drafts at most head.num_heads={count} tokens")
        if not self.head.shared_lm_head and not self.head.train_lm_head:
            raise ValueError(
                "head.train_lm_head=False: separate lm_heads that all stay the target's are one shared lm_head; "
                "set head.train_lm_head=true or head.shared_lm_head=true"
            )
        return self

    @model_validator(mode="after")
    def _check_lora(self) -> "Recipe":
        if lora_of(self.head) is not None and self.run.launch != "single":
            raise ValueError(
                f"run.launch={self.run.launch}: head.lora (Medusa-2) trains in one process; set run.launch=single, or "
                f"leave head.lora out"
            )
        return self

    @model_validator(mode="after")
    def _check_loss_vocab(self) -> "Recipe":
        if self.train.loss_vocab is not None and self.head.train_lm_head:
            raise ValueError(
                f"train.loss_vocab={self.train.loss_vocab}: an lm_head that is trained needs all of its rows in the "
                f"loss; set head.train_lm_head=false, or a smaller draft_vocab.size"
            )
        return self

    @model_validator(mode="after")
    def _check_aux_layers(self) -> "Recipe":
        if self.capture.aux_layers == [] and isinstance(self.head, Eagle3Config):
            raise ValueError(
                "capture.aux_layers=[]: an EAGLE-3 head reads captured layers; list their ids or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_online(self) -> "Recipe":
        if self.capture.mode == "online" and self.capture.dtype in ("int8", "fp8"):
            raise ValueError(
                f"capture.dtype={self.capture.dtype}: made smaller for the disk, and capture.mode=online writes "
                f"nothing; set capture.dtype=bfloat16"
            )
        if self.capture.mode == "online" and self.capture.backend == "vllm":
            raise ValueError(
                "capture.backend=vllm: capture.mode=online runs the target in the training process; set "
                "capture.mode=store, or capture.backend=transformers"
            )
        return self

    @model_validator(mode="after")
    def _check_typical(self) -> "Recipe":
        if self.eval.typical is not None and self.eval.temperature == 0:
            raise ValueError("eval.typical: typical acceptance is a rule for sampling; set eval.temperature above 0")
        return self


# ---- reading ---------------------------------------------------------------------------------------------


def find_recipe(name: str) -> Path:
    """Return the file of a recipe given as a path or as a name below recipes/ (`eagle3`, `qwen3_8b/eagle3`)."""
    given = Path(name)
    candidates = [given] if given.suffix in (".yaml", ".yml") else [RECIPES / f"{name}.yaml", given]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    known = [str(path.relative_to(RECIPES).with_suffix("")) for path in sorted(RECIPES.rglob("*.yaml"))]
    known = [name for name in known if not name.startswith("launch/")]
    raise InputError(f"{name}: no such recipe; give a YAML file or one of {', '.join(known)}")


def load_recipe(name: str, overrides: list[str] | None = None) -> Recipe:
    """Read, merge, override and check a recipe.

    Raises:
        InputError: Naming the file and the field, and the nearest valid key for an unknown one.
    """
    path = find_recipe(name)
    values = _read_extended(path, ())
    for override in overrides or []:
        _apply_override(values, override)
    recipe = check_recipe(values, str(path))
    if recipe.run.name is None:
        recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update={"name": run_name(path)})})
    return recipe


def run_name(path: Path) -> str:
    """`recipes/eagle3.yaml` -> `eagle3`, `recipes/qwen3_8b/eagle3.yaml` -> `qwen3_8b-eagle3`."""
    resolved = path.resolve()
    inside = resolved.relative_to(RECIPES) if resolved.is_relative_to(RECIPES) else Path(path.name)
    return "-".join(inside.with_suffix("").parts)


def check_recipe(values: dict[str, Any], where: str) -> Recipe:
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise InputError(f"{where}: {'; '.join(_explain(problem) for problem in error.errors())}") from None


def _read_extended(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        raise InputError(f"{path}{line}: not valid YAML ({getattr(error, 'problem', error)})") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: not UTF-8 text") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: a recipe is a mapping of sections, this is {type(values).__name__}")
    parent = values.pop("extends", None)
    if parent is None:
        return values
    parent_path = (path.parent / str(parent)).resolve()
    if not parent_path.is_file():
        raise InputError(f"{path}: extends: {parent_path} does not exist")
    if parent_path in (*seen, path.resolve()):
        raise InputError(f"{path}: extends: {parent} leads back to itself")
    return _merge(_read_extended(parent_path, (*seen, path.resolve())), values)


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merges = both and not (key == "head" and _is_another_head(merged[key], value))
        merged[key] = _merge(merged[key], value) if merges else value
    return merged


def _is_another_head(base: dict[str, Any], over: dict[str, Any]) -> bool:
    """A head of another type has other settings: it replaces the one it extends."""
    return "type" in over and over["type"] != base.get("type", "eagle3")


def _apply_override(values: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    if not equals or not dotted:
        raise InputError(f"{override}: an override is written key=value, for instance train.tokens=2M")
    keys = dotted.split(".")
    node = values
    for key in keys[:-1]:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise InputError(f"{override}: {key} holds a value, not a section")
    try:
        node[keys[-1]] = yaml.safe_load(text)
    except yaml.YAMLError:
        raise InputError(f"{override}: the value is not valid YAML; quote it") from None


def _explain(problem: Any) -> str:
    location = problem["loc"][:1] + problem["loc"][2:] if _is_in_head(problem["loc"]) else problem["loc"]
    field = ".".join(str(part) for part in location if not str(part).startswith("list["))
    if problem["type"] == "union_tag_invalid":
        return f"{field}.type={problem['ctx']['tag']!r}: give one of {', '.join(HEAD_CONFIGS)}"
    if problem["type"] == "extra_forbidden":
        valid = _keys_beside(problem["loc"])
        near = difflib.get_close_matches(str(problem["loc"][-1]), valid, n=1, cutoff=0.0)
        return f"unknown key {field}; did you mean {'.'.join([*field.split('.')[:-1], *near])}?"
    if problem["type"] == "missing":
        return f"{field} is missing"
    if problem["type"] == "value_error" and not field:  # settings of several sections; the message names them
        return str(problem["ctx"]["error"])
    return f"{field}={problem['input']!r}: {problem['msg'].lower()}"


def _is_in_head(location: tuple[Any, ...]) -> bool:
    """pydantic puts the head's type between `head` and its key."""
    return len(location) > 2 and location[0] == "head" and location[1] in HEAD_CONFIGS


def _keys_beside(location: tuple[Any, ...]) -> list[str]:
    """Names of the fields of the section that `location` (of an unknown key) lies in."""
    if _is_in_head(location):
        model: type[BaseModel] = HEAD_CONFIGS[location[1]]
        location = location[2:]
    else:
        model = Recipe
    for part in location[:-1]:
        if isinstance(part, str) and part in model.model_fields:
            found = _section_of(model.model_fields[part].annotation)
            model = found or model
    return list(model.model_fields)


def _section_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        if found := _section_of(inner):
            return found
    return None
