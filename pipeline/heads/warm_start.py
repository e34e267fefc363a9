"""Warm start (`train.init_from`): a head begun as a published one, its draft vocabulary kept.

Two layouts are read: vLLM's plain one (vllm/model_executor/models/{llama_eagle3,medusa,mimo_mtp}.py), which our own
exports have, and speculators' (vllm/transformers_utils/configs/speculators/algos.py). What the folder's config says
must be what the recipe and the target say, since a head that goes on under other norms, layers or rotary embedding
than it was made for has lost what it knew; each difference is an error before any work starts.

Shapes: U draft vocabulary, V target vocabulary.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from drafthead.data.draft_vocab import DraftVocab, check_size
from drafthead.data.errors import GateError, InputError
from drafthead.data.files import read_json
from drafthead.pipeline.export.rope import attention_scaling, inverse_frequencies, rope_of, text_config
from drafthead.pipeline.heads.base import FrozenTarget, Head
from drafthead.pipeline.heads.mtp_layouts import FAMILIES, LAYOUTS, MIMO, resolve_layout
from drafthead.pipeline.recipe import DEFAULT_DRAFT_VOCAB, MTPConfig, Recipe
from drafthead.pipeline.target import Target, hash_files
from torch import Tensor

PICKLED = ("*.bin", "*.pt")
LM_HEAD = "lm_head.weight"
LAYER_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
)


@dataclass(frozen=True)
class Checkpoint:
    """The folder of a published head; nothing but its config is read until asked for."""

    folder: Path
    config: dict[str, Any]
    """Flat, as vLLM reads it."""
    speculators_type: str | None
    """`speculators_model_type`; None in vLLM's plain layout."""

    @classmethod
    def open(cls, path: str) -> "Checkpoint":
        """Find the folder and read its config.

        Raises:
            InputError: No such folder, or no config.json that is an object in it.
        """
        folder = Path(path).expanduser()
        if not folder.is_dir():
            raise InputError(f"train.init_from={path}: no such folder; download the head first and give its folder")
        raw = read_json(folder / "config.json")
        if not isinstance(raw, dict):
            raise InputError(f"train.init_from={path}: config.json must be an object")
        kind = raw.get("speculators_model_type")
        if kind is None:
            return cls(folder, text_config(raw), None)
        layer = raw.get("transformer_layer_config")
        if not isinstance(layer, dict):
            raise InputError(f"train.init_from={path}: transformer_layer_config is missing from config.json")
        # the default that vLLM reads from a speculators folder, unlike from a plain one
        top = {"norm_before_residual": True, **{name: value for name, value in raw.items() if value is not None}}
        return cls(folder, {**layer, **top}, str(kind))

    @cached_property
    def _stored(self) -> Target:
        return Target(self.folder)

    @cached_property
    def _pickled(self) -> dict[str, Tensor]:
        """Tensors of a folder without safetensors; torch refuses anything in it that is no plain tensor."""
        found: dict[str, Tensor] = {}
        for path in self.files:
            found.update(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
        return found

    @cached_property
    def files(self) -> list[Path]:
        """Files that hold the tensors.

        Raises:
            InputError: There is none.
        """
        if any(self.folder.glob("*.safetensors")):
            return sorted({*self._stored.tensor_files.values()})
        found = sorted(path for pattern in PICKLED for path in self.folder.glob(pattern))
        if not found:
            raise InputError(f"train.init_from={self.folder}: no *.safetensors, *.bin or *.pt file in it")
        return found

    @cached_property
    def names(self) -> list[str]:
        is_safe = self.files[0].suffix == ".safetensors"
        return sorted(self._stored.tensor_files if is_safe else self._pickled)

    def tensor(self, name: str) -> Tensor:
        is_safe = self.files[0].suffix == ".safetensors"
        return self._stored.tensor(name) if is_safe else self._pickled[name]

    def find(self, bare: str) -> Tensor | None:
        """The tensor of this name, with or without `model.` before it."""
        name = next((name for name in (bare, f"model.{bare}") if name in self.names), None)
        return None if name is None else self.tensor(name)


@dataclass(frozen=True, kw_only=True)
class Published:
    """How one kind of head lies in published folders."""

    tensors: Callable[[Checkpoint, Target], Mapping[str, Tensor]]
    """What the folder holds of the head, by the head's own names."""
    settings: Callable[[Checkpoint, Target], dict[str, Any]]
    """Recipe fields that the folder's config decides."""
    vocab: Callable[[Checkpoint, Target], DraftVocab]
    speculators_types: tuple[str, ...] = ()
    """`speculators_model_type`s that are this kind of head."""
    sizes: tuple[str, ...] = LAYER_SIZES
    """Config keys that must equal the target's."""
    has_rope: bool = True


# ---- EAGLE-3 ---------------------------------------------------------------------------------------------

EAGLE3_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
NOT_OF_THE_HEAD = ("embed_tokens.", "verifier_", "rotary_emb.")
VOCAB_MAPS = ("d2t", "t2d")


def _rename_eagle3(checkpoint: Checkpoint, name: str) -> str | None:
    bare = name.removeprefix("model.")
    if bare in VOCAB_MAPS or bare.startswith(NOT_OF_THE_HEAD):
        return None
    return f"midlayer.{bare.removeprefix('layers.0.')}" if bare.startswith("layers.0.") else bare


def _eagle3_settings(checkpoint: Checkpoint, target: Target) -> dict[str, Any]:
    config, nested = checkpoint.config, checkpoint.config.get("eagle_config") or {}
    norms = {name: bool(config.get(name, False)) for name in EAGLE3_NORMS}
    # vLLM follows the nested one
    norms["norm_before_fc"] = bool(nested.get("norm_before_fc", norms["norm_before_fc"]))
    ids = config.get(LAYER_IDS) or nested.get(LAYER_IDS) or target.resolve_aux_layers(None)
    return {**{f"head.{name}": value for name, value in norms.items()}, "capture.aux_layers": ids}


def _eagle3_vocab(checkpoint: Checkpoint, target: Target) -> DraftVocab:
    return _vocab(checkpoint, target, checkpoint.find("d2t"))


# ---- Medusa ----------------------------------------------------------------------------------------------

FIRST_NAMES = re.compile(r"(\d+)\.(\d+)\.(linear\.)?(weight|bias)")
"""Of the original implementation (FasterDecoding): head, place in its sequence; the lm_head is the last."""


def _rename_medusa(checkpoint: Checkpoint, name: str) -> str | None:
    bare = name.replace("medusa_heads.", "").removeprefix("model.")
    if bare == "token_map":
        return None
    if old := FIRST_NAMES.fullmatch(bare):
        head, place, is_block, kind = old.groups()
        bare = f"blocks.{head}.layers.{place}.{kind}" if is_block else f"lm_heads.{head}.{kind}"
    if checkpoint.config.get("original_lm_head") and bare.startswith("lm_heads."):
        return LM_HEAD if bare == "lm_heads.0.weight" else None
    return bare


def _medusa_settings(checkpoint: Checkpoint, target: Target) -> dict[str, Any]:
    """As the tensors say; the config's count of heads is what vLLM overwrites."""
    names = [own for name in checkpoint.names if (own := _rename_medusa(checkpoint, name))]
    parts = [name.split(".") for name in names if name.startswith("blocks.")]
    return {
        "head.num_heads": len({part[1] for part in parts}),
        "head.num_layers": len({part[3] for part in parts}),
        "head.bias": any(part[-1] == "bias" for part in parts),
        "head.shared_lm_head": LM_HEAD in names,
    }


def _medusa_vocab(checkpoint: Checkpoint, target: Target) -> DraftVocab:
    token_map = checkpoint.find("token_map")
    d2t = None if token_map is None else token_map.long() - torch.arange(len(token_map))
    return _vocab(checkpoint, target, d2t)


# ---- MTP -------------------------------------------------------------------------------------------------

SPECULATORS_MTP = ("qwen3_5", "qwen3_next")
"""Layouts that speculators trains (models/mtp/model_definitions.py); it names their parts as MiMo does."""


def _mtp_tensors(checkpoint: Checkpoint, target: Target) -> dict[str, Tensor]:
    """The layer out of a checkpoint of the whole target, or alone as speculators writes it."""
    family = resolve_layout("auto", target)
    kind = checkpoint.config.get("model_type")
    theirs = "mimo" if kind == "mimo" else FAMILIES.get(str(kind))
    if theirs != family:
        raise _refusal(checkpoint, f"model_type {kind!r} there, whose MTP layer is not {family}'s, as the target's is")
    if checkpoint.speculators_type is None:
        layout, prefix = LAYOUTS[family], ""
    elif family in SPECULATORS_MTP:
        layout, prefix = MIMO, "model."
    else:
        raise _refusal(checkpoint, f"speculators knows no MTP layer of {family}'s arithmetic, as the target's is")
    start = layout.prefix.format(layer=target.num_layers)
    names = {f"{prefix}{name}": name for name in checkpoint.names if f"{prefix}{name}".startswith(start)}
    tensors = {name: checkpoint.tensor(stored) for name, stored in names.items()}
    return layout.from_checkpoint(tensors, target.num_layers)


PUBLISHED: dict[str, Published] = {
    "eagle3": Published(
        tensors=lambda checkpoint, target: _renamed(checkpoint, _rename_eagle3),
        settings=_eagle3_settings,
        vocab=_eagle3_vocab,
        speculators_types=("eagle3",),
    ),
    "medusa": Published(
        tensors=lambda checkpoint, target: _renamed(checkpoint, _rename_medusa),
        settings=_medusa_settings,
        vocab=_medusa_vocab,
        sizes=("vocab_size", "hidden_size"),
        has_rope=False,
    ),
    "mtp": Published(
        tensors=_mtp_tensors,
        settings=lambda checkpoint, target: {},
        vocab=lambda checkpoint, target: _vocab(checkpoint, target, None),
        speculators_types=("mtp",),
    ),
}
"""By `head.type`."""


# ---- before any work -------------------------------------------------------------------------------------


def check_warm_start(recipe: Recipe, target: Target) -> None:
    """Hold the folder that the recipe starts from, if any, against the recipe and the target.

    Raises:
        InputError: Naming the first thing that differs and both values.
    """
    if recipe.train.init_from is None:
        return
    checkpoint, published = Checkpoint.open(recipe.train.init_from), PUBLISHED[recipe.head.type]
    if isinstance(recipe.head, MTPConfig) and recipe.head.start == "native":
        raise InputError(
            f"head.start=native and train.init_from={checkpoint.folder}: a layer begins as one of them; "
            f"set head.start=fresh, or train.init_from=null"
        )
    kind = checkpoint.speculators_type
    if kind is not None and kind not in published.speculators_types:
        raise _refusal(checkpoint, f"speculators_model_type is {kind!r} there, head.type={recipe.head.type} here")
    of_target = target.config.to_dict()
    for name in published.sizes:
        there, here = checkpoint.config.get(name), of_target.get(name)
        if there is not None and here is not None and there != here:
            raise _refusal(checkpoint, f"{name} is {there} there and {here} in the target; start from another head")
    if published.has_rope:
        _check_rope(checkpoint, target)
    asked = {f"head.{name}": value for name, value in recipe.head.model_dump().items()}
    asked["capture.aux_layers"] = target.resolve_aux_layers(recipe.capture.aux_layers)
    for name, there in published.settings(checkpoint, target).items():
        if there != asked[name]:
            ours, theirs = json.dumps(asked[name]), json.dumps(there)
            raise _refusal(checkpoint, f"{name} is {theirs} there and {ours} in the recipe; set {name}={theirs}")
    kept_vocab(recipe, target)


def kept_vocab(recipe: Recipe, target: Target) -> DraftVocab | None:
    """The draft vocabulary of the head that the recipe starts from; None for a head of its own.

    Raises:
        InputError: `draft_vocab.size` asks for another size, or the map is not one of this target.
    """
    if recipe.train.init_from is None:
        return None
    checkpoint = Checkpoint.open(recipe.train.init_from)
    vocab = PUBLISHED[recipe.head.type].vocab(checkpoint, target)
    size = recipe.draft_vocab.size
    if size is not None and size != vocab.size:
        raise _refusal(
            checkpoint,
            f"draft_vocab.size={size}: the head has {vocab.size} draft tokens, now kept; set draft_vocab.size=null",
        )
    return vocab


def draft_vocab_size(recipe: Recipe, target: Target) -> int:
    """How many tokens the recipe's head will draft.

    Raises:
        InputError: More than the target has; see also `kept_vocab`.
    """
    kept = kept_vocab(recipe, target)
    if kept is not None:
        return kept.size
    asked = recipe.draft_vocab.size or min(DEFAULT_DRAFT_VOCAB, target.vocab_size)
    check_size(asked, len(target.tokenizer), target.vocab_size)
    return asked


def _vocab(checkpoint: Checkpoint, target: Target, d2t: Tensor | None) -> DraftVocab:
    """The map of these offsets [U]; without any the head drafts the whole vocabulary."""
    full = target.vocab_size
    if d2t is None:
        lm_head = checkpoint.find(LM_HEAD)
        if lm_head is not None and len(lm_head) != full:
            message = f"no vocabulary map in it, though lm_head has {len(lm_head)} rows and the target {full} tokens"
            raise _refusal(checkpoint, message)
        return DraftVocab(torch.zeros(full, dtype=torch.int64), torch.ones(full, dtype=torch.bool))
    target_ids_U = torch.arange(len(d2t)) + d2t.long()
    if int(target_ids_U.min()) < 0 or int(target_ids_U.max()) >= full:
        span = f"from {int(target_ids_U.min())} to {int(target_ids_U.max())}"
        raise _refusal(checkpoint, f"its vocabulary map runs {span}, the target has {full} tokens")
    if checkpoint.find(LM_HEAD) is None:
        raise _refusal(checkpoint, f"no {LM_HEAD} in it, though its map leads to {len(d2t)} of {full} tokens")
    t2d_V = torch.zeros(full, dtype=torch.bool)
    t2d_V[target_ids_U] = True
    return DraftVocab(d2t.long(), t2d_V)


def warm_start_hash(recipe: Recipe) -> str | None:
    """Hash of the files that the recipe starts from: other contents are another head."""
    if recipe.train.init_from is None:
        return None
    checkpoint = Checkpoint.open(recipe.train.init_from)
    return hash_files([checkpoint.folder / "config.json", *checkpoint.files])


def _check_rope(checkpoint: Checkpoint, target: Target) -> None:
    try:
        there = rope_of(checkpoint.config)
    except GateError as error:
        raise _refusal(checkpoint, f"{error.field}: {error.reason}") from None
    here = rope_of(text_config(read_json(target.path / "config.json")))
    ours, theirs = (torch.tensor(inverse_frequencies(rope, target.head_dim)) for rope in (here, there))
    same = ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=2e-5, atol=0)
    if not same or abs(attention_scaling(here) - attention_scaling(there)) > 1e-6:
        raise _refusal(
            checkpoint,
            f"rotary embedding {_brief(there)} there and {_brief(here)} in the target; a head keeps the one that it "
            "was trained with: start from another head",
        )


def _brief(rope: dict[str, Any]) -> str:
    names = ("rope_type", "rope_theta", "factor", "partial_rotary_factor")
    return ", ".join(f"{name} {rope[name]}" for name in names if name in rope)


# ---- the tensors -----------------------------------------------------------------------------------------


def load_warm_start(head: Head, recipe: Recipe, target: Target, frozen: FrozenTarget) -> None:
    """Overwrite a new head's tensors with those of the folder that the recipe starts from.

    Parameters that are not trained take the folder's tensors as they are stored. A folder without an lm_head gives the
    target's.

    Raises:
        InputError: A tensor is missing, unknown or of another shape; names it and both shapes.
    """
    assert recipe.train.init_from is not None
    checkpoint = Checkpoint.open(recipe.train.init_from)
    state, parameters = head.state_dict(), dict(head.named_parameters())
    found = {LM_HEAD: frozen.lm_head_UD} if LM_HEAD in state else {}
    found |= PUBLISHED[head.kind].tensors(checkpoint, target)
    for name in sorted(found.keys() - state.keys()):
        # a Llama target's layer is written with the biases of a Qwen2, all zero
        if not name.endswith(".bias") or found.pop(name).any():
            raise _refusal(checkpoint, f"{name}: the recipe's {head.kind} head has no such tensor")
    for name in sorted(state.keys() - found.keys()):
        raise _refusal(checkpoint, f"{name}: no such tensor in it, and the recipe's {head.kind} head needs one")
    for name, tensor in found.items():
        if tensor.shape != state[name].shape:
            shapes = f"{list(tensor.shape)} there and {list(state[name].shape)} in the recipe's head"
            raise _refusal(checkpoint, f"{name}: shape {shapes}")
        if name in parameters and not parameters[name].requires_grad:
            parameters[name].data = tensor.clone()
        else:
            state[name].copy_(tensor)


def _renamed(checkpoint: Checkpoint, rename: Callable[[Checkpoint, str], str | None]) -> dict[str, Tensor]:
    return {own: checkpoint.tensor(name) for name in checkpoint.names if (own := rename(checkpoint, name))}


def _refusal(checkpoint: Checkpoint, message: str) -> InputError:
    return InputError(f"train.init_from={checkpoint.folder}: {message}")
