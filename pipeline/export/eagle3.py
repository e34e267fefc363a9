"""Write an EAGLE-3 head as the plain folder that vLLM loads (model_executor/models/llama_eagle3.py)."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from drafthead.data.errors import InputError
from drafthead.data.files import read_json, write_json
from drafthead.pipeline.export.folder import DTYPES, TrainedHead, provenance, replace_folder
from drafthead.pipeline.export.rope import both_schemas, rope_of, text_config
from drafthead.pipeline.target import Target
from safetensors.torch import save_file
from torch import Tensor

ARCHITECTURE = "LlamaForCausalLMEagle3"
LAYER_CONVENTION = (
    "layer id i is the residual stream entering layer i of the target (0: the embeddings; the number of "
    "layers: the state before the final norm), as vLLM's eagle_aux_hidden_state_layer_ids"
)
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True, kw_only=True)
class HeadOptions:
    """What decides the head's computation and cannot be seen in its tensors alone; vLLM's names."""

    aux_layer_ids: tuple[int, ...]
    """State ENTERING that layer, ascending."""
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def norms(self) -> dict[str, bool]:
        return {name: value for name, value in asdict(self).items() if name != "aux_layer_ids"}


def write_eagle3(folder: Path, head: TrainedHead) -> None:
    """Export a trained head; see `export_head`."""
    options = head.description["options"]
    export_head(
        folder,
        head_state=head.state,
        options=HeadOptions(
            aux_layer_ids=tuple(head.description["aux_layer_ids"]), **{name: options[name] for name in NORMS}
        ),
        target=head.target,
        d2t=head.vocab.d2t,
        t2d=head.vocab.t2d,
        k=head.k,
        dtype=head.dtype,
        inv_freq=head.description["inv_freq"],
        trained_length=head.description["trained_length"],
        initial_digests=head.description["initial_digests"],
    )


def export_head(
    folder: Path,
    *,
    head_state: Mapping[str, Tensor],
    options: HeadOptions,
    target: Target,
    d2t: Tensor | None,
    t2d: Tensor | None,
    k: int,
    dtype: str,
    inv_freq: list[float],
    trained_length: int,
    initial_digests: Mapping[str, str],
) -> None:
    """Write the folder whole or not at all; one that exists is replaced once the new one is whole.

    Args:
        folder: Where to; its absolute path goes into `speculative_config.json`.
        head_state: Trained tensors under vLLM's plain names (`fc.weight`, `midlayer.*`, `norm.weight`,
            `lm_head.weight`, and with the options `input_norm.weight`, `fc_norm.{i}.weight`).
        options: Norms and layer ids that the head was trained with.
        target: Gives the configuration, the embeddings and the fingerprint.
        d2t: int64 [U], target id minus draft id; None if the head drafts the whole vocabulary. Not written
            when U equals V, which vLLM would refuse.
        t2d: bool [V], which target ids can be drafted.
        k: `num_speculative_tokens`.
        dtype: `bfloat16`, `float16` or `float32`, of every tensor and of the config.
        inv_freq: Inverse frequencies that the head was trained with, for `RopeGate`.
        trained_length: Longest training row, in tokens.
        initial_digests: `initial_digests` of the state before the first step.

    Raises:
        GateError: vLLM cannot compute the target's rotary embedding for a head.
        InputError: A tensor or a config key is missing.
    """
    config = _config(target, head_state, options, dtype)
    reduced = config["draft_vocab_size"] != config["vocab_size"]
    if reduced and d2t is None:
        raise InputError(f"d2t: missing, though lm_head has {config['draft_vocab_size']} rows")
    tensors = {name: tensor.to(DTYPES[dtype]).contiguous() for name, tensor in head_state.items()}
    tensors["embed_tokens.weight"] = target.embedding_VD.to(DTYPES[dtype]).contiguous()
    if reduced and d2t is not None:
        tensors["d2t"] = d2t.to(torch.int64).contiguous()
        if t2d is not None:
            tensors["t2d"] = t2d.to(torch.bool).contiguous()
    config["drafthead"] = {
        **provenance(target, k, trained_length, initial_digests[dtype], tensors, dtype),
        "layer_convention": LAYER_CONVENTION,
        "head": {**options.norms(), "aux_layer_ids": list(options.aux_layer_ids)},
        "inv_freq": inv_freq,
    }

    def write(temporary: Path) -> None:
        write_json(temporary / "config.json", config)
        write_json(temporary / "speculative_config.json", speculative_config(folder, k))
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})

    replace_folder(folder, write)


def speculative_config(folder: Path, k: int) -> dict[str, Any]:
    """The object for vLLM's `--speculative-config`."""
    return {"method": "eagle3", "model": str(folder.resolve()), "num_speculative_tokens": k}


def expected_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that vLLM's model has under this config."""
    hidden, middle = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    fused = config["num_aux_hidden_states"] * config["target_hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (config["vocab_size"], hidden),
        "fc.weight": (hidden, fused),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, queries),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.mlp.gate_proj.weight": (middle, hidden),
        "midlayer.mlp.up_proj.weight": (middle, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, middle),
        "norm.weight": (hidden,),
        "lm_head.weight": (config["draft_vocab_size"], hidden),
    }
    if config["norm_before_fc"]:
        shapes["input_norm.weight"] = (fused,)
    if config["fc_norm"]:
        for index in range(config["num_aux_hidden_states"]):
            shapes[f"fc_norm.{index}.weight"] = (config["target_hidden_size"],)
    return shapes


def _config(target: Target, state: Mapping[str, Tensor], options: HeadOptions, dtype: str) -> dict[str, Any]:
    raw = read_json(target.path / "config.json")
    text = text_config(raw)
    ids, head_dim = list(options.aux_layer_ids), target.head_dim
    try:
        config = {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_size": state["midlayer.hidden_norm.weight"].shape[0],
            "intermediate_size": state["midlayer.mlp.gate_proj.weight"].shape[0],
            "num_attention_heads": state["midlayer.self_attn.q_proj.weight"].shape[0] // head_dim,
            "num_key_value_heads": state["midlayer.self_attn.k_proj.weight"].shape[0] // head_dim,
            "head_dim": head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": target.config.rms_norm_eps,
            "max_position_embeddings": text["max_position_embeddings"],
            "vocab_size": text["vocab_size"],
            "draft_vocab_size": state["lm_head.weight"].shape[0],
            "target_hidden_size": text["hidden_size"],
            "num_aux_hidden_states": len(ids),
            "eagle_aux_hidden_state_layer_ids": ids,
            "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids},
            **options.norms(),
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "initializer_range": text.get("initializer_range", 0.02),
            "use_cache": True,
            "tie_word_embeddings": False,
            "dtype": dtype,
            "torch_dtype": dtype,
            **both_schemas(rope_of(text)),
        }
    except KeyError as error:
        raise InputError(f"export: the head's state or the target's config.json lacks {error}") from None
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = text.get(name, raw.get(name))
        if value is not None:  # strict loaders refuse nulls
            config[name] = value
    return config
