"""Progress bars with an ETA: live on a terminal, a line now and then in a log."""

import sys
from typing import Any

from tqdm import tqdm


def progress(total: int, what: str, unit: str, done: int = 0) -> Any:
    """A bar over `total` units that starts at `done` (what an earlier try finished)."""
    live = sys.stderr.isatty()
    return tqdm(
        total=total,
        initial=done,
        desc=what,
        unit=unit,
        unit_scale=total > 9999,
        mininterval=0.2 if live else 10.0,
        maxinterval=1.0 if live else 20.0,
        dynamic_ncols=live,
        ascii=not live,
        file=sys.stderr,
    )
