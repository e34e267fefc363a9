"""From a recipe and a target to a head: built, initialised, described, and read back."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from drafthead.data.draft_vocab import DraftVocab
from drafthead.data.errors import GateError, InputError
from drafthead.data.files import read_json
from drafthead.pipeline.export.rope import (
    attention_scaling,
    inverse_frequencies,
    rope_of,
    rotary_size,
    text_config,
)
from drafthead.pipeline.heads.base import FrozenTarget, Head
from drafthead.pipeline.heads.blocks import rope_frequencies
from drafthead.pipeline.heads.eagle3 import Eagle3, Eagle3Options, check_last_layer
from drafthead.pipeline.heads.medusa import Medusa, MedusaOptions, check_lm_heads
from drafthead.pipeline.heads.mtp import MTP, MTPOptions, check_vocab
from drafthead.pipeline.heads.mtp_layouts import resolve_layout
from drafthead.pipeline.joint import check_adapters
from drafthead.pipeline.recipe import Eagle3Config, HeadConfig, MedusaConfig, MTPConfig
from drafthead.pipeline.target import Target
from safetensors.torch import load_file

HEADS: dict[str, tuple[type[Any], type[Any]]] = {
    "eagle3": (Eagle3, Eagle3Options),
    "medusa": (Medusa, MedusaOptions),
    "mtp": (MTP, MTPOptions),
}
"""Module and options of each `head.type`."""


def build_frozen_target(target: Target, vocab: DraftVocab) -> FrozenTarget:
    return FrozenTarget(
        target.embedding_VD,
        target.final_norm_D,
        target.lm_head_VD,
        vocab.target_ids(),
        float(target.config.rms_norm_eps),
    )


SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "rms_norm_eps")
ATTENTION_SIZES = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")
"""Keys of a target's configuration that a head with an attention layer takes over."""


def check_target(config: HeadConfig, draft_vocab: int, target: Target) -> None:
    """Refuse, before any work, a target that such a head cannot be made or served for.

    Raises:
        InputError: A tensor or key is missing; an MTP layer is asked of a quantised target; see also `check_logits`,
            `check_lm_heads`, `check_adapters`, `resolve_layout`, `check_vocab` and `check_last_layer`.
        GateError: See `check_rope`.
    """
    check_sizes(config, target)
    check_logits(target)
    assert target.tensor_names  # found, or the error that lists candidates
    if isinstance(config, MedusaConfig):
        check_lm_heads(config, draft_vocab, target.vocab_size)
        if config.lora is not None:
            check_adapters(config.lora, target)
        return
    if isinstance(config, MTPConfig):
        resolve_layout(config.layout, target)
        check_vocab(draft_vocab, target.vocab_size)
        if target.is_quantised:
            raise InputError(
                f"{target.path}/config.json: quantised: vLLM would look for quantised tensors of the MTP layer too; "
                f"train a head that is a folder of its own (head.type=eagle3 or medusa), or take the unquantised target"
            )
    elif config.init_from_target:
        check_last_layer(target)
    check_rope(target)


def check_sizes(config: HeadConfig, target: Target) -> None:
    """Refuse a target whose configuration lacks a number that the head is built from.

    Raises:
        InputError: Naming it, or two that a Llama cannot have together.
    """
    known = target.config.to_dict()
    wanted = SIZES if isinstance(config, MedusaConfig) else (*SIZES, *ATTENTION_SIZES)
    for name in wanted:
        if known.get(name, getattr(target.config, name, None)) is None:
            kind = target.config.model_type
            raise InputError(f"{target.path}/config.json: no {name}: a {kind} target has no {config.type} head here")
    size, heads = target.hidden_size, known.get("num_attention_heads")
    if isinstance(config, Eagle3Config) and size % heads:
        raise InputError(
            f"{target.path}/config.json: num_attention_heads={heads} does not divide hidden_size={size}: vLLM reads an "
            f"EAGLE-3 head as a Llama, whose configuration refuses that"
        )


LOGIT_CHANGES = {"final_logit_softcapping": 0, "logits_scaling": 1, "logit_scale": 1, "lm_head_multiplier": 1}
"""Keys by which a target changes its logits behind the lm_head, and the value that changes nothing."""


def check_logits(target: Target) -> None:
    """Refuse a target whose logits are not lm_head(norm(state)), which is what heads learn from and are scored by.

    Raises:
        InputError: Naming what comes on top.
    """
    known = target.config.to_dict()
    for name, harmless in LOGIT_CHANGES.items():
        if known.get(name) not in (None, harmless):
            raise InputError(
                f"{target.path}/config.json: {name}={known[name]}: the target changes its logits behind the lm_head, "
                f"which no head here is trained for; choose another target"
            )
    for what in ("final norm", "lm_head"):
        bias = target.tensor_names[what].removesuffix("weight") + "bias"
        if bias in target.tensor_files:
            raise InputError(f"{target.path}: its {what} has a bias ({bias}), which no head here is trained for")


def check_rope(target: Target) -> None:
    """Hold what a head would be trained with against what its exported configuration will say (`RopeGate`).

    Raises:
        GateError: vLLM would compute another rotary embedding than training.
    """
    assert target.head_dim
    trained, factor = rope_frequencies(target.config)
    text = text_config(read_json(target.path / "config.json"))
    said = rope_of(text)
    exported = torch.tensor(inverse_frequencies(said, rotary_size(text)))
    same = exported.shape == trained.shape and torch.allclose(exported, trained, rtol=2e-5, atol=0)
    if not same or abs(attention_scaling(said) - factor) > 1e-6:
        raise GateError(
            "RopeGate",
            "rope_parameters",
            f"{target.path}/config.json says {len(exported)} inverse frequencies down to {float(exported[-1]):.6g}, "
            f"transformers reads {len(trained)} down to {float(trained[-1]):.6g}; state rope_type, rope_theta and "
            f"partial_rotary_factor in it",
        )


def build_head(config: HeadConfig, target: Target, frozen: FrozenTarget, num_aux: int, seed: int) -> Head:
    """A new head, seeded, with fp32 parameters."""
    module, _ = HEADS[config.type]
    torch.manual_seed(seed)
    head: Head = module.fresh(config, target, frozen, num_aux)
    if not config.train_lm_head:
        # the target's rows as they are stored: no cast, no gradient, no moments
        head.lm_head.weight = torch.nn.Parameter(frozen.lm_head_UD.clone(), requires_grad=False)
    return head


def describe_head(head: Head, aux_layer_ids: list[int]) -> dict[str, Any]:
    """What is needed to build the module again and to export it (head.json)."""
    return {
        "type": head.kind,
        "options": asdict(head.options),
        "aux_layer_ids": aux_layer_ids,
        "inv_freq": head.inverse_frequencies(),
    }


def load_head(folder: Path, target: Target) -> tuple[Head, dict[str, Any]]:
    """Read a trained head from a finished train folder."""
    description = read_json(folder / "head.json")
    module, options = HEADS[description["type"]]
    head: Head = module(target.config, options(**description["options"]))
    head.load_state_dict(load_file(folder / "head.safetensors"))
    return head.eval().requires_grad_(False), description
