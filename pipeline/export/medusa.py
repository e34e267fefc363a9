"""Write Medusa heads as the folder that vLLM loads (model_executor/models/medusa.py).

Notable: vLLM puts the value of ANY config key with "num" and "heads" (or "layers") in its name in the place of
`num_heads` (`num_hidden_layers`; transformers_utils/configs/medusa.py), so nothing of the target's configuration is
copied.

Notable too: alone, vLLM 0.32 refuses every head with a `token_map`. Its `load_weights` makes the map a parameter and
does not report it as loaded, so the loader's check for tensors that the checkpoint lacks raises ("Following weights
were not initialized from checkpoint: {'token_map'}"). That check is made for unquantised models only, and Medusa's
layers never look at a quantisation: a block that quantises nothing (`NOTHING_QUANTISED`) lets the map in. tests/serve
holds this against the real server.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from drafthead.data.files import write_json
from drafthead.pipeline.export.folder import DTYPES, TrainedHead, check_path, provenance, replace_folder
from safetensors.torch import save_file
from torch import Tensor

ARCHITECTURE = "MedusaModel"
OPTIONS = {
    "num_heads": "num_heads",
    "num_layers": "num_hidden_layers",
    "draft_vocab_size": "truncated_vocab_size",
    "shared_lm_head": "original_lm_head",
    "bias": "medusa_fc_bias",
}
"""vLLM's config key of each of `MedusaOptions`."""

NOTHING_QUANTISED = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "ignore": []}
"""`quantization_config` beside a `token_map`."""


def write_medusa(folder: Path, head: TrainedHead) -> None:
    """Write the folder whole or not at all; one that exists is replaced once the new one is whole.

    Raises:
        GateError: vLLM would serve another kind of head from this path.
    """
    check_path(folder)
    options, target = head.description["options"], head.target
    ids_U = head.vocab.target_ids()
    tensors = {name: tensor.to(DTYPES[head.dtype]).contiguous() for name, tensor in head.state.items()}
    truncated = len(ids_U) < target.vocab_size
    if truncated:
        tensors["token_map"] = ids_U.to(torch.int64).contiguous()
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "medusa",
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        **{theirs: options[ours] for ours, theirs in OPTIONS.items()},
        "dtype": head.dtype,
        "torch_dtype": head.dtype,
        **({"quantization_config": NOTHING_QUANTISED} if truncated else {}),
        "drafthead": {
            **provenance(
                target,
                head.k,
                head.description["trained_length"],
                head.description["initial_digests"][head.dtype],
                tensors,
                head.dtype,
            ),
            "head": dict(options),
            "lm_head_of_target": is_lm_head_of_target(tensors, target.lm_head_VD[ids_U]),
        },
    }

    def write(temporary: Path) -> None:
        write_json(temporary / "config.json", config)
        write_json(temporary / "speculative_config.json", speculative_config(folder, head.k))
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})

    replace_folder(folder, write)


def speculative_config(folder: Path, k: int) -> dict[str, Any]:
    """The object for vLLM's `--speculative-config`."""
    return {"method": "medusa", "model": str(folder.resolve()), "num_speculative_tokens": k}


def is_lm_head_of_target(tensors: Mapping[str, Tensor], rows_UD: Tensor) -> bool:
    """Whether the shared lm_head is a copy of the target's rows: it was not trained."""
    lm_head_UD = tensors.get("lm_head.weight")
    return lm_head_UD is not None and torch.equal(lm_head_UD, rows_UD.to(lm_head_UD.dtype))


def expected_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter that vLLM's model has under this config; `token_map` is none."""
    hidden, num_heads = config["hidden_size"], config["num_heads"]
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(num_heads):
        for layer in range(config["num_hidden_layers"]):
            shapes[f"blocks.{head}.layers.{layer}.weight"] = (hidden, hidden)
            if config["medusa_fc_bias"]:
                shapes[f"blocks.{head}.layers.{layer}.bias"] = (hidden,)
    if config["original_lm_head"]:
        shapes["lm_head.weight"] = (config["truncated_vocab_size"], hidden)
    else:
        shapes |= {f"lm_heads.{head}.weight": (config["vocab_size"], hidden) for head in range(num_heads)}
    return shapes
