"""Write an MTP layer as a checkpoint of the whole target, which vLLM serves without a draft model of its own.

The target's files are linked, never copied where the file system can link; the trained tensors lie in a shard of their
own, and the index names it. A Llama-architecture target is written as MiMo, a Qwen2 with an MTP layer
(vllm/model_executor/models/mimo.py), whose q/k/v biases are zeros.

Notable: vLLM reads EVERY tensor of a shard that the index names, not only those that the index finds in it. A shard
that holds an MTP layer already is therefore written anew without it.
"""

import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from drafthead.data.files import read_json, write_json
from drafthead.pipeline.export.folder import (
    DTYPES,
    TrainedHead,
    check_path,
    provenance,
    replace_folder,
)
from drafthead.pipeline.export.rope import both_schemas, rope_of, text_config
from drafthead.pipeline.heads.mtp_layouts import LAYOUTS
from drafthead.pipeline.target import Target
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

MIMO = "MiMoForCausalLM"
ARCHITECTURES = (
    MIMO,
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3NextForCausalLM",
    "DeepseekV3ForCausalLM",
    "Glm4MoeForCausalLM",
)
"""Of the targets whose layouts are written."""
SHARD = "mtp.safetensors"
INDEX = "model.safetensors.index.json"
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "hidden_act",
    "max_position_embeddings",
    "tie_word_embeddings",
)
"""Keys of a target that its Qwen2 config must repeat, since the families' defaults differ."""
LEFT_OUT = ("head_dim", "attention_bias", "mlp_bias", "pretraining_tp", "auto_map", "sliding_window", "layer_types")
"""Keys of a Llama config that Qwen2 lacks or reads otherwise; `resolve_layout` has made sure that they say nothing."""
ROPE = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
BESIDE_WEIGHTS = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".py")
"""Endings of the target's other files: tokenizer, chat template, generation config."""
WRITTEN = ("config.json", "speculative_config.json", INDEX, "manifest.json", "ingredients.json")


def write_mtp(folder: Path, head: TrainedHead) -> None:
    """Write the folder whole or not at all; one that exists is replaced once the new one is whole.

    Raises:
        GateError: vLLM would take the folder for another kind of head, or cannot compute the target's rotary embedding.
    """
    check_path(folder)
    target, options, dtype = head.target, head.description["options"], DTYPES[head.dtype]
    layout = LAYOUTS[options["layout"]]
    state = {name: tensor.to(dtype) for name, tensor in head.state.items()}
    trained = {name: one.contiguous() for name, one in layout.to_checkpoint(state, target.num_layers).items()}
    config = stitched_config(target, options["layout"])
    config["drafthead"] = {
        **provenance(
            target,
            head.k,
            head.description["trained_length"],
            head.description["initial_digests"][head.dtype],
            trained,
            head.dtype,
        ),
        "type": "mtp",
        "head": dict(options),
        "head_dtype": head.dtype,
        "inv_freq": head.description["inv_freq"],
    }

    def write(temporary: Path) -> None:
        weight_map = link_shards(target, temporary, trained.keys())
        own, shard = {**trained, **companions(target, options["layout"])}, shard_name(target)
        save_file(own, temporary / shard, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(own, shard))
        size = sum((temporary / file).stat().st_size for file in set(weight_map.values()))
        write_json(temporary / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
        write_json(temporary / "config.json", config)
        write_json(temporary / "speculative_config.json", speculative_config(head.k))
        for path in other_files(target.path):
            link_file(path, temporary / path.name)

    replace_folder(folder, write)


def speculative_config(k: int) -> dict[str, Any]:
    """The object for vLLM's `--speculative-config`: without `model`, the layer is read from the target's folder."""
    return {"method": "mtp", "num_speculative_tokens": k}


def stitched_config(target: Target, layout: str) -> dict[str, Any]:
    """config.json of the stitched folder, but for the provenance.

    Raises:
        GateError: vLLM cannot compute the target's rotary embedding.
    """
    config: dict[str, Any] = read_json(target.path / "config.json")
    config.pop("drafthead", None)
    if layout != "mimo":
        text_config(config)[LAYOUTS[layout].count_key] = 1
        return config
    kept = {name: value for name, value in config.items() if name not in (*LEFT_OUT, *ROPE) and value is not None}
    return {
        **kept,
        "architectures": [MIMO],
        "model_type": "qwen2",
        **{name: getattr(target.config, name) for name in SIZES},
        "num_nextn_predict_layers": 1,
        "use_sliding_window": False,
        **both_schemas(rope_of(config)),
    }


def companions(target: Target, layout: str) -> dict[str, Tensor]:
    """Further tensors without which vLLM would not load the folder, in the target's dtype.

    For MiMo the biases of a Qwen2, as zeros, where the target has none, and the lm_head, which its draft model asks for
    even where it is tied; for DeepSeek-V3 the copy of the lm_head that its MTP layer has.
    """
    found: dict[str, Tensor] = {}
    lm_head_VD = target.lm_head_VD
    if layout == "mimo":
        found.update({name: torch.zeros(size, dtype=lm_head_VD.dtype) for name, size in missing_biases(target).items()})
        if "lm_head.weight" not in target.tensor_files:
            found["lm_head.weight"] = lm_head_VD.clone()
    elif layout == "deepseek":
        name = LAYOUTS[layout].prefix.format(layer=target.num_layers) + "shared_head.head.weight"
        if name not in target.tensor_files:
            found[name] = lm_head_VD.clone()
    return found


def missing_biases(target: Target) -> dict[str, int]:
    """Names and sizes of the q/k/v biases of a Qwen2 that the target lacks, its MTP layer's among them."""
    config = target.config
    head_dim = config.hidden_size // config.num_attention_heads
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads, "v": config.num_key_value_heads}
    if "model.layers.0.self_attn.q_proj.bias" in target.tensor_files:
        return {}
    layers = [f"model.layers.{number}." for number in range(target.num_layers)]
    return {
        f"{layer}self_attn.{part}_proj.bias": count * head_dim
        for layer in [*layers, LAYOUTS["mimo"].prefix]
        for part, count in heads.items()
    }


# ---- links -----------------------------------------------------------------------------------------------


def shard_name(target: Target) -> str:
    """A file name that none of the target's has: writing to a link would write to the target."""
    names = ["mtp.safetensors", *(f"mtp-{number}.safetensors" for number in range(1, 100))]
    return next(name for name in names if not (target.path / name).exists())


def link_shards(target: Target, folder: Path, replaced: Collection[str]) -> dict[str, str]:
    """Link the target's shards into `folder`, those that hold a replaced tensor rewritten without it.

    Returns:
        The index's map from the name of each tensor that is kept to its file.
    """
    kept = {name: path for name, path in target.tensor_files.items() if name not in replaced}
    for path in sorted({*target.tensor_files.values()}):
        with safe_open(path, "pt") as file:
            names = list(file.keys())
            if not any(name in replaced for name in names):
                link_file(path, folder / path.name)
                continue
            rest = {name: file.get_tensor(name) for name in names if name not in replaced}
        if rest:
            save_file(rest, folder / path.name, metadata={"format": "pt"})
    return {name: path.name for name, path in kept.items()}


def link_file(source: Path, link: Path) -> None:
    """Hard-link, else symlink, else copy: the first that the file system allows."""
    source = source.resolve()  # in a hub cache files are links into another folder
    for make in (os.link, os.symlink, shutil.copyfile):
        try:
            make(source, link)
        except OSError:
            if make is shutil.copyfile:
                raise
        else:
            return


def other_files(folder: Path) -> list[Path]:
    """The target's files beside config and weights that a server reads."""
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file()
        and path.suffix in BESIDE_WEIGHTS
        and path.name not in WRITTEN
        and not path.name.startswith(".")
        and not path.name.endswith(".index.json")
    ]
