"""A W&B server of this machine alone: as much as uploading a run's numbers and saving a view ask for."""

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.pipeline.loopback import QuietHandler, serving

VIEWER = {"id": "1", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}
ENTITY = {"id": "e", "name": "me"}


@dataclass
class WandbServer:
    """What it was told."""

    url: str = ""
    refuses: bool = False
    asked: list[dict[str, Any]] = field(default_factory=list)
    """GraphQL requests."""
    history: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Rows by line: one that is sent for the same line takes its place, as on the real server."""
    known: bool = False

    def upload(self, files: dict[str, Any]) -> None:
        part = files.get("wandb-history.jsonl", {"offset": 0, "content": []})
        for line, row in enumerate(part["content"], part["offset"]):
            self.history[line] = json.loads(row)

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        if "upsertView" in query:
            if self.refuses:
                return {"errors": [{"message": "project not found"}], "data": None}
            return {"data": {"upsertView": {"view": {"id": "VmlldzoxMg==", "name": "nw-abc123-v"}, "inserted": True}}}
        if "RunResumeStatus" in query:
            return {"data": {"model": {"id": "p", "name": "p", "entity": ENTITY, "bucket": self._status(variables)}}}
        if "UpsertBucket" in query:
            project = {"id": "p", "name": variables["project"], "entity": ENTITY}
            bucket = {"id": "r", "name": variables["name"], "displayName": "x", "config": "{}", "project": project}
            inserted, self.known = not self.known, True
            return {"data": {"upsertBucket": {"bucket": bucket, "inserted": inserted}}}
        if "CreateRunFiles" in query:
            files = [{"name": name, "uploadUrl": f"{self.url}/file"} for name in variables["files"]]
            return {"data": {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}}
        return {"data": {"viewer": VIEWER, "serverInfo": {"features": []}}}

    def _status(self, variables: dict[str, Any]) -> dict[str, Any] | None:
        if not self.known:
            return None
        tail = json.dumps([json.dumps(self.history[line]) for line in sorted(self.history)[-1:]])
        counts = {"historyLineCount": len(self.history), "eventsLineCount": 0, "logLineCount": 0}
        texts = {"summaryMetrics": "{}", "config": "{}", "wandbConfig": '{"t": {"value": 1}}'}
        named = {"id": "r", "name": variables["name"], "displayName": "x", "sweepName": None, "tags": []}
        return {**named, **counts, **texts, "historyTail": tail, "eventsTail": "[]"}


@contextmanager
def running_wandb() -> Iterator[WandbServer]:
    wandb = WandbServer()

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            text = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
            value = json.loads(text or "{}")
            if "query" in value:
                wandb.asked.append(value)
                self._reply(wandb.answer(value["query"], value.get("variables") or {}))
            else:
                wandb.upload(value.get("files") or {})
                self._reply({"exitcode": None, "limits": {}})

        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self._reply({})

        def _reply(self, value: Any) -> None:
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with serving(Handler) as wandb.url:
        yield wandb
