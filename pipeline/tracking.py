"""Weights & Biases: one W&B run per run directory, continued when the run is resumed.

`WANDB_MODE` says where it goes: `online`, `offline` (files only; `wandb sync` uploads them later) or
`disabled`. Unset, it is online if there is a login and offline if there is none, so that nothing ever
waits for a key.
"""

import logging
import netrc
import os
import secrets
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, cast
from urllib.parse import urlparse

from drafthead.data.errors import InputError
from drafthead.data.files import write_text
from drafthead.pipeline.export.folder import is_linked

if TYPE_CHECKING:
    import wandb

INIT_TIMEOUT_S = 30.0
FINISH_TIMEOUT_S = 600.0
"""What a server that went away may hold up a run at its end; the files stay here, to be uploaded later."""
Mode = Literal["online", "offline", "disabled"]
MODES = ("online", "offline", "disabled")
log = logging.getLogger(__name__)


def tracking_mode() -> Mode:
    """Read `WANDB_MODE`, or choose by whether there is a login.

    Raises:
        InputError: `WANDB_MODE` is none of the three.
    """
    mode = os.environ.get("WANDB_MODE", "").strip().lower()
    if not mode:
        return "online" if is_logged_in() else "offline"
    if mode not in MODES:
        raise InputError(f"WANDB_MODE={mode}: no such mode; set it to one of {', '.join(MODES)}")
    return cast(Mode, mode)


def is_logged_in() -> bool:
    """Whether W&B would find a key without asking: in the environment, or in the netrc file."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


class Tracker:
    """Log numbers, tables and folders of one run; a context manager. W&B starts at the first use.

    Args:
        project: W&B project.
        name: Name of the run there.
        config: The resolved recipe.
        directory: The run directory; W&B's files go to `directory`/wandb, as does the id of the W&B run.
        is_main: False on all processes but one; such a tracker does nothing.
    """

    def __init__(self, project: str, name: str, config: Mapping[str, Any], directory: Path, *, is_main: bool = True):
        self.project = project
        self.name = name
        self.config = config
        self.directory = directory
        self.mode: Mode = tracking_mode() if is_main else "disabled"
        self._run: wandb.Run | None = None

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            try:
                run.finish(exit_code=0 if kind is None else 1)
            except TimeoutError:
                command = shlex.join(["wandb", "sync", str(Path(run.dir).parent)])
                print(
                    f"WARNING: W&B did not take everything within {FINISH_TIMEOUT_S:.0f} s; it is kept here, and "
                    f"`{command}` uploads it",
                    file=sys.stderr,
                )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log `metrics` against `step`; a step that is repeated after a resume is logged again."""
        if run := self._started():
            run.log({**metrics, "step": step})

    def table(self, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        if run := self._started():
            import wandb

            run.log({name: wandb.Table(columns=list(columns), data=[list(row) for row in rows])})

    def artifact(self, folder: Path, name: str, type: str, metadata: Mapping[str, Any]) -> None:
        """Log a folder that will not change any more: its files are referred to, not copied, the target's left out."""
        if run := self._started():
            import wandb

            artifact = wandb.Artifact(name, type=type, metadata=dict(metadata))
            for path in sorted(path for path in folder.rglob("*") if path.is_file() and not is_linked(path)):
                name_inside = path.relative_to(folder).as_posix()
                artifact.add_file(str(path), name=name_inside, skip_cache=True, policy="immutable")
            run.log_artifact(artifact)

    def _started(self) -> "wandb.Run | None":
        if self._run is None and self.mode != "disabled":
            self._run = self._start(self.mode)
        return self._run

    def _start(self, mode: Literal["online", "offline"]) -> "wandb.Run":
        import wandb

        # it would advertise itself on the terminal wherever an OpenAI client has been imported, as vLLM does
        os.environ.setdefault("WANDB_DISABLE_WEAVE", "true")
        try:
            run = wandb.init(
                project=self.project,
                name=self.name,
                id=run_id(self.directory),
                config=dict(self.config),
                dir=self.directory,
                mode=mode,
                # offline too: or each file that `wandb sync` uploads overwrites the curves of the one before
                resume="allow",
                settings=wandb.Settings(
                    console="off",
                    silent=True,
                    disable_code=True,
                    init_timeout=INIT_TIMEOUT_S,
                    finish_timeout=FINISH_TIMEOUT_S,
                    finish_timeout_raises=True,
                ),
            )
        except wandb.Error as error:
            if mode == "offline":
                raise InputError(f"W&B did not start ({error}); set WANDB_MODE=disabled to go on") from None
            # no run fails for want of an account, a key or a network
            print(f"WARNING: W&B did not start ({_one_line(error)}); its files are kept here instead", file=sys.stderr)
            wandb.teardown()
            self.mode = "offline"
            return self._start("offline")
        # our own axis: W&B's counter refuses the steps between a checkpoint and the kill
        run.define_metric("*", step_metric="step")
        log.info("W&B: %s, files in %s", mode, self.directory / "wandb")
        return run


def run_id(directory: Path) -> str:
    """Return the id of the directory's W&B run; it is made once, so that a resumed run goes on in it."""
    path = directory / "wandb" / "run-id.txt"
    if not path.exists():
        write_text(path, secrets.token_hex(4) + "\n")
    return path.read_text(encoding="utf-8").strip()


def sync_command(directory: Path) -> str | None:
    """The command that uploads what W&B wrote offline for a run directory; None if there is nothing left to upload."""
    folder = directory / "wandb"
    written = folder.glob("offline-run-*/*.wandb")
    waiting = [path for path in written if not path.with_name(f"{path.name}.synced").exists()]
    return shlex.join(["wandb", "sync", str(folder)]) if waiting else None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
