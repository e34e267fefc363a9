"""The command that a run prints at its end, typed as it stands: that server starts, drafts, accepts as measured."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from drafthead.eval.engine import is_available
from drafthead.pipeline.evaluate import load_prompts
from drafthead.pipeline.export.folder import serve_command, typed_here
from drafthead.pipeline.run_dir import Run

from tests.conftest import CommandLine

pytestmark = [
    pytest.mark.serve,
    pytest.mark.slow,
    pytest.mark.skipif(not is_available(), reason="vllm is not installed"),
]

START_S = 400
"""Seconds that a server may take to start."""


@contextmanager
def served(command: str, log: Path) -> Iterator[str]:
    """Type a serve command, with a free port behind it; yields the server's address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    typed = f"{command} --host 127.0.0.1 --port {port}"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # as in an activated environment
    with open(log, "w") as output:
        process = subprocess.Popen(
            typed, shell=True, stdout=output, stderr=output, env={**os.environ, "PATH": path}, start_new_session=True
        )
        try:
            wait_until_healthy(f"http://127.0.0.1:{port}/health", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(timeout=60)


def wait_until_healthy(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    end = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < end:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(0.5)
    pytest.fail(f"the server did not start: {log.read_text()[-3000:]}")


def ask(address: str, model: str, ids: list[int], max_tokens: int) -> Any:
    body = {"model": model, "prompt": ids, "max_tokens": max_tokens, "temperature": 0}
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def test_the_printed_command_serves_and_accepts_as_measured(
    tiny_run: Run, drafthead: CommandLine, tmp_path: Path
) -> None:
    settings = tiny_run.recipe.eval
    command = typed_here(serve_command(tiny_run.served_target.path, tiny_run.folder("export")))
    chosen = load_prompts(tiny_run, None, settings.limit, settings.max_new_tokens)
    with served(command, tmp_path / "server.log") as address:
        model = str(tiny_run.served_target.path.resolve())
        answers = [ask(address, model, prompt.ids, settings.max_new_tokens) for prompt in chosen.prompts]
        watched = drafthead("metrics", "--url", address, "--expect", tiny_run.path, "--json")
    report = watched.json()
    written = sum(answer["usage"]["completion_tokens"] for answer in answers)
    assert watched.code == 0, report
    assert report["ok"]
    assert report["k"] == tiny_run.recipe.export.k
    assert 0 < report["drafts"] <= written, "each round writes a token at least"
