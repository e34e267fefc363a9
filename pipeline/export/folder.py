"""What every export has in common: how a head is handed over, digests, the folder put in place, the serve command.

vLLM does not notice a missing tensor or a wrong config value: it serves the right text at acceptance length 1. So
nothing here comes from a template: sizes come from the head's tensors, the rest from the target, and `preflight` reads
the folder back.
"""

import hashlib
import importlib.metadata
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from drafthead.data.draft_vocab import DraftVocab
from drafthead.data.errors import GateError
from drafthead.data.files import read_json
from drafthead.pipeline.target import Target
from torch import Tensor

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
OTHER_METHODS = ("eagle-", "eagle3", "dflash", "dspark")
"""What vLLM looks for in the path of a draft model, in this order, and believes more than `method` or `model_type`
(config/speculative.py, "Automatically detect the method")."""
NOT_TRAINED = ("embed_tokens.weight", "d2t", "t2d", "token_map")


@dataclass(frozen=True, kw_only=True)
class TrainedHead:
    """What a writer of exports is given."""

    state: Mapping[str, Tensor]
    """head.safetensors."""
    description: Mapping[str, Any]
    """head.json."""
    target: Target
    vocab: DraftVocab
    k: int
    """`num_speculative_tokens`."""
    dtype: str
    """`bfloat16`, `float16` or `float32`, of every tensor of the head and of its config."""


def provenance(
    target: Target, k: int, trained_length: int, initial_digest: str, tensors: Mapping[str, Tensor], dtype: str
) -> dict[str, Any]:
    """The part of an exported config.json that says where the head comes from, for `preflight`."""
    return {
        "version": importlib.metadata.version("drafthead"),
        "target_fingerprint": target.fingerprint,
        "num_speculative_tokens": k,
        "trained_length": trained_length,
        "initial_digest": initial_digest,
        "trained_digest": state_digest(tensors, DTYPES[dtype]),
        "map_digest": map_digest(tensors),
    }


def check_path(folder: Path) -> None:
    """Refuse an export folder whose path vLLM takes for that of another kind of head.

    Only a head that is served with an EAGLE method may lie below such a path.

    Raises:
        GateError: Naming the part of the path, and what to choose anew.
    """
    for part in folder.resolve().parts:
        if found := named_method(part):
            raise GateError(
                "ExportGate",
                f"path part {part!r}",
                f"vLLM would take the head in {folder.resolve()} for another kind, because {found!r} stands in its "
                f"path; choose another run.name or run.dir",
            )


def named_method(part: str) -> str | None:
    """The method that vLLM reads from a part of a draft model's path, or of its name on the hub."""
    return next((word for word in OTHER_METHODS if word in part.lower()), None)


def serve_command(target_path: Path, export_path: Path) -> str:
    """The shell command that serves the target with the exported head.

    Raises:
        InputError: The export holds no `speculative_config.json`.
    """
    config = json.dumps(exported_config(export_path), separators=(",", ":"))
    served = str(served_path(target_path, export_path).resolve())
    return shlex.join(["vllm", "serve", served, "--speculative-config", config])


def exported_config(export_path: Path) -> dict[str, Any]:
    """The export's `speculative_config.json`, with the folder where it lies now.

    Raises:
        InputError: There is none.
    """
    config: dict[str, Any] = read_json(export_path / "speculative_config.json")
    # the run may have been moved since the export wrote its absolute path
    return {**config, "model": str(export_path.resolve())} if "model" in config else config


CPU_CACHE_GIB = 2


def typed_here(command: str) -> str:
    """A serve command as one types it on this machine.

    On a CPU vLLM sets 92 % of the whole memory aside, and does not start where less is free, unless it is told how much
    its cache may take (vllm/v1/worker/cpu_worker.py).
    """
    return command if torch.cuda.is_available() else f"VLLM_CPU_KVCACHE_SPACE={CPU_CACHE_GIB} {command}"


def served_path(target_path: Path, export_path: Path) -> Path:
    """The folder that a server loads as its model: the target, or the export if it holds the whole target (MTP).

    Raises:
        InputError: The export holds no `speculative_config.json`.
    """
    return target_path if "model" in exported_config(export_path) else export_path


def initial_digests(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Hash a head's trainable state as each dtype would store it, so that an untrained export is noticed."""
    return {name: state_digest(state, dtype) for name, dtype in DTYPES.items()}


def state_digest(state: Mapping[str, Tensor], dtype: torch.dtype) -> str:
    """Hash names, shapes and bits of the trainable tensors of a head, stored as `dtype`."""
    total = hashlib.sha256()
    for name in sorted(set(state) - set(NOT_TRAINED)):
        tensor = state[name].detach().to("cpu", dtype).contiguous()
        total.update(f"{name} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.view(torch.uint8).numpy().data)
    return total.hexdigest()[:16]


def map_digest(tensors: Mapping[str, Tensor]) -> str:
    """Hash which target tokens the head drafts; empty for the whole vocabulary."""
    ids = next((tensors[name] for name in ("d2t", "token_map") if name in tensors), None)
    return "" if ids is None else hashlib.sha256(ids.to(torch.int64).numpy().tobytes()).hexdigest()[:16]


def is_linked(path: Path) -> bool:
    """Whether a file of an export is a file of the target by another name."""
    return path.is_symlink() or path.stat().st_nlink > 1


def replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Fill a new folder beside `folder`, then put it in its place."""
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.", suffix=".part"))
    try:
        write(temporary)
        for path in temporary.iterdir():
            if is_linked(path):
                continue  # the target's own file
            path.chmod(0o644)
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        temporary.chmod(0o755)
        if folder.exists():
            replaced = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.", suffix=".old"))
            folder.rename(replaced)  # an empty folder may be renamed over
            temporary.rename(folder)
            shutil.rmtree(replaced)
        else:
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
