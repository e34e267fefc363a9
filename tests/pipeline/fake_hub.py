"""A hub of this machine alone: the endpoints that one commit to a model repository needs."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.pipeline.loopback import QuietHandler, serving

OID = "c" * 40


@dataclass
class Hub:
    """What it was told."""

    url: str = ""
    token: str = "hf_writes"
    repos: dict[str, Any] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    validated: list[str] = field(default_factory=list)

    def answer(self, path: str, body: str, token: str) -> tuple[int, Any]:
        if path == "/api/validate-yaml":
            self.validated.append(json.loads(body)["content"])
            return 200, {"errors": [], "warnings": []}
        if token != f"Bearer {self.token}":
            return 401, {"error": "Invalid credentials in Authorization header"}
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked['organization']}/{asked['name']}"
            self.repos[repo] = asked
            return 200, {"url": f"{self.url}/{repo}", "name": repo, "id": repo}
        repo, _, action = path.removeprefix("/api/models/").removesuffix("/main").rpartition("/")
        if repo not in self.repos:
            return 404, {"error": f"no such repository: {path}"}
        if action == "preupload":
            asked = [{"path": one["path"], "uploadMode": "regular"} for one in json.loads(body)["files"]]
            return 200, {"files": [{**one, "shouldIgnore": False} for one in asked]}
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return 200, {"commitUrl": f"{self.url}/{repo}/commit/{OID}", "commitOid": OID, "success": True}


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            size = self.headers.get("Content-Length")
            body = self.rfile.read(int(size)) if size else b"".join(self._chunks())
            token = self.headers.get("Authorization", "")
            code, value = hub.answer(self.path.partition("?")[0], body.decode(), token)
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(value).encode())

        def _chunks(self) -> Iterator[bytes]:
            while size := int(self.rfile.readline(), 16):
                yield self.rfile.read(size)
                self.rfile.readline()

    with serving(Handler) as hub.url:
        yield hub
