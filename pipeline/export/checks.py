"""What `preflight` looks at in every export, whatever its head: values, files, shapes, rotary embedding.

Only the two folders are read. vLLM itself raises for hardly any of these faults: a head with a wrong or missing part
is served at acceptance length 1, with the right text.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

import torch
from drafthead.data.errors import GateError, InputError
from drafthead.data.files import read_json
from drafthead.pipeline.export import rope
from drafthead.pipeline.export.folder import DTYPES, check_path, map_digest, named_method, state_digest
from drafthead.pipeline.target import Target
from safetensors import safe_open
from torch import Tensor

Failure = dict[str, str]
MAPS = ("d2t", "t2d")
"""Between draft and target ids: integers, whose shape follows from the draft vocabulary."""
QUANTISATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Files beside a config.json that say the same as a block in it."""
QUANTISATION = ("quantization_config", "compression_config", "quantization")
SERVING_CHOICES = (
    "num_speculative_tokens_per_batch_size",
    "draft_tensor_parallel_size",
    "rejection_sample_method",
    "draft_sample_method",
)
"""Keys of a speculative config that whoever serves may add: they change speed, or how drafts are judged."""
ANY_CONFIG = ("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", *QUANTISATION)
"""Keys of a config.json that do nothing to a head, or have a check of their own."""


@dataclass(frozen=True)
class Export:
    """An export folder and the target that it is to be served with, as read from their files."""

    folder: Path
    target_path: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        return read_config(self.folder, "export")

    @cached_property
    def target_config(self) -> dict[str, Any]:
        """The text part of the target's config.json."""
        return read_target_config(self.target_path)

    @cached_property
    def target(self) -> Target:
        return Target(self.target_path)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        return read_tensors(self.folder)


def null_failures(config: dict[str, Any]) -> Iterator[Failure]:
    for name in _nulls(config):
        yield export_failure(name, "is null; leave the key out or give it a value")


def fixed_failures(config: dict[str, Any], fixed: Mapping[str, Any]) -> Iterator[Failure]:
    """Keys that have one right value, type included."""
    for name, right in fixed.items():
        if type(config.get(name)) is not type(right) or config[name] != right:
            yield export_failure(name, f"is {config.get(name)!r}, must be {right!r}")


def size_failures(config: dict[str, Any], names: Iterable[str]) -> Iterator[Failure]:
    for name in names:
        if not is_size(config.get(name)):
            yield export_failure(name, f"is {config.get(name)!r}, must be a positive integer")


def flag_failures(config: dict[str, Any], names: Iterable[str]) -> Iterator[Failure]:
    for name in names:
        if type(config.get(name)) is not bool:
            yield export_failure(name, f"is {config.get(name)!r}, must be true or false: vLLM would guess")


def dtype_failures(config: dict[str, Any]) -> Iterator[Failure]:
    for name in QUANTISATION:
        if name in config:
            yield export_failure(name, "the head is not quantised; vLLM would look for quantised tensors")
    if config.get("dtype") not in DTYPES or config.get("torch_dtype") != config.get("dtype"):
        values = f"{config.get('dtype')!r} and {config.get('torch_dtype')!r}"
        message = f"dtype and torch_dtype are {values}, must be equal and one of {', '.join(DTYPES)}"
        yield export_failure("dtype", message)


def speculative_failures(
    config: dict[str, Any], export: Path, method: str, why: str, *, has_model: bool = True, any_path: bool = False
) -> Iterator[Failure]:
    """`speculative_config.json`: the method, the folder's own absolute path, the draft tokens it was exported for.

    Args:
        has_model: Whether the head is a folder of its own; an MTP layer is read from the served model.
        any_path: Whether vLLM believes the method whatever the path of the folder is.
    """
    path = export / "speculative_config.json"
    if not path.is_file():
        message = "missing: no server can be started from this folder alone"
        yield export_failure("speculative_config.json", message)
        return
    values = read_json(path)
    if not isinstance(values, dict):
        yield export_failure("speculative_config.json", "must be an object")
        return
    for name in sorted(values.keys() - {"method", "model", "num_speculative_tokens"}):
        if name not in SERVING_CHOICES or values[name] is None:
            message = f"is {values[name]!r}, must be left out: the head was not exported with it"
            yield export_failure(f"speculative_config.{name}", message)
    if values.get("method") != method:
        yield export_failure("speculative_config.method", f"is {values.get('method')!r}, must be {method!r}: {why}")
    if has_model:
        yield from _model_failures(values.get("model"), export, any_path)
    elif "model" in values:
        message = f"is {values['model']!r}, must be left out: the layer is read from the served folder itself"
        yield export_failure("speculative_config.model", message)
    k, trained = values.get("num_speculative_tokens"), provenance_of(config).get("num_speculative_tokens")
    if not is_size(k) or k != trained:
        message = f"is {k!r}, the head was exported for {trained!r} draft tokens"
        yield export_failure("speculative_config.num_speculative_tokens", message)


def _model_failures(model: Any, export: Path, any_path: bool) -> Iterator[Failure]:
    if not isinstance(model, str) or not Path(model).is_absolute():
        yield export_failure("speculative_config.model", f"is {model!r}, must be the absolute path of this folder")
        return
    try:
        found = Path(model).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a zero byte
        yield export_failure("speculative_config.model", f"is {model!r}, which leads nowhere ({error})")
        return
    if found != export.resolve():
        yield export_failure("speculative_config.model", f"is {model}, this folder is {export.resolve()}")
    # vLLM reads the path as it is written here, links and all
    elif not any_path and (word := named_method(model)):
        message = f"is {model}: vLLM would take the head for another kind, because {word!r} stands in it"
        yield export_failure("speculative_config.model", message)


def key_failures(config: dict[str, Any], known: Collection[str]) -> Iterator[Failure]:
    """Keys that no writer of ours writes: vLLM may read some of them, and compute something else then."""
    for name in sorted(config.keys() - set(known) - set(ANY_CONFIG)):
        yield export_failure(name, "must be left out: the head was not exported with it, and vLLM may read it")


def file_failures(folder: Path) -> Iterator[Failure]:
    """vLLM reads every *.safetensors file of a folder without an index, and some files beside config.json."""
    yield from quantisation_file_failures(folder)
    for path in sorted(folder.glob("*.safetensors*")):
        if path.name != "model.safetensors":
            yield export_failure(path.name, "must be left out: vLLM would read tensors from it as well, or instead")


def quantisation_file_failures(folder: Path, target: Path | None = None) -> Iterator[Failure]:
    """Files that would make vLLM look for quantised tensors, but for those of the target that is served from here."""
    for name in QUANTISATION_FILES:
        if (folder / name).exists() and not (target and (target / name).exists()):
            yield export_failure(name, "must be left out: vLLM would look for quantised tensors, as for its model")


def path_failures(export: Path) -> Iterator[Failure]:
    try:
        check_path(export)
    except GateError as error:
        yield export_failure(error.field, error.reason)


def provenance_failures(config: dict[str, Any], tensors: Mapping[str, Tensor], target: Target) -> Iterator[Failure]:
    """The head was trained, and for this target."""
    ours = provenance_of(config)
    initial, dtype = ours.get("initial_digest"), DTYPES.get(str(config.get("dtype")))
    if not isinstance(initial, str):
        yield export_failure("drafthead.initial_digest", "missing: it cannot be told whether the head was trained")
    elif dtype is not None and state_digest(tensors, dtype) == initial:
        yield export_failure("drafthead.initial_digest", "the head equals its initialisation: it was never trained")
    if ours.get("target_fingerprint") != target.fingerprint:
        message = f"{target.path} is not the target that the head was trained for, or its files changed since"
        yield export_failure("drafthead.target_fingerprint", message)


def digest_failures(config: dict[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[Failure]:
    """The tensors are those that training ended with, whatever else they might be by name and shape."""
    ours, dtype = provenance_of(config), DTYPES.get(str(config.get("dtype")))
    if dtype is not None and state_digest(tensors, dtype) != ours.get("trained_digest"):
        yield export_failure("drafthead.trained_digest", "the tensors are not those that training ended with")
    if map_digest(tensors) != ours.get("map_digest"):
        yield export_failure("drafthead.map_digest", "the draft tokens are not those that the head was trained for")


def shape_failures(
    shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor], maps: Collection[str] = MAPS
) -> Iterator[Failure]:
    """Names and shapes, both ways; `maps` have checks of their own."""
    for name in sorted(shapes.keys() - tensors.keys()):
        yield export_failure(name, "missing: vLLM would serve it uninitialised or take another tensor for it")
    for name in sorted(tensors.keys() - shapes.keys() - set(maps)):
        yield export_failure(name, "vLLM's model has no such tensor under this config")
    for name in sorted(shapes.keys() & tensors.keys()):
        if tuple(tensors[name].shape) != shapes[name]:
            yield export_failure(name, f"has shape {list(tensors[name].shape)}, the config says {list(shapes[name])}")


def value_failures(
    config: dict[str, Any], tensors: Mapping[str, Tensor], maps: Collection[str] = MAPS
) -> Iterator[Failure]:
    dtype = DTYPES.get(str(config.get("dtype")))
    for name, tensor in sorted(tensors.items()):
        if name in maps:
            continue
        if dtype is not None and tensor.dtype != dtype:
            yield export_failure(name, f"is stored as {tensor.dtype}, the config says {dtype}")
        if not tensor.is_floating_point():
            continue
        if not torch.isfinite(tensor).all():
            yield export_failure(name, "holds NaN or infinity")
        elif not tensor.any():
            yield export_failure(name, "is zero throughout")


ROPE_KEYS = ("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor")


# ---- RopeGate --------------------------------------------------------------------------------------------


def rope_failures(config: dict[str, Any], target: dict[str, Any]) -> Iterator[Failure]:
    positions, theirs = config.get("max_position_embeddings"), target.get("max_position_embeddings")
    if positions != theirs:
        yield rope_failure("max_position_embeddings", f"is {positions!r}, the target's is {theirs!r}")
    head_dim = config.get("head_dim")
    if not is_size(head_dim):
        return
    try:
        of_target = rope.rope_of(target)
    except GateError as error:
        yield rope_failure(error.field, f"target: {error.reason}")
        return
    expected = rope.inverse_frequencies(of_target, rope.rotary_size(target))
    trained = provenance_of(config).get("inv_freq")
    scaling = rope.attention_scaling(of_target)
    for field in ("rope_parameters", "rope_theta"):
        if not config.get(field):
            yield rope_failure(field, "missing: older and newer readers each need their own schema")
            continue
        try:
            read = rope.legacy_rope(config) if field == "rope_theta" else rope.rope_of(config)
            computed = rope.inverse_frequencies(read, head_dim)
        except GateError as error:
            yield rope_failure(error.field, error.reason)
            continue
        except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
            yield rope_failure(field, f"cannot be read ({error})")
            continue
        for source, steps in (("the head was trained with", trained), ("the target has", expected)):
            if not _close(computed, steps):
                yield rope_failure(field, f"gives {_brief(computed)}, {source} {_brief(steps)}")
        if abs(rope.attention_scaling(read) - scaling) > 1e-6:
            yield rope_failure(field, f"scales by {rope.attention_scaling(read)}, the target by {scaling}")
    # a reader may see what ours overlooks: a second type, a section for images, numbers as text
    wanted = rope.both_schemas(of_target)
    for field in ROPE_KEYS:
        if config.get(field) and config.get(field) != wanted.get(field):
            yield rope_failure(field, f"is {config[field]!r}, must be {wanted.get(field, 'left out')!r}")


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


def read_config(folder: Path, what: str) -> dict[str, Any]:
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; give the {what}'s")
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise InputError(f"{folder}/config.json: must be an object")
    return config


def read_target_config(folder: Path) -> dict[str, Any]:
    config = rope.text_config(read_config(folder, "target"))
    for name in ("hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings"):
        if not is_size(config.get(name)):
            raise InputError(f"{folder}/config.json: {name} is missing; is this the target's folder?")
    return config


def read_tensors(export: Path) -> dict[str, Tensor]:
    path = export / "model.safetensors"
    if not path.is_file():
        raise InputError(f"{path}: no such file; export the head again")
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except Exception as error:  # safetensors raises a bare type of its own
        raise InputError(f"{path}: not a whole safetensors file ({error})") from None


def provenance_of(config: dict[str, Any]) -> dict[str, Any]:
    ours = config.get("drafthead")
    return ours if isinstance(ours, dict) else {}


def _nulls(value: Any, where: str = "") -> Iterator[str]:
    """Dotted names of all null values."""
    if value is None:
        yield where
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in pairs:
        yield from _nulls(inner, f"{where}.{name}" if where else str(name))


def is_size(value: Any) -> TypeGuard[int]:
    return type(value) is int and value > 0


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def export_failure(field: str, message: str) -> Failure:
    return {"gate": "ExportGate", "field": field, "message": message}


def rope_failure(field: str, message: str) -> Failure:
    return {"gate": "RopeGate", "field": field, "message": message}
