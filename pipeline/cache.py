"""Where outputs that runs share, and the built-in targets, are kept."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """`DRAFTHEAD_CACHE`, else `~/.cache/drafthead`."""
    given = os.environ.get("DRAFTHEAD_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "drafthead"
