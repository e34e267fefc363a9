"""From a recipe and a target to a head: built, initialised, described, and read back."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from drafthead.data.draft_vocab import DraftVocab
from drafthead.data.files import read_json
from drafthead.pipeline.heads.base import FrozenTarget, Head
from drafthead.pipeline.heads.eagle3 import Eagle3, Eagle3Options
from drafthead.pipeline.heads.medusa import Medusa, MedusaOptions, check_lm_heads
from drafthead.pipeline.heads.mtp import MTP, MTPOptions, check_vocab
from drafthead.pipeline.heads.mtp_layouts import resolve_layout
from drafthead.pipeline.joint import check_adapters
from drafthead.pipeline.recipe import HeadConfig, MedusaConfig, MTPConfig
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


def check_target(config: HeadConfig, draft_vocab: int, target: Target) -> None:
    """Refuse, before any work, a target that such a head cannot be made or served for.

    Raises:
        InputError: See `check_lm_heads`, `check_adapters`, `resolve_layout` and `check_vocab`.
    """
    if isinstance(config, MedusaConfig):
        check_lm_heads(config, draft_vocab, target.vocab_size)
        if config.lora is not None:
            check_adapters(config.lora, target)
    if isinstance(config, MTPConfig):
        resolve_layout(config.layout, target)
        check_vocab(draft_vocab, target.vocab_size)


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
