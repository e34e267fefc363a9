"""How a stage uses the cores and the memory of a CPU (measured: docs/log.md).

Small models are chains of small operations: a second core adds little to one chain, but runs a second chain beside it.
"""

import ctypes
import functools
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": 2**30,
    "MALLOC_TRIM_THRESHOLD_": 2**34,
    "MALLOC_TOP_PAD_": 2**28,
}
MALLOPT = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_TOP_PAD_": -2, "MALLOC_MMAP_THRESHOLD_": -3}
"""Parameters of glibc's mallopt(3)."""


def keep_freed_memory() -> None:
    """Let this process and its children keep the pages of freed tensors, and use huge ones.

    Otherwise every large tensor is taken from the system anew, page by page. Variables that the user has set win; a
    libc other than glibc goes without.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    for name, value in KEEP_FREED_MEMORY.items():
        wanted = int(os.environ.setdefault(name, str(value)))
        if mallopt is not None:
            mallopt(MALLOPT[name], min(wanted, 2**31 - 1))


def side_by_side(tasks: int) -> ThreadPoolExecutor:
    """Threads for `tasks` independent chains of tensor operations, which share the cores of this process."""
    import torch  # here, for a command line that is fast to say --help

    cores = len(os.sched_getaffinity(0))
    workers = max(1, min(tasks, cores))
    # OpenMP counts threads for each calling thread: the main one keeps all cores
    return ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(max(1, cores // workers),))


BF16_TRIAL = (512, 576, 2048)
"""Rows, inner size and columns of the product that is timed."""


@functools.cache
def fastest_dtype() -> Literal["bfloat16", "float32"]:
    """In which of the two this machine multiplies matrices faster; bfloat16 on CUDA.

    A processor that says it knows bf16 may still take twice as long for it as for fp32 (measured: docs/log.md), so
    products are timed, for a quarter of a second.
    """
    import torch

    if torch.cuda.is_available():
        return "bfloat16"
    rows, inner, columns = BF16_TRIAL
    left, right = torch.randn(rows, inner), torch.randn(inner, columns)
    best = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = left.to(dtype), right.to(dtype)
        best[dtype] = min(_seconds_of_product(a, b) for _ in range(12))
    return "float32" if best[torch.float32] < 0.9 * best[torch.bfloat16] else "bfloat16"


def _seconds_of_product(a: "torch.Tensor", b: "torch.Tensor") -> float:
    start = time.perf_counter()
    a @ b
    return time.perf_counter() - start
