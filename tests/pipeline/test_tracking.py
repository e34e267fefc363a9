"""Tracking with the real wandb, offline: what was logged must lie in its files."""

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from drafthead.data.errors import InputError
from drafthead.pipeline.tracking import Tracker, is_logged_in, run_id, tracking_mode

BLOCK = 32768
HEADER = struct.Struct("<IHB")


@pytest.fixture(autouse=True)
def no_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def records(path: Path) -> list[Any]:
    """Read a .wandb file: 7 bytes of header, then LevelDB log blocks of protobuf records."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    assert data[:4] == b":W&B"
    found, parts, offset = [], b"", 7
    while offset + HEADER.size <= len(data):
        if BLOCK - offset % BLOCK < HEADER.size:
            offset += BLOCK - offset % BLOCK
            continue
        _, length, kind = HEADER.unpack_from(data, offset)
        parts += data[offset + HEADER.size : offset + HEADER.size + length]
        offset += HEADER.size + length
        if kind in (1, 4):  # full, last
            record = Record()
            record.ParseFromString(parts)
            found.append(record)
            parts = b""
    return found


def history(path: Path) -> list[dict[str, Any]]:
    return [
        {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records(path)
        if record.HasField("history")
    ]


def wandb_files(directory: Path) -> list[Path]:
    return sorted((directory / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.parametrize("mode", ["dryrun", "on", "off"])
def test_an_unknown_mode_is_refused(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", mode)
    with pytest.raises(InputError, match=f"WANDB_MODE={mode}.*online, offline, disabled"):
        tracking_mode()


def test_without_a_login_it_is_offline() -> None:
    assert tracking_mode() == "offline"


def test_with_a_key_it_is_online_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    assert tracking_mode() == "online"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert tracking_mode() == "offline"


def test_a_netrc_entry_is_a_login_for_its_host_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password " + "k" * 40 + "\n")
    assert is_logged_in()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.com")
    assert not is_logged_in()


def test_the_run_id_is_made_once(tmp_path: Path) -> None:
    first = run_id(tmp_path)
    assert first == run_id(tmp_path)
    assert first != run_id(tmp_path / "other")


@pytest.mark.parametrize(("mode", "is_main"), [("disabled", True), ("offline", False)])
def test_nothing_is_written(mode: str, is_main: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", mode)
    run = tmp_path / "run"
    with Tracker("project", "name", {}, run, is_main=is_main) as tracker:
        tracker.log({"loss": 1.0}, 1)
        tracker.table("rates", ["position"], [[0]])
        tracker.artifact(tmp_path, "head", "model", {})
    assert not run.exists()


def test_wandb_starts_at_the_first_use(tmp_path: Path) -> None:
    with Tracker("project", "name", {}, tmp_path / "run"):
        pass
    assert not (tmp_path / "run").exists()


RESUMED = """
import sys
from pathlib import Path
from drafthead.pipeline.tracking import Tracker
with Tracker("heads", "eagle3", {"train": {"depth": 3}}, Path(sys.argv[1])) as tracker:
    tracker.log({"loss": 1.5}, 20)
"""


@pytest.mark.slow
def test_what_was_logged_is_in_the_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import openai  # noqa: F401  # vLLM does; W&B then speaks about Weave, unless told not to

    run = tmp_path / "run"
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "config.json").write_text("{}")
    with Tracker("heads", "eagle3", {"train": {"depth": 3}}, run) as tracker:
        tracker.log({"loss": 2.5}, 10)
        tracker.log({"loss": 1.25}, 20)
        tracker.table("acceptance", ["position", "rate"], [[1, 0.5], [2, 0.25]])
        tracker.artifact(tmp_path / "export", "head", "model", {"k": 3})
    # killed after step 20, resumed from the checkpoint at step 10: in another process, as a resume is
    subprocess.run([sys.executable, "-c", RESUMED, str(run)], check=True)

    first, second = wandb_files(run)
    logged = history(first)
    assert [(row["step"], row["loss"]) for row in logged if "loss" in row] == [(10, 2.5), (20, 1.25)]
    assert any("acceptance" in key for row in logged for key in row)
    assert [(row["step"], row["loss"]) for row in history(second)] == [(20, 1.5)]
    runs = [record.run for path in (first, second) for record in records(path) if record.HasField("run")]
    assert {found.run_id for found in runs} == {run_id(run)}
    assert {(found.project, found.display_name) for found in runs} == {("heads", "eagle3")}
    config = {item.key: item.value_json for found in runs for item in found.config.update}
    assert json.loads(config["train"]) == {"depth": 3}
    artifacts = [record.request.log_artifact.artifact for record in records(first)]
    artifacts += [record.artifact for record in records(first)]
    (head,) = [found for found in artifacts if found.type == "model"]
    assert (head.name, json.loads(head.metadata)) == ("head", {"k": 3})
    assert [item.path for item in head.manifest.contents] == ["config.json"]
    tables = list(first.parent.glob("files/media/table/acceptance*.table.json"))
    assert json.loads(tables[0].read_text())["data"] == [[1, 0.5], [2, 0.25]]
    assert capfd.readouterr() == ("", "")
