"""Compile every kernel ahead of time, without a GPU, and print what it costs: `make kernels-report`.

One line for each case of each operation's `kernel.compile_cases()` and each architecture: registers of a thread, shared
memory, bytes spilled, size. Exits 1 if a kernel does not compile or spills.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from drafthead.kernels.backend import CompileCase, ops_with

ARCHITECTURES = (80, 90, 100)
HEADER = f"{'op':<16} {'kernel':<32} {'arch':<7} {'registers':>9} {'shared B':>9} {'spilled B':>9} {'cubin B':>9}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kernel on one architecture; `error` is empty where it compiled."""

    op: str
    kernel: str
    arch: str
    registers: int = 0
    shared_bytes: int = 0
    spill_store_bytes: int = 0
    spill_load_bytes: int = 0
    cubin_bytes: int = 0
    error: str = ""

    @property
    def passed(self) -> bool:
        return not (self.error or self.spill_store_bytes or self.spill_load_bytes)

    def __str__(self) -> str:
        place = f"{self.op:<16} {self.kernel:<32} {self.arch:<7}"
        if self.error:
            return f"{place} FAILED: {self.error}"
        spilled = f"{self.spill_store_bytes}+{self.spill_load_bytes}"
        return f"{place} {self.registers:>9} {self.shared_bytes:>9} {spilled:>9} {self.cubin_bytes:>9}"


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, print, and say by the exit code whether all is well."""
    options = _options(argv)
    # Interpreted functions cannot be compiled; nothing has imported Triton yet
    os.environ.pop("TRITON_INTERPRET", None)
    # The default of Triton 3.9, which warns unless it is said aloud
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    rows = []
    if not options.json:
        print(HEADER)
    for row in _rows(options.op, options.arch):
        rows.append(row)
        if not options.json:
            print(row, flush=True)
    bad = [row for row in rows if not row.passed]
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        print(f"{len(rows)} kernels, {len(bad)} failed or spilling")
    return int(bool(bad))


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    ops = ops_with("kernel.py")
    parser = argparse.ArgumentParser(prog="python -m drafthead.kernels.report", description=__doc__)
    parser.add_argument("--op", action="append", choices=ops, help="only this operation (may be repeated)")
    parser.add_argument("--arch", action="append", type=int, choices=ARCHITECTURES, help="only this architecture")
    parser.add_argument("--json", action="store_true", help="one JSON list instead of the table")
    options = parser.parse_args(argv)
    options.op, options.arch = options.op or ops, options.arch or ARCHITECTURES
    return options


def _rows(ops: Sequence[str], architectures: Sequence[int]) -> Iterator[Row]:
    counts = {op: len(_cases(op)) for op in ops}
    tasks = [(op, index, arch) for op in ops for index in range(counts[op]) for arch in architectures]
    # Forked, so that a worker has Triton and the kernels already
    with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
        yield from pool.imap(_measure_one, tasks)


def _cases(op: str) -> list[CompileCase]:
    cases = importlib.import_module(f"drafthead.kernels.{op}.kernel").compile_cases()
    assert isinstance(cases, list)
    return cases


def _measure_one(task: tuple[str, int, int]) -> Row:
    op, index, arch = task
    return measure(op, _cases(op)[index], arch)


def measure(op: str, case: CompileCase, arch: int) -> Row:
    """Compile one kernel for one architecture."""
    from triton.errors import TritonError

    row = partial(Row, op=op, kernel=case.name, arch=f"sm_{arch}")
    try:
        compiled = _compile(case, arch)
    except (TritonError, RuntimeError) as error:
        # A message of the front end shows the source first and ends with the reason
        return row(error=str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__)
    registers, spill_stores, spill_loads = _resources(compiled.asm["ptx"], arch)
    return row(
        registers=registers,
        shared_bytes=compiled.metadata.shared,
        spill_store_bytes=spill_stores,
        spill_load_bytes=spill_loads,
        cubin_bytes=len(compiled.asm["cubin"]),
    )


def _compile(case: CompileCase, arch: int) -> Any:
    """What the launcher would compile for arguments as the case describes them."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.function.arg_names
    unknown = {*case.signature, *case.constants, *case.aligned} ^ set(names)
    assert not unknown, f"{case.name}: missing or unknown arguments {sorted(unknown)}"
    source = ASTSource(
        fn=case.function,
        signature={name: "constexpr" if name in case.constants else case.signature[name] for name in names},
        constexprs={(names.index(name),): value for name, value in case.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in case.aligned},
    )
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def _resources(ptx: str, arch: int) -> list[int]:
    """Registers, bytes of spill stores and of spill loads as ptxas reports them; Triton keeps only the binary."""
    from triton.backends.nvidia.compiler import get_ptxas

    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert target, "PTX without a target"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx, encoding="utf-8")
        # The options of Triton's own call
        command = [get_ptxas(arch).path, "-v", "-lineinfo", "--regAllocOptLevel=2", f"--gpu-name={target[1]}"]
        command += [str(path), "-o", str(path.with_suffix(".cubin"))]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    patterns = (r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes spill loads")
    # Functions that were not inlined have lines of their own
    return [max(map(int, re.findall(pattern, report))) for pattern in patterns]


if __name__ == "__main__":
    sys.exit(main())
