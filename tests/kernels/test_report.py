"""The compile report: every kernel compiles for every architecture without spills, and what does not is told."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from drafthead.kernels.backend import ops_with

BAD_KERNELS = '''
"""Two kernels that the report must refuse, as an operation of its own."""

import sys
from types import SimpleNamespace

import triton
import triton.language as tl
from drafthead.kernels import report
from drafthead.kernels.backend import CompileCase


@triton.jit
def copied(out_ptr, in_ptr, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(out_ptr + index, tl.load(in_ptr + index))


@triton.jit
def spills(out_ptr, in_ptr, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    value = tl.load(in_ptr + index)
    tl.store(out_ptr + index, value / tl.sum(value, 0))


def case(function, size, **changes):
    fields = {"signature": {"out_ptr": "*fp32", "in_ptr": "*fp32"}, "constants": {"SIZE": size}, "num_warps": 1}
    return CompileCase(name=f"{function.__name__} {size}", function=function, **fields | changes)


bad = {"spilling": case(spills, 16384), "broken": case(copied, 100)}[sys.argv.pop(1)]
sys.modules["drafthead.kernels.trial.kernel"] = SimpleNamespace(compile_cases=lambda: [bad, case(copied, 128)])
report.ops_with = lambda file: ["trial"]
sys.exit(report.main(sys.argv[1:]))
'''


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, where kernels are not interpreted."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


@pytest.mark.slow
@pytest.mark.parametrize("op", ops_with("kernel.py"))
def test_kernels_compile_without_spills_on_three_architectures(op: str) -> None:
    done = run("-m", "drafthead.kernels.report", "--json", "--op", op, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout)
    assert {row["arch"] for row in rows} == {"sm_80", "sm_90", "sm_100"}
    assert all(row["registers"] > 0 and row["cubin_bytes"] > 0 for row in rows)
    assert {(row["spill_store_bytes"], row["spill_load_bytes"], row["error"]) for row in rows} == {(0, 0, "")}


@pytest.mark.parametrize(("kind", "told"), [("spilling", "spills 16384"), ("broken", "power of 2")])
def test_spills_and_failures_are_told(tmp_path: Path, kind: str, told: str) -> None:
    """One bad kernel is enough, and the others are reported none the less."""
    script = tmp_path / "bad_kernels.py"
    script.write_text(BAD_KERNELS, encoding="utf-8")
    done = run(str(script), kind, "--arch", "90")
    assert done.returncode == 1, done.stderr
    _, bad, good, verdict = done.stdout.splitlines()
    assert told in bad
    assert ("FAILED" in bad) == (kind == "broken")
    assert good.split()[:4] == ["trial", "copied", "128", "sm_90"]
    assert good.split()[6] == "0+0"
    assert verdict == "2 kernels, 1 failed or spilling"
