"""One command of the command line in a forked process; run by the fixture `drafthead` with `CALL` as a global.

Beside argv, cwd, env, stdout and stderr a call may set `file_limit` (largest file in bytes; to a writer a full disk
looks the same), `no_powers` (root loses the right to write where the file's mode forbids it) and `own_group` (a process
group of its own, to be killed as a whole).
"""

import ctypes
import os
import resource
import sys
from typing import Any

from drafthead.pipeline import cli

CAPABILITY_VERSION_3 = 0x20080522


def prepare(call: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(call["env"])
    os.chdir(call["cwd"])
    for number, name in ((1, "stdout"), (2, "stderr")):
        descriptor = os.open(call[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(descriptor, number)
    sys.argv = call["argv"]
    if call.get("own_group"):
        os.setpgid(0, 0)
    if "file_limit" in call:
        resource.setrlimit(resource.RLIMIT_FSIZE, (call["file_limit"],) * 2)
    if call.get("no_powers"):
        header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
        assert ctypes.CDLL(None).capset(header, (ctypes.c_uint32 * 6)()) == 0


prepare(CALL)  # type: ignore[name-defined]  # noqa: F821
cli.main()
