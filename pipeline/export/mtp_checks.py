"""`preflight` of a stitched MTP checkpoint: what vLLM would read from it, held against the target (`ExportGate`).

vLLM reads every tensor of each file that the index names, so files are judged by what they hold, not by what the index
says of them.
"""

import filecmp
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from drafthead.data.errors import GateError, InputError
from drafthead.data.files import read_json
from drafthead.pipeline.export import rope
from drafthead.pipeline.export.checks import (
    Export,
    Failure,
    bits,
    digest_failures,
    export_failure,
    fixed_failures,
    null_failures,
    path_failures,
    provenance_failures,
    provenance_of,
    quantisation_file_failures,
    rope_failure,
    rope_failures,
    shape_failures,
    speculative_failures,
    value_failures,
)
from drafthead.pipeline.export.folder import DTYPES
from drafthead.pipeline.export.mtp import (
    INDEX,
    LEFT_OUT,
    MIMO,
    ROPE,
    companions,
    missing_biases,
    other_files,
    stitched_config,
)
from drafthead.pipeline.heads.mtp import MTP, MTPOptions
from drafthead.pipeline.heads.mtp_layouts import LAYOUTS, MTPLayout
from drafthead.pipeline.target import Target
from safetensors import safe_open
from torch import Tensor

FIXED = {"architectures": [MIMO], "model_type": "qwen2", "num_nextn_predict_layers": 1, "use_sliding_window": False}


@dataclass(frozen=True)
class Stitched:
    """The tensors of a stitched folder, by the files that its index names."""

    folder: Path

    @cached_property
    def weight_map(self) -> dict[str, str]:
        found: dict[str, str] = read_json(self.folder / INDEX)["weight_map"]
        return found

    @cached_property
    def held(self) -> dict[str, list[str]]:
        """Names of the tensors in each file."""
        return {file: _names_in(self.folder / file) for file in sorted({*self.weight_map.values()})}

    def has(self, name: str) -> bool:
        return name in self.held.get(self.weight_map.get(name, ""), ())

    def tensor(self, name: str) -> Tensor:
        with safe_open(self.folder / self.weight_map[name], "pt") as file:
            loaded: Tensor = file.get_tensor(name)
            return loaded


def mtp_failures(export: Export) -> list[Failure]:
    """All faults of the folder."""
    config = export.config
    ours = provenance_of(config)
    try:
        options = MTPOptions(**ours["head"])
        layout = LAYOUTS[options.layout]
    except (KeyError, TypeError):
        return [export_failure("drafthead.head", "missing or unknown: it cannot be told which layer was trained")]
    stitched, target = Stitched(export.folder), export.target
    failures = [
        *path_failures(export.folder),
        *_config_failures(config, target, options.layout),
        *_rope_failures(config, export, options.layout),
        *speculative_failures(config, export.folder, "mtp", "vLLM would guess", has_model=False),
        *_index_failures(stitched),
        *_further_file_failures(stitched, target),
        *quantisation_file_failures(export.folder, target.path),
    ]
    trained = _expected_shapes(target, options)
    present = {name: stitched.tensor(name) for name in trained if stitched.has(name)}
    failures += shape_failures(trained, present)
    failures += value_failures({"dtype": ours.get("head_dtype")}, _without_biases(present))
    failures += _trained_failures(config, present, target, layout)
    failures += _target_failures(stitched, target, trained.keys())
    failures += _companion_failures(stitched, target, options.layout)
    failures += _file_failures(export.folder, target)
    return failures


# ---- config ----------------------------------------------------------------------------------------------


def _config_failures(config: dict[str, Any], target: Target, layout: str) -> Iterator[Failure]:
    if layout == "mimo":
        yield from null_failures(config)
        yield from fixed_failures(config, FIXED)
        for name in LEFT_OUT:
            if name in config:
                yield export_failure(name, "must be left out: a Qwen2 has no such key, or means something else by it")
    try:
        wanted = stitched_config(target, layout)
    except GateError:
        return  # _rope_failures names it
    checked = FIXED.keys() | set(ROPE) if layout == "mimo" else set()
    for name in sorted((wanted.keys() | config.keys()) - checked - {"drafthead", *LEFT_OUT}):
        # as text: 64.0 equals 64, but no server takes it for a size
        if json.dumps(config.get(name), sort_keys=True) != json.dumps(wanted.get(name), sort_keys=True):
            yield export_failure(name, f"is {config.get(name)!r}, must be {wanted.get(name)!r}, as the target has it")


def _rope_failures(config: dict[str, Any], export: Export, layout: str) -> Iterator[Failure]:
    """`RopeGate`: the target computes what it did before, and the layer what it was trained with."""
    target = export.target_config
    if layout == "mimo":
        yield from rope_failures({**config, "head_dim": target["hidden_size"] // target["num_attention_heads"]}, target)
        return
    text = rope.text_config(config)
    for name in ROPE:
        if text.get(name) != target.get(name):
            yield rope_failure(name, f"is {text.get(name)!r}, the target's is {target.get(name)!r}")
    try:
        parameters = rope.rope_of(target)
    except GateError as error:
        yield rope_failure(error.field, f"target: {error.reason}")
        return
    expected = torch.tensor(rope.inverse_frequencies(parameters, rope.rotary_size(target)))
    trained = torch.tensor(provenance_of(config).get("inv_freq") or [])
    if trained.shape != expected.shape or not torch.allclose(trained, expected, rtol=2e-5, atol=0):
        yield rope_failure(
            "drafthead.inv_freq", "the layer was trained with another rotary embedding than the target's"
        )


# ---- tensors ---------------------------------------------------------------------------------------------


def _index_failures(stitched: Stitched) -> Iterator[Failure]:
    """Each tensor lies where the index says, and nowhere else."""
    for name in sorted(stitched.weight_map):
        if not stitched.has(name):
            yield export_failure(name, f"is not in {stitched.weight_map[name]}, where {INDEX} says it is")
    counts = Counter(name for names in stitched.held.values() for name in names)
    for name in sorted(name for name, count in counts.items() if count > 1):
        files = ", ".join(file for file, names in stitched.held.items() if name in names)
        yield export_failure(name, f"lies in {files}: vLLM reads all of them and the last one counts")
    for name in sorted(counts.keys() - stitched.weight_map.keys()):
        yield export_failure(name, f"is not in {INDEX}, though its file is: vLLM would read it")


def _further_file_failures(stitched: Stitched, target: Target) -> Iterator[Failure]:
    """Weights beside those that the index names, but for files of the target that no index names either."""
    for path in sorted(stitched.folder.glob("*.safetensors")):
        if path.name not in stitched.held and not (target.path / path.name).exists():
            yield export_failure(path.name, f"must be left out: {INDEX} does not name it, and some loaders read it")


def _expected_shapes(target: Target, options: MTPOptions) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the trained layer's tensors, from the module itself, which holds no memory here."""
    with torch.device("meta"):
        head = MTP(target.config, options)
    state = LAYOUTS[options.layout].to_checkpoint(head.state_dict(), target.num_layers)
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def _trained_failures(
    config: dict[str, Any], tensors: Mapping[str, Tensor], target: Target, layout: MTPLayout
) -> Iterator[Failure]:
    """The tensors are those that training ended with: neither the checkpoint's own, nor the initial ones."""
    ours = provenance_of(config)
    dtype = DTYPES.get(str(ours.get("head_dtype")))
    if dtype is None:
        yield export_failure(
            "drafthead.head_dtype", f"is {ours.get('head_dtype')!r}, must be one of {', '.join(DTYPES)}"
        )
        return
    own = {"drafthead": ours, "dtype": ours["head_dtype"]}
    yield from digest_failures(own, tensors)
    state = {**layout.from_checkpoint(tensors, target.num_layers), "lm_head.weight": target.lm_head_VD}
    yield from provenance_failures(own, state, target)


def _target_failures(stitched: Stitched, target: Target, replaced: Any) -> Iterator[Failure]:
    """The target's own tensors are all there, in its own files or bit for bit."""
    for name, path in sorted(target.tensor_files.items()):
        if name in replaced:
            continue
        if not stitched.has(name):
            yield export_failure(name, "missing: it is one of the target's tensors")
        elif not (stitched.folder / stitched.weight_map[name]).samefile(path) and not _equal(
            stitched.tensor(name), target.tensor(name)
        ):
            yield export_failure(name, "differs from the target's tensor, which must stay as it is")


def _companion_failures(stitched: Stitched, target: Target, layout: str) -> Iterator[Failure]:
    """Zero biases, and copies of the lm_head where vLLM asks for them."""
    biases = missing_biases(target) if layout == "mimo" else {}
    for name, wanted in sorted(companions(target, layout).items()):
        if not stitched.has(name):
            yield export_failure(name, "missing: vLLM would not load the folder without it")
        elif not _equal(stitched.tensor(name), wanted):
            what = f"{wanted.numel()} zeros" if name in biases else "a copy of the target's lm_head"
            yield export_failure(name, f"must be {what}, as {wanted.dtype}")


def _file_failures(folder: Path, target: Target) -> Iterator[Failure]:
    """Tokenizer, chat template and generation config are the target's."""
    for path in other_files(target.path):
        own = folder / path.name
        if not own.is_file():
            yield export_failure(path.name, "missing: the target has this file")
        elif not own.samefile(path) and not filecmp.cmp(own, path, shallow=False):
            yield export_failure(path.name, "differs from the target's")


def _without_biases(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A bias may be zero throughout."""
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("bias")}


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))


def _names_in(path: Path) -> list[str]:
    if not path.is_file():
        return []
    try:
        with safe_open(path, "pt") as file:
            return list(file.keys())
    except Exception as error:  # safetensors raises a bare type of its own
        raise InputError(f"{path}: not a whole safetensors file ({error})") from None
