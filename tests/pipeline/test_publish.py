"""What a finished run logs to W&B, read back from its offline files; and the workspace that shows it."""

import base64
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from drafthead.data.errors import InputError
from drafthead.pipeline import publish as publishing
from drafthead.pipeline.publish import metric_name, publish, result_metrics
from drafthead.pipeline.run_dir import Run, open_run
from drafthead.pipeline.summary import summarize_run
from drafthead.pipeline.workspace import make_workspace, save

from tests.conftest import CommandLine
from tests.pipeline.fake_wandb import WandbServer, running_wandb
from tests.pipeline.wandb_files import artifacts, history, wandb_files


@pytest.fixture(scope="module")
def logged(served_run: Run) -> dict[str, Any]:
    """The last value of every name in the run's W&B files."""
    rows = [row for path in wandb_files(served_run.path) for row in history(path)]
    return {name: value for row in rows for name, value in row.items()}


def test_the_run_on_wandb_carries_what_was_measured(served_run: Run, cache: Path, logged: dict[str, Any]) -> None:
    evaluated, check = served_run.report("eval"), served_run.report("serve-check")
    assert logged["eval/accept_length"] == evaluated["mean_acceptance_length"]
    for place, rate in enumerate(evaluated["per_position"], 1):
        assert logged[f"eval/position_{place}"] == rate
    for domain, one in evaluated["by_domain"].items():
        assert logged[f"eval/{metric_name(domain)}/accept_length"] == one["mean_acceptance_length"]
    for k, one in check["by_k"].items():
        for kind in ("predicted", "walk", "served"):
            assert logged[f"{kind}/k{k}/accept_length"] == one[kind]["mean_acceptance_length"]
            assert logged[f"{kind}/k{k}/conditional_2"] == one[kind]["conditional"][1]
        assert (
            logged[f"served/k{k}/self_written/position_1"]
            == one["walk"]["by_domain"]["self-written"]["per_position"][0]
        )
        assert logged[f"economics/k{k}/speedup_batch_1"] == one["speedup_batch_1"]
    assert logged["economics/plain/ms_per_token"] == 31.25
    assert result_metrics(served_run).items() <= logged.items()


def test_files_of_training_and_results_are_one_wandb_run_to_upload(served_run: Run, cache: Path) -> None:
    files = wandb_files(served_run.path)
    assert len(files) == 2
    assert len({path.stem for path in files}) == 1, "one id"
    command = summarize_run(served_run)["wandb_sync"]
    assert command == f"wandb sync {served_run.path}/wandb"


def test_the_artifact_is_the_export_with_its_card(served_run: Run) -> None:
    (head,) = [one for path in wandb_files(served_run.path) for one in artifacts(path) if one.type == "model"]
    held = {item.path: item.digest for item in head.manifest.contents}
    assert {"README.md", "config.json", "model.safetensors", "speculative_config.json"} <= held.keys()
    card = (served_run.path / "export" / "README.md").read_bytes()
    assert held["README.md"] == base64_md5(card), "the card as it is now, served check included"
    assert b"## Served by vLLM" in card


def base64_md5(content: bytes) -> str:
    return base64.b64encode(hashlib.md5(content).digest()).decode()


def test_results_are_logged_once(served_run: Run, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, float]] = []
    monkeypatch.setattr(publishing, "log_results", lambda run, metrics: calls.append(metrics))
    publish(open_run(served_run.path, served_run.stages, []))
    assert calls == []
    monkeypatch.setattr(publishing, "result_metrics", lambda run: {"eval/accept_length": 2.0})
    publish(open_run(served_run.path, served_run.stages, []))
    assert calls == [{"eval/accept_length": 2.0}], "other numbers are logged again"


def test_the_command_that_is_printed_finds_both_files(served_run: Run, tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("wandb")), "sync", "--dry-run", f"{served_run.path}/wandb"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0
    assert "Would sync 2 run(s)" in done.stderr + done.stdout


# ---- the workspace ---------------------------------------------------------------------------------------


def test_every_panel_shows_names_that_are_logged(
    served_run: Run, drafthead: CommandLine, logged: dict[str, Any]
) -> None:
    made = make_workspace(served_run, None, None, dry_run=True)
    assert (made["project"], made["url"]) == ("drafthead", None)
    sections = {one["name"]: one["panels"] for one in made["sections"]}
    assert list(sections) == ["training", "acceptance", "economics"]
    for panels in sections.values():
        for panel in panels:
            assert panel["metrics"], panel["title"]
            unknown = set(panel["metrics"]) - logged.keys()
            # rates that nothing was counted for are not logged
            assert all(name.startswith("heldout/walk_conditional_") for name in unknown), panel
    shown = {name for panels in sections.values() for panel in panels for name in panel["metrics"]}
    assert {"train/loss", "heldout/walk_conditional_1", "train/optimizer_ms", "eval/code/position_3"} <= shown
    assert {"served/k3/conditional_2", "served/k2/translation/accept_length", "economics/plan_k"} <= shown
    assert "step" in logged
    done = drafthead("workspace", served_run.path, "--dry-run", "--entity", "team")
    assert done.code == 0, done.stderr
    assert done.stdout.startswith("workspace 'drafthead tiny' of project team/drafthead\n  training\n")


def test_a_run_that_is_not_evaluated_has_its_training(tiny_run: Run, cache: Path, make_run: Any) -> None:
    made = make_workspace(make_run("new"), None, "other", dry_run=True)
    assert [one["name"] for one in made["sections"]] == ["training"]
    assert made["project"] == "other"


@pytest.fixture
def wandb_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    with running_wandb() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
        yield server


def test_a_workspace_is_saved_as_one_view(
    served_run: Run, drafthead: CommandLine, wandb_server: WandbServer, logged: dict[str, Any]
) -> None:
    done = drafthead("workspace", served_run.path, "--json")
    assert done.code == 0, done.stderr
    made = done.json()
    assert made["entity"] == "me"
    assert made["url"].endswith("/me/drafthead?nw=abc123")
    (saved,) = [one["variables"] for one in wandb_server.asked if "upsertView" in one["query"]]
    assert (saved["entityName"], saved["projectName"], saved["displayName"]) == ("me", "drafthead", "drafthead tiny")
    sections = json.loads(saved["spec"])["section"]["panelBankConfig"]["sections"]
    assert [one["name"] for one in sections[:3]] == ["training", "acceptance", "economics"]
    lines = sections[0]["panels"]
    assert {panel["config"]["xAxis"] for panel in lines} == {"step"}
    assert lines[0]["config"]["metrics"] == ["train/loss"]
    sent = {name for one in sections[:2] for panel in one["panels"] for name in panel["config"]["metrics"]}
    assert {name for name in sent if not name.startswith("heldout/walk_conditional_")} <= logged.keys()


def test_without_a_login_it_is_one_line(
    served_run: Run, drafthead: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    done = drafthead("workspace", served_run.path)
    assert (done.code, done.stdout) == (2, "")
    assert "W&B knows no key here; run `wandb login` or set WANDB_API_KEY" in done.complaints[0]


def test_a_refusal_of_wandb_is_one_line(wandb_server: WandbServer) -> None:
    wandb_server.refuses = True
    with pytest.raises(InputError, match=r"W&B did not take it \(.*project not found\).*project 'p' exist"):
        save("p", "me", "name", [])
