"""`preflight` of an EAGLE-3 export: config, layer ids, draft vocabulary, embeddings (`ExportGate`)."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from drafthead.pipeline.export.checks import (
    ROPE_KEYS,
    Export,
    Failure,
    bits,
    digest_failures,
    dtype_failures,
    export_failure,
    file_failures,
    fixed_failures,
    flag_failures,
    is_size,
    key_failures,
    null_failures,
    provenance_failures,
    provenance_of,
    rope_failures,
    shape_failures,
    size_failures,
    speculative_failures,
    value_failures,
)
from drafthead.pipeline.export.eagle3 import ARCHITECTURE, NORMS, expected_shapes
from torch import Tensor

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
    "target_hidden_size",
    "num_aux_hidden_states",
    "max_position_embeddings",
)
FIXED = {
    "architectures": [ARCHITECTURE],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
KNOWN = {
    *SIZES,
    *FIXED,
    *NORMS,
    *ROPE_KEYS,
    "eagle_aux_hidden_state_layer_ids",
    "eagle_config",
    "rms_norm_eps",
    "attention_dropout",
    "initializer_range",
    "use_cache",
    "dtype",
    "torch_dtype",
    "drafthead",
}
"""Keys of config.json that are written."""
OF_TARGET = {
    "vocab_size": "vocab_size",
    "target_hidden_size": "hidden_size",
}


def eagle3_failures(export: Export) -> list[Failure]:
    """All faults of the folder."""
    config, tensors = export.config, export.tensors
    failures = [
        *_config_failures(config, export.target_config, export.target.config.rms_norm_eps),
        *_layer_failures(config, export.target_config),
        *speculative_failures(config, export.folder, "eagle3", "fc would not be used", any_path=True),
        *provenance_failures(config, tensors, export.target),
        *file_failures(export.folder),
        *_option_failures(config),
        *rope_failures(config, export.target_config),
    ]
    of_tensors: list[Failure] = []
    if all(is_size(config.get(name)) for name in SIZES):
        of_tensors += shape_failures(expected_shapes(config), tensors)
        of_tensors += _map_failures(config, tensors)
    of_tensors += value_failures(config, tensors)
    of_tensors += _embedding_failures(tensors, export.target.embedding_VD)
    return failures + (of_tensors or list(digest_failures(config, tensors)))


def _config_failures(config: dict[str, Any], target: dict[str, Any], eps: float) -> Iterator[Failure]:
    yield from null_failures(config)
    yield from fixed_failures(config, FIXED)
    yield from size_failures(config, SIZES)
    yield from key_failures(config, KNOWN)
    for name, theirs in OF_TARGET.items():
        if config.get(name) != target.get(theirs):
            yield export_failure(name, f"is {config.get(name)!r}, the target's {theirs} is {target.get(theirs)!r}")
    if config.get("rms_norm_eps") != eps:
        yield export_failure("rms_norm_eps", f"is {config.get('rms_norm_eps')!r}, the target's is {eps!r}")
    yield from flag_failures(config, NORMS)
    yield from dtype_failures(config)
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if is_size(heads) and is_size(groups) and heads % groups:
        yield export_failure("num_key_value_heads", f"{groups} does not divide num_attention_heads {heads}")


def _layer_failures(config: dict[str, Any], target: dict[str, Any]) -> Iterator[Failure]:
    field = "eagle_aux_hidden_state_layer_ids"
    ids, depth = config.get(field), target["num_hidden_layers"]
    if not isinstance(ids, list) or not ids or not all(type(one) is int for one in ids):
        yield export_failure(field, f"is {ids!r}: a server would guess which layers the head reads; list their ids")
        return
    if ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] > depth:
        yield export_failure(field, f"{ids} must be distinct, ascending and from 0 to {depth}")
    if config.get("num_aux_hidden_states") != len(ids):
        count = config.get("num_aux_hidden_states")
        yield export_failure("num_aux_hidden_states", f"is {count!r}, {field} lists {len(ids)}")
    nested = config.get("eagle_config")
    nested = nested if isinstance(nested, dict) else {}
    if nested.get(field) != ids:
        yield export_failure(f"eagle_config.{field}", f"is {nested.get(field)!r}, the top-level key says {ids}")
    if nested.get("use_aux_hidden_state", True) is not True:
        yield export_failure("eagle_config.use_aux_hidden_state", "must be true: fc would be skipped")
    if nested.get("norm_before_fc", config.get("norm_before_fc")) != config.get("norm_before_fc"):
        yield export_failure("eagle_config.norm_before_fc", "contradicts norm_before_fc, and vLLM follows it")


def _option_failures(config: dict[str, Any]) -> Iterator[Failure]:
    head = {name: config.get(name) for name in NORMS}
    head["aux_layer_ids"] = config.get("eagle_aux_hidden_state_layer_ids")
    for name, trained in (provenance_of(config).get("head") or {}).items():
        if head.get(name) != trained:
            yield export_failure(name, f"is {head.get(name)!r}, the head was trained with {trained!r}")


def _map_failures(config: dict[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[Failure]:
    """The draft vocabulary: d2t[i] is target id minus i."""
    size, full = config["draft_vocab_size"], config["vocab_size"]
    if size > full:
        yield export_failure("draft_vocab_size", f"is {size}, the target has {full} tokens")
        return
    if size == full:
        for name in tensors.keys() & {"d2t", "t2d"}:
            yield export_failure(name, "must be left out: the head drafts the whole vocabulary, vLLM has no map then")
        return
    if "d2t" not in tensors:
        yield export_failure("d2t", f"missing, though draft_vocab_size {size} is below vocab_size {full}")
        return
    d2t = tensors["d2t"]
    if d2t.dtype != torch.int64 or tuple(d2t.shape) != (size,):
        yield export_failure("d2t", f"is {d2t.dtype} {list(d2t.shape)}, must be int64 [{size}]")
        return
    ids = torch.arange(size) + d2t
    if not bool((ids.diff() > 0).all()):
        yield export_failure("d2t", "i + d2t[i] must ascend strictly; it holds offsets, not target ids")
    elif int(ids[0]) < 0 or int(ids[-1]) >= full:
        yield export_failure("d2t", f"i + d2t[i] runs from {int(ids[0])} to {int(ids[-1])}, must lie in [0, {full})")
    elif "t2d" in tensors and not torch.equal(tensors["t2d"].nonzero().flatten(), ids):
        yield export_failure("t2d", "does not mark the tokens that d2t lists")


def _embedding_failures(tensors: Mapping[str, Tensor], embedding_VD: Tensor) -> Iterator[Failure]:
    exported = tensors.get("embed_tokens.weight")
    if exported is None or exported.shape != embedding_VD.shape:
        return
    if not torch.equal(bits(exported), bits(embedding_VD.to(exported.dtype))):
        yield export_failure("embed_tokens.weight", "differs from the target's embeddings, of which it must be a copy")
