"""Single faults made in an exported folder, for the tests of all layouts: each must be named by preflight."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from drafthead.pipeline.export.preflight import PreflightReport
from safetensors.torch import load_file, save_file
from torch import Tensor

Config = dict[str, Any]
Tensors = dict[str, Tensor]
SPECULATIVE = "speculative_config.json"


def fields(report: PreflightReport) -> set[str]:
    return {failure["field"] for failure in report.failures}


def change_config(folder: Path, change: Callable[[Config], Any], file: str = "config.json") -> None:
    """Change a JSON file in place; a link is replaced, not written through."""
    config = json.loads((folder / file).read_text())
    change(config)
    (folder / file).unlink()
    (folder / file).write_text(json.dumps(config))


def change_tensors(folder: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def put(**values: Any) -> Callable[[Config], Any]:
    return lambda config: config.update(values)


def drop(name: str) -> Callable[[Any], Any]:
    return lambda held: held.pop(name)


def poke(name: str, value: float) -> Callable[[Tensors], Any]:
    """Another first element."""
    return lambda tensors: tensors[name].view(-1)[:1].fill_(value)


def swap(one: str, other: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({one: tensors[other], other: tensors[one]})


def redraw(name: str) -> Callable[[Tensors], Any]:
    """Random numbers of the tensor's own size, which no name, shape, type or range gives away."""
    return lambda tensors: tensors[name].copy_(torch.randn(tensors[name].shape) * tensors[name].float().std())


def untrain(config: Config) -> None:
    config["drafthead"]["initial_digest"] = config["drafthead"]["trained_digest"]


CONFIG_FAULTS: dict[str, tuple[Callable[[Config], Any], str]] = {
    "a null": (put(eos_token_id=None), "eos_token_id"),
    "a null in provenance": (lambda c: c["drafthead"].update(trained_length=None), "drafthead.trained_length"),
    "dtype against torch_dtype": (put(torch_dtype="float32"), "dtype"),
    "dtype against tensors": (put(dtype="float16", torch_dtype="float16"), "lm_head.weight"),
    "no dtype": (drop("dtype"), "dtype"),
    "quantisation block copied": (put(quantization_config={"bits": 8}), "quantization_config"),
    "compression block copied": (put(compression_config={"format": "int"}), "compression_config"),
    "a key of another head": (put(logit_scale=0.5), "logit_scale"),
    "a key that nobody knows": (put(sliding_window=64), "sliding_window"),
    "architecture as text": (put(architectures="LlamaForCausalLM"), "architectures"),
    "vocab_size": (put(vocab_size=500), "vocab_size"),
    "vocab_size padded": (put(vocab_size=576), "vocab_size"),
    "vocab_size as text": (put(vocab_size="512"), "vocab_size"),
    "never trained": (untrain, "drafthead.initial_digest"),
    "another training": (lambda c: c["drafthead"].update(trained_digest="0" * 16), "drafthead.trained_digest"),
    "another map": (lambda c: c["drafthead"].update(map_digest="0" * 16), "drafthead.map_digest"),
    "no provenance": (drop("drafthead"), "drafthead.initial_digest"),
    "provenance as list": (put(drafthead=[]), "drafthead.initial_digest"),
    "another target": (lambda c: c["drafthead"].update(target_fingerprint="0" * 16), "drafthead.target_fingerprint"),
}
"""In the config.json of any head that is a folder of its own."""

SPECULATIVE_FAULTS: dict[str, tuple[Callable[[Config], Any], str]] = {
    "another method": (put(method="eagle"), "method"),
    "no method": (drop("method"), "method"),
    "method left to guessing": (put(method=None), "method"),
    "method in capitals": (lambda c: c.update(method=c["method"].upper()), "method"),
    "block size as k": (put(num_speculative_tokens=4), "num_speculative_tokens"),
    "k zero": (put(num_speculative_tokens=0), "num_speculative_tokens"),
    "k as text": (put(num_speculative_tokens="3"), "num_speculative_tokens"),
    "k true": (put(num_speculative_tokens=True), "num_speculative_tokens"),
    "no k": (drop("num_speculative_tokens"), "num_speculative_tokens"),
    "relative path": (put(model="run/export"), "model"),
    "path of another folder": (put(model="/tmp"), "model"),
    "a path with a zero byte": (put(model="/tmp/\0"), "model"),
    "tensor parallelism inside": (put(tensor_parallel_size=2), "tensor_parallel_size"),
    "quantised": (put(quantization="fp8"), "quantization"),
    "a shorter context": (put(max_model_len=256), "max_model_len"),
    "a null": (put(draft_tensor_parallel_size=None), "draft_tensor_parallel_size"),
    "a key misspelt": (put(num_spec_tokens=3), "num_spec_tokens"),
}
"""In the speculative_config.json of a head exported for three draft tokens."""
