"""What a running vLLM accepts of its drafts, and whether that is still what was measured for the head.

drafthead metrics --url http://host:8000/metrics --expect runs/eagle3
drafthead metrics --log vllm.log --json
drafthead metrics --watch 10
"""

import http.client
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafthead.data.errors import InputError
from drafthead.eval.drift import find_drift
from drafthead.eval.vllm_metrics import DraftCounts, read_log, read_prometheus, summarize_counts
from drafthead.pipeline.expected_rates import read_expected

DEFAULT_URL = "http://localhost:8000/metrics"
TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Source:
    """A server or its log."""

    name: str
    read: Callable[[], tuple[DraftCounts, int | None]]
    """All counts so far, and how many lines of a log they are from."""


def open_source(url: str | None, log: Path | None) -> Source:
    """A log file, or a server's address; without either vLLM's own address on this machine."""
    if log is not None:
        return Source(name=str(log), read=lambda: _read_log_file(log))
    address = _with_path(url or DEFAULT_URL)
    return Source(name=address, read=lambda: (read_prometheus(_fetch(address), address), None))


def measure(source: Source, expect: Path | None, tolerance: float) -> dict[str, Any]:
    """Read the source once.

    Returns:
        The object of `drafthead metrics --json`: `source`; `lines` of a log that were pooled; the keys of
        `summarize_counts`; with `expect` also `ok` and `drift`, the object of `find_drift`.

    Raises:
        InputError: The source cannot be read or has no such numbers; nothing was measured for its k before.
    """
    counts, lines = source.read()
    report = {"source": source.name, "lines": lines, **summarize_counts(counts)}
    if expect is None:
        return report
    if not counts.drafts.value:
        raise InputError(f"{source.name}: nothing was drafted yet, so there is nothing to hold against {expect}")
    drift = find_drift(read_expected(expect, counts.k), counts, tolerance=tolerance)
    return {**report, "ok": drift["ok"], "drift": drift}


def watch(source: Source, every_s: float) -> Iterator[dict[str, Any]]:
    """Yield what came since the last look, every so many seconds, until the caller stops.

    A look that fails (the server starts anew) is said on stderr and left out.

    Raises:
        InputError: Already the first look fails.
    """
    (last, _), when = source.read(), time.monotonic()
    while True:
        time.sleep(every_s)
        try:
            counts, _ = source.read()
        except InputError as error:
            print(f"WARNING: {error}", file=sys.stderr)
            continue
        now = time.monotonic()
        new = counts.since(last)
        yield {
            "source": source.name,
            "seconds": now - when,
            "drafts_per_s": new.drafts.value / (now - when),
            "accepted_tokens_per_s": new.accepted_tokens / (now - when),
            **summarize_counts(new),
        }
        last, when = counts, now


# ---- reading ---------------------------------------------------------------------------------------------


def _read_log_file(path: Path) -> tuple[DraftCounts, int]:
    with open(path, encoding="utf-8", errors="replace") as file:
        return read_log(file, str(path))


def _with_path(url: str) -> str:
    """`http://host:8000` means its `/metrics`."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise InputError(f"--url {url}: give an address like {DEFAULT_URL}")
    return url if parts.path not in ("", "/") else parts._replace(path="/metrics").geturl()


def _fetch(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            body: bytes = answer.read()
    except urllib.error.HTTPError as error:
        raise InputError(f"{url}: the server answers {error.code} {error.reason}; give its /metrics") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise InputError(f"{url}: no answer ({reason}); is a vLLM serving there?") from None
    return body.decode("utf-8", errors="replace")


# ---- text ------------------------------------------------------------------------------------------------


def render(report: dict[str, Any]) -> str:
    """The numbers as a table, each that the log's rounding leaves open with its interval."""
    lines = [_head(report)]
    if report["drafts"]:
        lines += ["position  accepted  given the earlier ones"]
        rows = zip(report["per_position"], report["conditional"], report["intervals"]["per_position"], strict=True)
        for position, (rate, given, (low, high)) in enumerate(rows, 1):
            rounding = "" if low == high else f"   between {low:.4f} and {high:.4f}"
            lines.append(f"{position:8}  {rate:8.3f}  {_number(given):>22}{rounding}")
        lines.append(f"mean acceptance length {report['mean_acceptance_length']:.3f} (the target's own token included)")
        lines.append(f"draft acceptance rate  {_number(report['draft_acceptance_rate'])}")
    if "drift" in report:
        lines += _drift_lines(report["drift"])
    return "\n".join(lines)


def _head(report: dict[str, Any]) -> str:
    low, high = report["intervals"]["drafts"]
    drafts = f"{report['drafts']} drafts" if low == high else f"{low} to {high} drafts"
    lines = "" if report["lines"] is None else f", {report['lines']} lines"
    tokens = f"{report['draft_tokens']} draft tokens, {report['accepted_tokens']} accepted"
    return f"{report['source']}{lines}: k={report['k']}, {drafts}, {tokens}"


def _drift_lines(drift: dict[str, Any]) -> list[str]:
    lines = [f"held against {drift['expected_from']} ({drift['expected_drafts']} drafts):"]
    if drift["short_drafts"]:
        lines.append(
            "  some drafts had less than k tokens; found: of those that came to a position, as far as is known"
        )
    for one in drift["positions"]:
        low, high = one["interval"]
        change = f"{one['difference']:+.3f} (between {low:+.3f} and {high:+.3f})"
        found = f"expected {one['expected']:.3f}, found {one['found']:.3f}, {change}"
        lines.append(f"  position {one['position']}: {found}: {one['verdict']}")
    return lines


def render_look(look: dict[str, Any]) -> str:
    """One line of `--watch`."""
    clock = time.strftime("%H:%M:%S")
    if not look["drafts"]:
        return f"{clock}  no drafts"
    rates = " ".join(_number(rate) for rate in look["per_position"])
    speed = f"{look['drafts_per_s']:.1f} drafts/s, {look['accepted_tokens_per_s']:.1f} accepted tokens/s"
    return f"{clock}  length {look['mean_acceptance_length']:.3f}  by position {rates}  {speed}"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"
