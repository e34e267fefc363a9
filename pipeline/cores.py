"""How a stage uses the cores and the memory of a CPU (measured: docs/log.md).

Small models are chains of small operations: a second core adds little to one chain, but runs a second chain beside it.
"""

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor

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
