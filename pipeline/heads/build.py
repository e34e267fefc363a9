"""From a recipe and a target to a head: built, initialised, described, and read back."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from drafthead.data.draft_vocab import DraftVocab
from drafthead.data.files import read_json
from drafthead.pipeline.heads.base import FrozenTarget
from drafthead.pipeline.heads.eagle3 import Eagle3, Eagle3Options, initialise_from_target
from drafthead.pipeline.recipe import HeadConfig
from drafthead.pipeline.target import Target
from safetensors.torch import load_file


def build_frozen_target(target: Target, vocab: DraftVocab) -> FrozenTarget:
    return FrozenTarget(
        target.embedding_VD,
        target.final_norm_D,
        target.lm_head_VD,
        vocab.target_ids(),
        float(target.config.rms_norm_eps),
    )


def build_head(config: HeadConfig, target: Target, frozen: FrozenTarget, num_aux: int, seed: int) -> Eagle3:
    """A new head, seeded, with fp32 parameters."""
    options = Eagle3Options(
        num_aux=num_aux,
        draft_vocab_size=len(frozen.target_ids_U),
        norm_before_residual=config.norm_before_residual,
        norm_before_fc=config.norm_before_fc,
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
    )
    torch.manual_seed(seed)
    head = Eagle3(target.config, options)
    if config.init_from_target:
        initialise_from_target(head, target.last_layer(), target.final_norm_D, frozen.lm_head_UD)
    if not config.train_lm_head:
        # the target's rows as they are stored: no cast, no gradient, no moments
        head.lm_head.weight = torch.nn.Parameter(frozen.lm_head_UD.clone(), requires_grad=False)
    return head


def describe_head(head: Eagle3, aux_layer_ids: list[int]) -> dict[str, Any]:
    """What is needed to build the module again and to export it (head.json)."""
    return {
        "type": "eagle3",
        "options": asdict(head.options),
        "aux_layer_ids": aux_layer_ids,
        "inv_freq": head.midlayer.self_attn.rotary.inverse.tolist(),
    }


def load_head(folder: Path, target: Target) -> tuple[Eagle3, dict[str, Any]]:
    """Read a trained head from a finished train folder."""
    description = read_json(folder / "head.json")
    head = Eagle3(target.config, Eagle3Options(**description["options"]))
    head.load_state_dict(load_file(folder / "head.safetensors"))
    return head.eval().requires_grad_(False), description
