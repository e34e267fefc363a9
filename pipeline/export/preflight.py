"""Read an exported head back, as its server would, and name everything that would spoil serving.

Only the two folders are read. vLLM itself raises for hardly any of these faults: a head with a wrong or
missing part is served at acceptance length 1, with the right text.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from drafthead.data.errors import GateError, InputError
from drafthead.data.files import read_json
from drafthead.pipeline.export import rope
from drafthead.pipeline.export.vllm import (
    ARCHITECTURE,
    DTYPES,
    expected_shapes,
    serve_command,
    state_digest,
)
from drafthead.pipeline.target import Target
from safetensors import safe_open
from torch import Tensor

Failure = dict[str, str]
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
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
FIXED = {
    "architectures": [ARCHITECTURE],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
OF_TARGET = {
    "vocab_size": "vocab_size",
    "target_hidden_size": "hidden_size",
    "rms_norm_eps": "rms_norm_eps",
}
QUANTISATION = ("quantization_config", "compression_config", "quantization")


@dataclass(frozen=True, kw_only=True)
class PreflightReport:
    """The object of `drafthead export preflight --json`."""

    ok: bool
    failures: list[Failure]
    """`gate`, `field` and `message` of each."""
    serve_command: str
    """Empty if `speculative_config.json` is missing."""


def preflight(export: Path, target: Path) -> PreflightReport:
    """Check an EAGLE-3 export against the target it is to be served with (`ExportGate`, `RopeGate`).

    The export folder's name needs no check: vLLM guesses a method from the path only where none is stated,
    and `speculative_config.json` must state `eagle3` here.

    Raises:
        InputError: One of the folders is missing or is no model folder, or a file in it is torn.
    """
    config, target_config = _read_config(export, "export"), _read_target_config(target)
    tensors = _read_tensors(export)
    of_target = Target(target)
    failures = [
        *_config_failures(config, target_config),
        *_layer_failures(config, target_config),
        *_speculative_failures(config, export),
        *_provenance_failures(config, tensors, of_target),
        *_rope_failures(config, target_config),
    ]
    if all(_is_size(config.get(name)) for name in SIZES):
        failures += _tensor_failures(config, tensors)
        failures += _map_failures(config, tensors)
    failures += _value_failures(config, tensors)
    failures += _embedding_failures(tensors, of_target.embedding_VD)
    has_command = (export / "speculative_config.json").is_file()
    command = serve_command(target, export) if has_command else ""
    return PreflightReport(ok=not failures, failures=failures, serve_command=command)


# ---- config.json -----------------------------------------------------------------------------------------


def _config_failures(config: dict[str, Any], target: dict[str, Any]) -> Iterator[Failure]:
    for name in _nulls(config):
        yield _export(name, "is null; leave the key out or give it a value")
    for name, right in FIXED.items():
        if type(config.get(name)) is not type(right) or config[name] != right:
            yield _export(name, f"is {config.get(name)!r}, must be {right!r}")
    for name in SIZES:
        if not _is_size(config.get(name)):
            yield _export(name, f"is {config.get(name)!r}, must be a positive integer")
    for name, theirs in OF_TARGET.items():
        if config.get(name) != target.get(theirs):
            yield _export(name, f"is {config.get(name)!r}, the target's {theirs} is {target.get(theirs)!r}")
    for name in NORMS:
        if not isinstance(config.get(name), bool):
            yield _export(name, f"is {config.get(name)!r}, must be true or false: vLLM would guess")
    for name in QUANTISATION:
        if name in config:
            yield _export(name, "the head is not quantised; vLLM would look for quantised tensors")
    if config.get("dtype") not in DTYPES or config.get("torch_dtype") != config.get("dtype"):
        values = f"{config.get('dtype')!r} and {config.get('torch_dtype')!r}"
        yield _export("dtype", f"dtype and torch_dtype are {values}, must be equal and one of {', '.join(DTYPES)}")
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if _is_size(heads) and _is_size(groups) and heads % groups:
        yield _export("num_key_value_heads", f"{groups} does not divide num_attention_heads {heads}")


def _layer_failures(config: dict[str, Any], target: dict[str, Any]) -> Iterator[Failure]:
    field = "eagle_aux_hidden_state_layer_ids"
    ids, depth = config.get(field), target["num_hidden_layers"]
    if not isinstance(ids, list) or not ids or not all(type(one) is int for one in ids):
        yield _export(field, f"is {ids!r}: a server would guess which layers the head reads; list their ids")
        return
    if ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] > depth:
        yield _export(field, f"{ids} must be distinct, ascending and from 0 to {depth}")
    if config.get("num_aux_hidden_states") != len(ids):
        count = config.get("num_aux_hidden_states")
        yield _export("num_aux_hidden_states", f"is {count!r}, {field} lists {len(ids)}")
    nested = config.get("eagle_config")
    nested = nested if isinstance(nested, dict) else {}
    if nested.get(field) != ids:
        yield _export(f"eagle_config.{field}", f"is {nested.get(field)!r}, the top-level key says {ids}")
    if nested.get("use_aux_hidden_state", True) is not True:
        yield _export("eagle_config.use_aux_hidden_state", "must be true: fc would be skipped")
    if nested.get("norm_before_fc", config.get("norm_before_fc")) != config.get("norm_before_fc"):
        yield _export("eagle_config.norm_before_fc", "contradicts norm_before_fc, and vLLM follows it")


def _speculative_failures(config: dict[str, Any], export: Path) -> Iterator[Failure]:
    path = export / "speculative_config.json"
    if not path.is_file():
        yield _export("speculative_config.json", "missing: no server can be started from this folder alone")
        return
    values = read_json(path)
    if not isinstance(values, dict):
        yield _export("speculative_config.json", "must be an object")
        return
    if values.get("method") != "eagle3":
        method = values.get("method")
        yield _export("speculative_config.method", f"is {method!r}, must be 'eagle3': fc would not be used")
    model, k = values.get("model"), values.get("num_speculative_tokens")
    if not isinstance(model, str) or not Path(model).is_absolute():
        yield _export("speculative_config.model", f"is {model!r}, must be the absolute path of this folder")
    elif Path(model).resolve() != export.resolve():
        yield _export("speculative_config.model", f"is {model}, this folder is {export.resolve()}")
    trained = _provenance(config).get("num_speculative_tokens")
    if not _is_size(k) or k != trained:
        message = f"is {k!r}, the head was exported for {trained!r} draft tokens"
        yield _export("speculative_config.num_speculative_tokens", message)


def _provenance_failures(config: dict[str, Any], tensors: Mapping[str, Tensor], target: Target) -> Iterator[Failure]:
    ours = _provenance(config)
    initial, dtype = ours.get("initial_digest"), DTYPES.get(str(config.get("dtype")))
    if not isinstance(initial, str):
        yield _export("drafthead.initial_digest", "missing: it cannot be told whether the head was trained")
    elif dtype is not None and state_digest(tensors, dtype) == initial:
        yield _export("drafthead.initial_digest", "the head equals its initialisation: it was never trained")
    head = {name: config.get(name) for name in NORMS}
    head["aux_layer_ids"] = config.get("eagle_aux_hidden_state_layer_ids")
    for name, trained in (ours.get("head") or {}).items():
        if head.get(name) != trained:
            yield _export(name, f"is {head.get(name)!r}, the head was trained with {trained!r}")
    if ours.get("target_fingerprint") != target.fingerprint:
        message = f"{target.path} is not the target that the head was trained for, or its files changed since"
        yield _export("drafthead.target_fingerprint", message)


# ---- tensors ---------------------------------------------------------------------------------------------


def _tensor_failures(config: dict[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[Failure]:
    """Names and shapes, both ways."""
    shapes = expected_shapes(config)
    for name in sorted(shapes.keys() - tensors.keys()):
        yield _export(name, "missing: vLLM would serve it uninitialised or take another tensor for it")
    for name in sorted(tensors.keys() - shapes.keys() - {"d2t", "t2d"}):
        yield _export(name, "vLLM's model has no such tensor under this config")
    for name in sorted(shapes.keys() & tensors.keys()):
        if tuple(tensors[name].shape) != shapes[name]:
            yield _export(name, f"has shape {list(tensors[name].shape)}, the config says {list(shapes[name])}")


def _value_failures(config: dict[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[Failure]:
    dtype = DTYPES.get(str(config.get("dtype")))
    for name, tensor in sorted(tensors.items()):
        if name in ("d2t", "t2d"):
            continue
        if dtype is not None and tensor.dtype != dtype:
            yield _export(name, f"is stored as {tensor.dtype}, the config says {dtype}")
        if not tensor.is_floating_point():
            continue
        if not torch.isfinite(tensor).all():
            yield _export(name, "holds NaN or infinity")
        elif not tensor.any():
            yield _export(name, "is zero throughout")


def _map_failures(config: dict[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[Failure]:
    """The draft vocabulary: d2t[i] is target id minus i."""
    size, full = config["draft_vocab_size"], config["vocab_size"]
    if size > full:
        yield _export("draft_vocab_size", f"is {size}, the target has {full} tokens")
        return
    if size == full:
        for name in tensors.keys() & {"d2t", "t2d"}:
            yield _export(name, "must be left out: the head drafts the whole vocabulary, vLLM has no map then")
        return
    if "d2t" not in tensors:
        yield _export("d2t", f"missing, though draft_vocab_size {size} is below vocab_size {full}")
        return
    d2t = tensors["d2t"]
    if d2t.dtype != torch.int64 or tuple(d2t.shape) != (size,):
        yield _export("d2t", f"is {d2t.dtype} {list(d2t.shape)}, must be int64 [{size}]")
        return
    ids = torch.arange(size) + d2t
    if not bool((ids.diff() > 0).all()):
        yield _export("d2t", "i + d2t[i] must ascend strictly; it holds offsets, not target ids")
    elif int(ids[0]) < 0 or int(ids[-1]) >= full:
        yield _export("d2t", f"i + d2t[i] runs from {int(ids[0])} to {int(ids[-1])}, must lie in [0, {full})")
    elif "t2d" in tensors and not torch.equal(tensors["t2d"].nonzero().flatten(), ids):
        yield _export("t2d", "does not mark the tokens that d2t lists")


def _embedding_failures(tensors: Mapping[str, Tensor], embedding_VD: Tensor) -> Iterator[Failure]:
    exported = tensors.get("embed_tokens.weight")
    if exported is None or exported.shape != embedding_VD.shape:
        return
    if not torch.equal(_bits(exported), _bits(embedding_VD.to(exported.dtype))):
        yield _export("embed_tokens.weight", "differs from the target's embeddings, of which it must be a copy")


# ---- RopeGate --------------------------------------------------------------------------------------------


def _rope_failures(config: dict[str, Any], target: dict[str, Any]) -> Iterator[Failure]:
    positions, theirs = config.get("max_position_embeddings"), target.get("max_position_embeddings")
    if positions != theirs:
        yield _rope("max_position_embeddings", f"is {positions!r}, the target's is {theirs!r}")
    head_dim = config.get("head_dim")
    if not _is_size(head_dim):
        return
    try:
        of_target = rope.rope_of(target)
    except GateError as error:
        yield _rope(error.field, f"target: {error.reason}")
        return
    target_dim = target.get("head_dim") or target["hidden_size"] // target["num_attention_heads"]
    expected = rope.inverse_frequencies(of_target, target_dim)
    trained = _provenance(config).get("inv_freq")
    scaling = rope.attention_scaling(of_target)
    for field in ("rope_parameters", "rope_theta"):
        if not config.get(field):
            yield _rope(field, "missing: older and newer readers each need their own schema")
            continue
        try:
            read = rope.legacy_rope(config) if field == "rope_theta" else rope.rope_of(config)
            computed = rope.inverse_frequencies(read, head_dim)
        except GateError as error:
            yield _rope(error.field, error.reason)
            continue
        except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
            yield _rope(field, f"cannot be read ({error})")
            continue
        for source, steps in (("the head was trained with", trained), ("the target has", expected)):
            if not _close(computed, steps):
                yield _rope(field, f"gives {_brief(computed)}, {source} {_brief(steps)}")
        if abs(rope.attention_scaling(read) - scaling) > 1e-6:
            yield _rope(field, f"scales by {rope.attention_scaling(read)}, the target by {scaling}")


def _close(computed: list[float], other: Any) -> bool:
    """Equal but for the rounding of single precision."""
    return (
        isinstance(other, list)
        and len(other) == len(computed)
        and all(abs(a - b) <= 2e-5 * abs(a) for a, b in zip(computed, other, strict=True))
    )


def _brief(steps: Any) -> str:
    if not isinstance(steps, list) or not steps:
        return f"inverse frequencies {steps!r}"
    return f"{len(steps)} inverse frequencies down to {steps[-1]:.6g}"


# ---- reading ---------------------------------------------------------------------------------------------


def _read_config(folder: Path, what: str) -> dict[str, Any]:
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; give the {what}'s")
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise InputError(f"{folder}/config.json: must be an object")
    return config


def _read_target_config(folder: Path) -> dict[str, Any]:
    config = rope.text_config(_read_config(folder, "target"))
    for name in ("hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings"):
        if not _is_size(config.get(name)):
            raise InputError(f"{folder}/config.json: {name} is missing; is this the target's folder?")
    return config


def _read_tensors(export: Path) -> dict[str, Tensor]:
    path = export / "model.safetensors"
    if not path.is_file():
        raise InputError(f"{path}: no such file; export the head again")
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except Exception as error:  # safetensors raises a bare type of its own
        raise InputError(f"{path}: not a whole safetensors file ({error})") from None


def _provenance(config: dict[str, Any]) -> dict[str, Any]:
    ours = config.get("drafthead")
    return ours if isinstance(ours, dict) else {}


def _nulls(value: Any, where: str = "") -> Iterator[str]:
    """Dotted names of all null values."""
    if value is None:
        yield where
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in pairs:
        yield from _nulls(inner, f"{where}.{name}" if where else str(name))


def _is_size(value: Any) -> TypeGuard[int]:
    return type(value) is int and value > 0


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _export(field: str, message: str) -> Failure:
    return {"gate": "ExportGate", "field": field, "message": message}


def _rope(field: str, message: str) -> Failure:
    return {"gate": "RopeGate", "field": field, "message": message}
