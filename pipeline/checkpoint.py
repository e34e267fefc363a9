"""Checkpoints that are whole or absent, the newest one to go on from, and the best head so far."""

import json
import shutil
from pathlib import Path
from typing import Any

from accelerate import Accelerator, DistributedType
from accelerate.utils import broadcast_object_list
from drafthead.data.errors import InputError
from drafthead.data.files import read_json, write_atomically, write_json
from drafthead.pipeline.launch import full_weights
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

STATE = "state.json"


def save_checkpoint(accelerator: Accelerator, folder: Path, step: int, state: dict[str, Any], keep: int) -> None:
    """Save weights, moments and RNG of all ranks; `state.json` is written last and the folder renamed into place.

    Raises:
        InputError: There was no room for it.
    """
    final = folder / f"step-{step:08d}"
    temporary = folder / f".step-{step:08d}.part"
    if accelerator.is_main_process:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    accelerator.wait_for_everyone()
    try:
        accelerator.save_state(str(temporary), safe_serialization=True)
    except RuntimeError as error:
        if "inline_container" not in str(error):  # how torch.save speaks of a write that came up short
            raise
        raise InputError(f"{temporary}: the checkpoint could not be written whole; is the disk full?") from None
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        files = {str(path.relative_to(temporary)): path.stat().st_size for path in files_below(temporary)}
        ranks = accelerator.num_processes
        packs = ranks * accelerator.gradient_accumulation_steps
        known = {"step": step, "world_size": ranks, "packs_per_step": packs, "files": files}
        write_json(temporary / STATE, {**known, **state})
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        for old in list_checkpoints(folder)[:-keep]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def list_checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first: every file is there and as long as it was written."""
    return sorted(path.parent for path in folder.glob(f"step-*/{STATE}") if is_whole(path.parent))


def is_whole(checkpoint: Path) -> bool:
    """Whether nothing is missing or cut off, as after a power loss or a removal that was not finished."""
    try:
        files = read_json(checkpoint / STATE)["files"]
    except (InputError, KeyError):
        return False
    found = {str(path.relative_to(checkpoint)): path.stat().st_size for path in files_below(checkpoint)}
    return all(found.get(name) == size for name, size in files.items())


def newest_state(folder: Path) -> dict[str, Any] | None:
    """What the newest whole checkpoint says of itself, before anything is made that it is loaded into."""
    found = list_checkpoints(folder)
    return None if not found else {**read_json(found[-1] / STATE), "path": str(found[-1])}


def resumed_accumulation(state: dict[str, Any], ranks: int, *, deepspeed: bool) -> int:
    """Micro batches that each of `ranks` processes accumulates, so that a step stays what it was in the checkpoint.

    Raises:
        InputError: DeepSpeed keeps a part of the state for each rank, or the step cannot be shared out evenly.
    """
    before, packs = state["world_size"], state["packs_per_step"]
    if before != ranks and deepspeed:
        raise InputError(
            f"{state['path']}: written by {before} processes, this run has {ranks}, and DeepSpeed's state is cut into "
            f"as many parts; start {before} processes, or remove {Path(state['path']).parent} to train anew"
        )
    if packs % ranks:
        raise InputError(
            f"{state['path']}: its steps are of {packs} micro batches (written by {before} processes), which "
            f"{ranks} processes cannot share; start a number that divides {packs}, or remove "
            f"{Path(state['path']).parent} to train anew"
        )
    return int(packs // ranks)


def load_newest(accelerator: Accelerator, folder: Path) -> dict[str, Any] | None:
    """Restore the newest whole checkpoint into the prepared objects; returns its state, or None.

    Raises:
        InputError: See `resumed_accumulation`.
    """
    state = newest_state(folder)
    if state is None:
        return None
    deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    accumulation = resumed_accumulation(state, accelerator.num_processes, deepspeed=deepspeed)
    assert accumulation == accelerator.gradient_accumulation_steps, "the accelerator was made for this checkpoint"
    accelerator.load_state(state["path"])
    return state


class BestHead:
    """The weights whose held-out walk was the longest so far: one file, which says its step and walk too.

    It outlives a kill, and a step that is trained again gives the same weights, so what a resumed training ends with
    is what an uninterrupted one does.
    """

    def __init__(self, folder: Path):
        self.path = folder / "best.safetensors"

    def offer(self, accelerator: Accelerator, model: nn.Module, step: int, walk: dict[str, Any]) -> None:
        """Keep the present weights if their walk is not shorter; all ranks must call it."""
        found = self.read()
        # ranks could disagree in the last bits, and gathering weights takes them all
        wanted = [found is None or walk["mean_acceptance_length"] >= found["walk"]["mean_acceptance_length"]]
        broadcast_object_list(wanted)
        if not wanted[0]:
            return
        weights = full_weights(accelerator, model)
        if accelerator.is_main_process:
            tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
            about = {"step": str(step), "walk": json.dumps(walk)}
            write_atomically(self.path, lambda temporary: save_file(tensors, temporary, about))

    def read(self) -> dict[str, Any] | None:
        """Step and walk of what is kept."""
        if not self.path.is_file():
            return None
        with safe_open(self.path, "pt") as file:
            about = file.metadata()
        return {"step": int(about["step"]), "walk": json.loads(about["walk"])}

    def weights(self) -> dict[str, Tensor]:
        return load_file(self.path)
