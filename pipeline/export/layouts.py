"""The layouts that vLLM loads, one for each kind of head: who writes it and who reads it back."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafthead.pipeline.export.checks import Export, Failure, provenance_of
from drafthead.pipeline.export.eagle3 import write_eagle3
from drafthead.pipeline.export.eagle3_checks import eagle3_failures
from drafthead.pipeline.export.folder import TrainedHead, check_path
from drafthead.pipeline.export.medusa import ARCHITECTURE as MEDUSA
from drafthead.pipeline.export.medusa import write_medusa
from drafthead.pipeline.export.medusa_checks import medusa_failures
from drafthead.pipeline.export.mtp import ARCHITECTURES as MTP
from drafthead.pipeline.export.mtp import write_mtp
from drafthead.pipeline.export.mtp_checks import mtp_failures


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a kind of head is exported."""

    write: Callable[[Path, TrainedHead], None]
    """Fill a folder, whole or not at all."""
    failures: Callable[[Export], list[Failure]]
    """Everything that would spoil serving."""
    architectures: tuple[str, ...]
    """Of config.json, by which `preflight` knows the layout."""
    any_path: bool = False
    """Whether vLLM believes the stated method wherever the folder lies; see `folder.check_path`."""


LAYOUTS = {
    "eagle3": Layout(
        write=write_eagle3, failures=eagle3_failures, architectures=("LlamaForCausalLMEagle3",), any_path=True
    ),
    "medusa": Layout(write=write_medusa, failures=medusa_failures, architectures=(MEDUSA,)),
    "mtp": Layout(write=write_mtp, failures=mtp_failures, architectures=MTP),
}
"""By `head.type`."""


def check_export_path(kind: str, folder: Path) -> None:
    """Refuse, before any work, a place from which vLLM would serve another kind of head.

    Raises:
        GateError: See `folder.check_path`.
    """
    if kind in LAYOUTS and not LAYOUTS[kind].any_path:
        check_path(folder)


def layout_of(config: dict[str, Any]) -> Layout:
    """The layout of a folder with this config.json; what cannot be told apart is held against EAGLE-3's."""
    if (kind := provenance_of(config).get("type")) in LAYOUTS:
        return LAYOUTS[kind]
    named = config.get("architectures")
    names = set(named) if isinstance(named, list) else set()
    found = (layout for layout in LAYOUTS.values() if names & set(layout.architectures))
    return next(found, LAYOUTS["eagle3"])
