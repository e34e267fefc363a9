"""`preflight` of a Medusa export: config traps, heads and layers, draft vocabulary, path (`ExportGate`)."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from drafthead.pipeline.export.checks import (
    Export,
    Failure,
    digest_failures,
    dtype_failures,
    export_failure,
    file_failures,
    fixed_failures,
    flag_failures,
    is_size,
    key_failures,
    null_failures,
    path_failures,
    provenance_failures,
    provenance_of,
    shape_failures,
    size_failures,
    speculative_failures,
    value_failures,
)
from drafthead.pipeline.export.medusa import (
    ARCHITECTURE,
    NOTHING_QUANTISED,
    OPTIONS,
    expected_shapes,
    is_lm_head_of_target,
)
from torch import Tensor

SIZES = ("hidden_size", "vocab_size", "num_heads", "num_hidden_layers", "truncated_vocab_size")
FLAGS = ("original_lm_head", "medusa_fc_bias")
FIXED = {"architectures": [ARCHITECTURE], "model_type": "medusa"}
OF_TARGET = {
    "vocab_size": "on a difference vLLM takes the target's and forgets the truncation",
    "hidden_size": "the heads read the target's states",
}
FORBIDDEN = {
    "num_lookahead_tokens": "vLLM would set num_heads to it",
    "n_predict": "vLLM would take it for that of an MTP layer, and may refuse num_speculative_tokens",
    "logit_scale": "the heads are trained without a scale, and one below zero would draft the least likely token",
}
MAPS = ("token_map",)


def medusa_failures(export: Export) -> list[Failure]:
    """All faults of the folder."""
    config, tensors = export.config, export.tensors
    failures = [
        *path_failures(export.folder),
        *_config_failures(config, export.target_config),
        *speculative_failures(config, export.folder, "medusa", "vLLM would guess"),
        *_option_failures(config),
        *provenance_failures(config, tensors, export.target),
        *file_failures(export.folder),
    ]
    of_tensors: list[Failure] = []
    if all(is_size(config.get(name)) for name in SIZES) and all(type(config.get(name)) is bool for name in FLAGS):
        failures += _draft_failures(config)
        of_tensors += shape_failures(expected_shapes(config), tensors, MAPS)
        of_tensors += _map_failures(config, tensors)
        of_tensors += _lm_head_failures(config, tensors, export.target.lm_head_VD)
    of_tensors += value_failures(config, tensors, MAPS)
    return failures + (of_tensors or list(digest_failures(config, tensors)))


def _config_failures(config: dict[str, Any], target: dict[str, Any]) -> Iterator[Failure]:
    yield from null_failures(config)
    yield from fixed_failures(config, FIXED)
    yield from size_failures(config, SIZES)
    yield from key_failures(config, {*SIZES, *FLAGS, *FIXED, *FORBIDDEN, "dtype", "torch_dtype", "drafthead"})
    yield from flag_failures(config, FLAGS)
    for name, why in OF_TARGET.items():
        if config.get(name) != target.get(name):
            yield export_failure(name, f"is {config.get(name)!r}, the target's is {target.get(name)!r}: {why}")
    for name in sorted(config.keys() - set(SIZES)):
        for part, taken in (("heads", "num_heads"), ("layers", "num_hidden_layers")):
            if "num" in name and part in name:
                yield export_failure(name, f"must be left out: vLLM puts its value in the place of {taken}")
    for name, why in FORBIDDEN.items():
        if name in config:
            yield export_failure(name, f"must be left out: {why}")
    yield from dtype_failures({name: value for name, value in config.items() if name != "quantization_config"})


def _option_failures(config: dict[str, Any]) -> Iterator[Failure]:
    for name, trained in (provenance_of(config).get("head") or {}).items():
        found = config.get(OPTIONS.get(name, name))
        if found != trained:
            yield export_failure(OPTIONS.get(name, name), f"is {found!r}, the head was trained with {trained!r}")


def _draft_failures(config: dict[str, Any]) -> Iterator[Failure]:
    """What vLLM asserts, or cannot do."""
    k = provenance_of(config).get("num_speculative_tokens")
    if is_size(k) and k > config["num_heads"]:
        message = f"is {k}, there are {config['num_heads']} heads and each drafts one token"
        yield export_failure("drafthead.num_speculative_tokens", message)
    size, full = config["truncated_vocab_size"], config["vocab_size"]
    if size > full:
        yield export_failure("truncated_vocab_size", f"is {size}, the target has {full} tokens")
    elif size < full and not config["original_lm_head"]:
        message = f"{size} of {full} tokens need original_lm_head=true: separate lm_heads are of the full vocabulary"
        yield export_failure("truncated_vocab_size", message)
    wanted = NOTHING_QUANTISED if size < full else None
    if config.get("quantization_config") != wanted:
        rule = (
            "be left out: the head is not quantised" if wanted is None else f"be {wanted}: else vLLM refuses token_map"
        )
        yield export_failure("quantization_config", f"must {rule}")


def _map_failures(config: dict[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[Failure]:
    """The draft vocabulary: token_map[i] is the target id of draft token i."""
    size, full = config["truncated_vocab_size"], config["vocab_size"]
    token_map = tensors.get("token_map")
    if size >= full:
        if token_map is not None:
            yield export_failure("token_map", "must be left out: vLLM reads it for a truncated vocabulary only")
        return
    if token_map is None:
        yield export_failure("token_map", f"missing, though truncated_vocab_size {size} is below vocab_size {full}")
        return
    if token_map.dtype != torch.int64 or tuple(token_map.shape) != (size,):
        message = f"is {token_map.dtype} {list(token_map.shape)}, must be int64 [{size}]"
        yield export_failure("token_map", message)
        return
    if not bool((token_map.diff() > 0).all()):
        yield export_failure("token_map", "must ascend strictly; it holds target ids, not offsets")
    elif int(token_map[0]) < 0 or int(token_map[-1]) >= full:
        message = f"runs from {int(token_map[0])} to {int(token_map[-1])}, must lie in [0, {full})"
        yield export_failure("token_map", message)


def _lm_head_failures(config: dict[str, Any], tensors: Mapping[str, Tensor], lm_head_VD: Tensor) -> Iterator[Failure]:
    """An lm_head that was not trained is still the target's, row by row; this also holds `token_map` to training."""
    exported, ids_U = tensors.get("lm_head.weight"), tensors.get("token_map")
    ids_U = torch.arange(len(lm_head_VD)) if ids_U is None else ids_U
    fits = exported is not None and exported.shape == (len(ids_U), lm_head_VD.shape[1]) and ids_U.dtype == torch.int64
    if not fits or not provenance_of(config).get("lm_head_of_target"):
        return
    inside = bool(((ids_U >= 0) & (ids_U < len(lm_head_VD))).all())
    if inside and not is_lm_head_of_target(tensors, lm_head_VD[ids_U]):
        yield export_failure(
            "lm_head.weight", "differs from the target's rows that token_map lists, and was not trained"
        )
