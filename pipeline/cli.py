"""The command line: `drafthead run RECIPE`, one sub-command per stage, and the checks.

Every command takes `--json` for one object on stdout; everything else goes to stderr. Exit codes: 0 what was asked
holds, 1 a check or gate failed, 2 bad input. What can be said is in `arguments.py`, what is done in `commands.py`.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from drafthead.data.errors import GateError, InputError
from drafthead.pipeline.arguments import parse
from drafthead.pipeline.cores import keep_freed_memory
from safetensors import SafetensorError


def main() -> None:
    quiet_libraries()
    keep_freed_memory()
    arguments = parse(sys.argv[1:])
    with report_errors():
        code = arguments.command(arguments)
        sys.exit(code)


@contextlib.contextmanager
def report_errors() -> Iterator[None]:
    """Turn errors that a user can mend into one line and an exit code."""
    try:
        yield
    except GateError as error:
        _stop(str(error), 1)
    except InputError as error:
        _stop(str(error), 2)
    except BrokenPipeError:
        os._exit(1)  # the reader of our output left; nothing to say to anyone
    except OSError as error:
        if error.errno is None:
            raise
        # of two files (a link, a rename) the second is the one that is written
        where = error.filename2 or error.filename or "a file"
        _stop(f"{where}: {error.strerror}; mend that and run the same command again, finished work is kept", 2)
    except SafetensorError as error:  # a full disk or a torn file; its own type, without the file's name
        _stop(f"tensors could not be read or written ({error}); mend that and run the same command again", 2)
    except KeyboardInterrupt:
        _stop("interrupted; the same command goes on from here", 130)


def _stop(message: str, code: int) -> None:
    print(f"drafthead: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


def quiet_libraries() -> None:
    """Keep third parties' start-up lines out of our output; users' own settings win."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("DS_LOG_LEVEL", "ERROR")
    if not Path("/dev/nvidiactl").exists():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


if __name__ == "__main__":
    main()
