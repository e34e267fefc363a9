"""Read an exported head back, as its server would, and name everything that would spoil serving."""

from dataclasses import dataclass
from pathlib import Path

from drafthead.pipeline.export.checks import Export, Failure
from drafthead.pipeline.export.folder import serve_command
from drafthead.pipeline.export.layouts import layout_of


@dataclass(frozen=True, kw_only=True)
class PreflightReport:
    """The object of `drafthead export preflight --json`."""

    ok: bool
    failures: list[Failure]
    """`gate`, `field` and `message` of each."""
    serve_command: str
    """Empty if `speculative_config.json` is missing."""


def preflight(export: Path, target: Path) -> PreflightReport:
    """Check an export against the target it is to be served with (`ExportGate`, `RopeGate`).

    The export folder's name needs no check: vLLM guesses a method from the path only where none is stated, and
    `speculative_config.json` must state one here.

    Raises:
        InputError: One of the folders is missing or is no model folder, or a file in it is torn.
    """
    read = Export(export, target)
    failures = layout_of(read.config).failures(read)
    has_command = (export / "speculative_config.json").is_file()
    command = serve_command(target, export) if has_command else ""
    return PreflightReport(ok=not failures, failures=failures, serve_command=command)
