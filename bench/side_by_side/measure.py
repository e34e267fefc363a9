"""Time and peak memory of one operation and its peers on the same inputs, and what a copy on the device reaches."""

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

Run = Callable[[], Tensor]
Clock = Callable[[Run], float]
PEER_ERRORS = (ImportError, RuntimeError, TypeError, AttributeError, AssertionError)
"""Other people's code, in versions that we have not seen: one that fails costs its own line, not the report."""
COPIED_BYTES = {"cuda": 2**30, "cpu": 2**28}
FLUSHED_BYTES = 2**28
"""More than any GPU's cache holds."""


class CannotRunError(RuntimeError):
    """What a peer needs and this machine lacks."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One implementation.

    Attributes:
        name: What the table calls it.
        prepare: Makes the function that is timed; what it allocates beforehand costs nothing.
    """

    name: str
    prepare: Callable[[], Run]


def our_name(device: str) -> str:
    """What the op is on the device: on a CPU it is no Triton kernel."""
    return "drafthead" if device == "cuda" else "drafthead, CPU path"


def plain(run: Run) -> Callable[[], Run]:
    """`prepare` of a contender that needs no preparation."""
    return lambda: run


@dataclass(frozen=True, kw_only=True)
class Case:
    """One shape of one operation.

    Attributes:
        what: Shape and variant.
        ours: Our implementation.
        peers: The others.
        agrees: Whether a peer's result (second) is that of ours (first); a fast wrong answer is no peer.
        num_bytes: Bytes that every implementation has to read or write, each once; 0 where arithmetic decides.
        wants_memory: Whether peak memory is measured.
    """

    what: str
    ours: Contender
    peers: tuple[Contender, ...]
    agrees: Callable[[Tensor, Tensor], bool]
    num_bytes: int = 0
    wants_memory: bool = False


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a case is measured: rounds for `seconds`, but no fewer and no more than these."""

    seconds: float = 10.0
    min_rounds: int = 5
    max_rounds: int = 200
    warm_up: int = 2


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was measured of one contender; `why_not` says why nothing was."""

    what: str
    contender: str
    times_ms: list[float] = field(default_factory=list)
    num_bytes: int = 0
    peak_bytes: int | None = None
    why_not: str = ""

    @property
    def median_ms(self) -> float:
        return median(self.times_ms)

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.median_ms * 1e3


def measure(case: Case, device: str, limits: Limits) -> list[Row]:
    """Run everyone once, compare the results, then time them in turn; our row comes first.

    Raises:
        Exception: Whatever our own implementation raises.
    """
    runs = {case.ours.name: case.ours.prepare()}
    expected = runs[case.ours.name]()
    reasons: dict[str, str] = {}
    for peer in case.peers:
        try:
            run = peer.prepare()
            found = run()
        except PEER_ERRORS as error:
            reasons[peer.name] = _one_line(error)
            continue
        if case.agrees(expected, found):
            runs[peer.name] = run
        else:
            reasons[peer.name] = "gives another result"
    del expected
    times_ms = time_in_turn(runs, clock_of(device), limits)
    peaks = {name: peak_bytes(run, device) for name, run in runs.items()} if case.wants_memory else {}
    return [
        Row(
            what=case.what,
            contender=name,
            times_ms=times_ms.get(name, []),
            num_bytes=case.num_bytes,
            peak_bytes=peaks.get(name),
            why_not=reasons.get(name, ""),
        )
        for name in (case.ours.name, *(peer.name for peer in case.peers))
    ]


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    named = text if isinstance(error, CannotRunError) else f"{type(error).__name__}: {text}"
    return f"not run: {named[:160]}"


def time_in_turn(runs: dict[str, Run], clock: Clock, limits: Limits) -> dict[str, list[float]]:
    """Milliseconds of each run. One round times everyone once, so that a slower minute is slower for all."""
    for run in runs.values():
        for _ in range(limits.warm_up):
            run()
    one_round_s = sum(clock(run) for run in runs.values())
    rounds = max(limits.min_rounds, min(limits.max_rounds, int(limits.seconds / one_round_s)))
    times_ms: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times_ms[name].append(clock(run) * 1e3)
    return times_ms


def clock_of(device: str) -> Clock:
    """Seconds of one run: by events behind a flushed cache on CUDA, by the wall clock on a CPU."""
    return _cuda_clock() if device == "cuda" else _wall_clock


def _wall_clock(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _cuda_clock() -> Clock:
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda")

    def seconds(run: Run) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # while the cache is flushed the host gets ahead, which hides the time of its launches
        flushed.zero_()
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    return seconds


def copy_bytes_per_s(device: str, limits: Limits, num_bytes: int | None = None) -> float:
    """What a large copy reaches; bytes read and bytes written both count."""
    source = torch.ones(num_bytes or COPIED_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times_ms = time_in_turn({"copy": lambda: target.copy_(source)}, clock_of(device), limits)["copy"]
    return 2 * source.nbytes / median(times_ms) * 1e3


def peak_bytes(run: Run, device: str) -> int:
    """The most that torch's allocator holds during a run, on top of what it held before."""
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    return _cpu_peak_bytes(run)


def _cpu_peak_bytes(run: Run) -> int:
    """The CPU's allocator keeps no count, but tells the profiler of every allocation."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    changes = [(event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]"]
    held = peak = 0
    for _, change in sorted(changes, key=lambda timed: timed[0]):
        held += change
        peak = max(peak, held)
    return peak
