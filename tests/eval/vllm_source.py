"""Classes of the installed vLLM, taken out of their file: importing vLLM itself takes half a minute."""

import ast
import dataclasses
import importlib.util
import logging
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch


def vllm_folder() -> Path:
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    return Path(found.submodule_search_locations[0])


def take(file: str, **given: Any) -> dict[str, Any]:
    """Run the classes and functions of a file of vLLM; `given` stands for what the file imports from vLLM."""
    text = (vllm_folder() / file).read_text(encoding="utf-8")
    kept = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    names: dict[str, Any] = {
        "__name__": "taken_from_vllm",
        "dataclass": dataclasses.dataclass,
        "field": dataclasses.field,
        "np": numpy,
        "time": time,
        "torch": torch,
        "logger": logging.getLogger("taken_from_vllm"),
        **given,
    }
    exec(compile(ast.Module(kept, []), file, "exec"), names)
    return names
