"""Checkpoints that are whole or absent, and the newest one to go on from."""

import shutil
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from drafthead.data.errors import InputError
from drafthead.data.files import read_json, write_json

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
        write_json(temporary / STATE, {"step": step, "world_size": accelerator.num_processes, **state})
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        for old in list_checkpoints(folder)[:-keep]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def list_checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(path.parent for path in folder.glob(f"step-*/{STATE}"))


def load_newest(accelerator: Accelerator, folder: Path) -> dict[str, Any] | None:
    """Restore the newest whole checkpoint into the prepared objects; returns its state, or None.

    Raises:
        InputError: It was written by another number of processes.
    """
    found = list_checkpoints(folder)
    if not found:
        return None
    state: dict[str, Any] = read_json(found[-1] / STATE)
    if state["world_size"] != accelerator.num_processes:
        raise InputError(
            f"{found[-1]}: written by {state['world_size']} processes, this run has {accelerator.num_processes}; "
            f"start as many, or remove {folder} to train anew"
        )
    accelerator.load_state(str(found[-1]))
    return state
