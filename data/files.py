"""Files that are either whole or absent: temporary name, fsync, rename."""

import contextlib
import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from drafthead.data.errors import InputError


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file beside `path`, then rename it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(descriptor)
    temporary = Path(name)
    try:
        _report_full_disk(write, temporary, path)
        os.chmod(temporary, 0o644)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _report_full_disk(write: Callable[[Path], None], temporary: Path, path: Path) -> None:
    """Turn other libraries' own words for a full disk (safetensors, torch) into the operating system's error."""
    try:
        write(temporary)
    except OSError:
        raise
    except Exception as error:
        if "No space left" in str(error) or "os error 28" in str(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from None
        raise


def write_text(path: Path, text: str) -> None:
    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    write_atomically(path, write)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not valid JSON ({error})") from None


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read a file that this program wrote; for users' files see `conversations.read_conversations`."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


@contextlib.contextmanager
def append_jsonl(path: Path) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Open a file that grows line by line; a torn last line of an earlier try is cut off first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in read_partial_jsonl(path))
    if path.exists() and path.stat().st_size != len(whole.encode()):
        write_text(path, whole)
    with open(path, "a", encoding="utf-8") as file:

        def append(row: dict[str, Any]) -> None:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()

        yield append


def read_partial_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole lines of a file that grows line by line; a torn last line is left out."""
    if not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            if not line.endswith("\n"):
                return
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                return


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(value: Any, length: int = 16) -> str:
    """Hash a JSON-able value, independent of key order."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:length]
