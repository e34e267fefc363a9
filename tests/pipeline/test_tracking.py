"""Tracking with the real wandb, offline: what was logged must lie in its files."""

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import wandb
from drafthead.data.errors import InputError
from drafthead.pipeline.tracking import Tracker, is_logged_in, run_id, sync_command, tracking_mode

from tests.pipeline.fake_wandb import running_wandb
from tests.pipeline.wandb_files import artifacts, history, records, wandb_files


@pytest.fixture(autouse=True)
def no_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


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
    assert all(found.resume for found in runs)
    assert {(found.project, found.display_name) for found in runs} == {("heads", "eagle3")}
    config = {item.key: item.value_json for found in runs for item in found.config.update}
    assert json.loads(config["train"]) == {"depth": 3}
    (head,) = [found for found in artifacts(first) if found.type == "model"]
    assert (head.name, json.loads(head.metadata)) == ("head", {"k": 3})
    assert [item.path for item in head.manifest.contents] == ["config.json"]
    assert sync_command(run) == f"wandb sync {run}/wandb"
    for path in (first, second):
        path.with_name(f"{path.name}.synced").touch()
    assert sync_command(run) is None
    tables = list(first.parent.glob("files/media/table/acceptance*.table.json"))
    assert json.loads(tables[0].read_text())["data"] == [[1, 0.5], [2, 0.25]]
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_files_that_are_uploaded_later_follow_one_another(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step, values in enumerate(([2.5, 1.25], [0.5])):
        time.sleep(1.1 * step)  # W&B names folders by the second
        with Tracker("heads", "eagle3", {}, run) as tracker:
            for value in values:
                tracker.log({"loss": value}, step)
    command = sync_command(run)
    assert command is not None
    program, *arguments = shlex.split(command)
    with running_wandb() as server:
        environment = {**os.environ, "WANDB_BASE_URL": server.url, "WANDB_API_KEY": "k" * 40}
        full = [Path(sys.executable).with_name(program), *arguments]
        subprocess.run(full, check=True, env=environment, cwd=tmp_path, capture_output=True)
    assert [server.history[line]["loss"] for line in sorted(server.history)] == [2.5, 1.25, 0.5]
    assert sync_command(run) is None


@pytest.mark.slow
def test_a_server_that_does_not_answer_leaves_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("drafthead.pipeline.tracking.INIT_TIMEOUT_S", 2)
    run = tmp_path / "run"
    with Tracker("heads", "eagle3", {}, run) as tracker:
        assert tracker.mode == "online"
        tracker.log({"loss": 2.5}, 10)
        assert tracker.mode == "offline"
    assert [row["loss"] for path in wandb_files(run) for row in history(path)] == [2.5]
    (warning,) = [line for line in capfd.readouterr().err.splitlines() if "WARNING" in line]
    assert warning.startswith("WARNING: W&B did not start (")


@pytest.mark.slow
def test_a_server_that_goes_away_holds_a_run_up_no_longer_than_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setattr("drafthead.pipeline.tracking.FINISH_TIMEOUT_S", 2)
    wandb.teardown()  # W&B reads the address once for all runs of a process
    with running_wandb() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        tracker = Tracker("heads", "eagle3", {}, tmp_path)
        tracker.log({"loss": 2.5}, 10)
        assert tracker.mode == "online"
    with tracker:
        tracker.log({"loss": 1.25}, 20)
    wandb.teardown()  # as the process' end does: now the rest is written
    (folder,) = tmp_path.glob("wandb/run-*-*")
    logged = [row for path in folder.glob("*.wandb") for row in history(path)]
    assert [(row["step"], row["loss"]) for row in logged] == [(10, 2.5), (20, 1.25)]
    (warning,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("WARNING")]
    assert f"`wandb sync {folder}` uploads it" in warning
