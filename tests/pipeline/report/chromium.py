"""Headless Chromium through its DevTools protocol: what a page does in a real browser."""

import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
)
PATIENCE_S = 60


def find_browser() -> str | None:
    return next((path for path in map(shutil.which, NAMES) if path), None)


@dataclass
class Tab:
    """One page; `complaints` are script errors and refusals, `requests` what it asked the network for."""

    socket: ClientConnection
    session: str = ""
    number: int = 0
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    loads: int = 0

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        self.socket.send(json.dumps(message | ({"sessionId": self.session} if self.session else {})))
        while True:
            answer = self._receive()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer["error"]
                return dict(answer["result"])

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def open(self, url: str, *, width: int, height: int = 844, dark: bool = False) -> None:
        """Show a page on a screen of so many CSS pixels, a phone's below 600, and wait until it is loaded."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.complaints.clear()
        self.requests.clear()
        before = self.loads
        self.call("Page.navigate", url=url)
        while self.loads == before:
            self._receive()

    def press(self, key: str) -> None:
        code = {"Tab": 9, "Escape": 27, "ArrowRight": 39}[key]
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def tap(self, selector: str) -> None:
        """Touch the middle of the first element that matches."""
        place = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{place}.scrollIntoView({{block: 'center'}})")
        box = self.evaluate(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({place}.getBoundingClientRect())"
        )
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": box[0], "y": box[1]}])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def _receive(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self.socket.recv(timeout=PATIENCE_S))
        method, found = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self.loads += 1
        elif method == "Network.requestWillBeSent":
            self.requests.append(found["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(found["exceptionDetails"]))
        elif method == "Log.entryAdded" and found["entry"]["level"] in ("error", "warning"):
            self.complaints.append(found["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and found["type"] in ("error", "warning"):
            self.complaints.append(json.dumps(found["args"]))
        return message


@contextlib.contextmanager
def open_tab(browser: str, profile: Path) -> Iterator[Tab]:
    """Start a browser with an empty profile, and a tab in it."""
    command = [browser, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    with open(profile.with_suffix(".log"), "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        with connect(_endpoint(profile, process), max_size=None, proxy=None) as socket:
            tab = Tab(socket)
            target = tab.call("Target.createTarget", url="about:blank")["targetId"]
            tab.session = tab.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Network", "Log"):
                tab.call(f"{domain}.enable")
            tab.call("Emulation.setTouchEmulationEnabled", enabled=True)
            yield tab
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _endpoint(profile: Path, process: subprocess.Popen[bytes]) -> str:
    """Where the browser listens, which it writes down once it does."""
    path = profile / "DevToolsActivePort"
    end = time.monotonic() + PATIENCE_S
    while not (path.is_file() and len(lines := path.read_text().splitlines()) == 2):
        if process.poll() is not None or time.monotonic() > end:
            raise AssertionError(f"no browser: {profile.with_suffix('.log').read_text()[-2000:]}")
        time.sleep(0.05)
    return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
