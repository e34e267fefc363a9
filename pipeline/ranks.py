"""Several workers that fail say why once, in one line; whoever started them ends with their exit code.

python -m drafthead.pipeline.ranks launch ...     # `accelerate launch ...` without tracebacks of the launcher's own
"""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from drafthead.data.errors import InputError

NOTE = ".failed-"
"""A file that begins so: a worker has said why the workers of a launcher (its process id follows) end."""
BAD_INPUT = 2
"""Exit code of a worker that stopped with an InputError."""


@contextlib.contextmanager
def say_once(folder: Path) -> Iterator[None]:
    """Report errors as the command line does, but of several ranks the first one alone.

    The others may meet the same error, or lose their connection to a rank that has ended.
    """
    from drafthead.pipeline.cli import report_errors

    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        with report_errors():
            yield
        return
    note = folder / f"{NOTE}{os.getppid()}"
    sys.excepthook = lambda *error: _unless_said(note, *error)
    with report_errors():
        try:
            yield
        except (InputError, OSError):
            if not _is_first(note):
                sys.exit(BAD_INPUT)
            raise


def _unless_said(note: Path, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not note.exists():
        sys.__excepthook__(kind, error, trace)


def _is_first(note: Path) -> bool:
    try:
        note.open("x").close()
    except FileExistsError:
        return False
    except OSError:  # a full disk, perhaps the very error: better said twice than never
        return True
    return True


def forget_failures(folder: Path) -> bool:
    """Remove the notes of workers that ended; returns whether there were any."""
    notes = list(folder.glob(f"{NOTE}*"))
    for note in notes:
        note.unlink(missing_ok=True)
    return bool(notes)


def main() -> None:
    """Run Accelerate's command line; a failed worker is one line and an exit code."""
    from accelerate.commands.accelerate_cli import main as accelerate
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.ERROR)  # the launcher's account of workers that it ends, many lines long
    try:
        accelerate()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            print(f"rank {rank} was ended by signal {-failure.exitcode}", file=sys.stderr)
        sys.exit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode)


if __name__ == "__main__":
    main()
