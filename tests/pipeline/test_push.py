"""`drafthead export push` into a hub of this machine, and without any; what it refuses."""

import json
import shutil
from pathlib import Path

import pytest
from drafthead.data.errors import GateError, InputError
from drafthead.pipeline.export.push import Upload, check_repo
from drafthead.pipeline.run_dir import Run
from huggingface_hub import ModelCard

from tests.conftest import CommandLine
from tests.pipeline.fake_hub import OID, running_hub

REPO = "me/tiny-head"
UPLOADED = ["README.md", "config.json", "model.safetensors", "speculative_config.json"]


@pytest.fixture(autouse=True)
def no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))


def test_a_dry_run_lists_files_and_metadata_without_a_network(
    served_run: Run, drafthead: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    done = drafthead("export", "push", served_run.path, "--repo", REPO, "--dry-run", "--json")
    report = done.json()
    assert done.code == 0, done.stderr
    assert [one["path"] for one in report["files"]] == UPLOADED
    weights = served_run.path / "export" / "model.safetensors"
    assert report["files"][2]["bytes"] == weights.stat().st_size
    assert report["bytes"] == sum(one["bytes"] for one in report["files"])
    assert report["metadata"]["tags"] == ["speculative-decoding", "eagle3", "vllm"]
    assert (report["repo"], report["url"], report["private"]) == (REPO, None, None)
    shown = drafthead("export", "push", served_run.path, "--repo", REPO, "--dry-run").stdout
    assert shown.startswith(f"{REPO}: 4 files, ")
    assert shown.endswith("nothing was sent\n")


def test_a_push_commits_the_folder_with_a_card_that_holds_there(
    served_run: Run, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", hub.token)
        assert Upload(served_run, REPO, True).send() == f"{hub.url}/{REPO}/commit/{OID}"
    assert hub.repos[REPO]["visibility"] == "private"
    assert sorted(hub.files) == UPLOADED
    export = served_run.path / "export"
    for name in ("config.json", "model.safetensors"):
        assert hub.files[name] == (export / name).read_bytes()
    ours = json.loads((export / "speculative_config.json").read_text())
    theirs = json.loads(hub.files["speculative_config.json"])
    assert theirs == {**ours, "model": REPO}
    card = hub.files["README.md"].decode()
    assert str(served_run.path.parent) not in card, "nobody else has this machine's folders"
    assert f'"model":"{REPO}"' in card
    local = (export / "README.md").read_text()
    for section in ("Acceptance", "Served by vLLM", "Limits"):
        assert card.partition(f"## {section}\n")[2].partition("\n## ")[0] in local, section
    assert ModelCard(hub.validated[0]).data.tags == ["speculative-decoding", "eagle3", "vllm"]


def test_a_refusing_hub_and_a_silent_one_are_one_line(
    served_run: Run, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = Upload(served_run, REPO, None)
    with pytest.raises(InputError, match="no Hugging Face token; run `hf auth login` or set HF_TOKEN"):
        upload.send()
    monkeypatch.setenv("HF_TOKEN", "hf_reads")
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with pytest.raises(InputError, match=r"the hub did not take it \(.*401.*\)"):
            upload.send()
    with pytest.raises(InputError, match="the hub did not take it"):
        upload.send()


def test_a_folder_that_fails_preflight_stays_here(served_run: Run, drafthead: CommandLine, tmp_path: Path) -> None:
    run = tmp_path / "tiny"
    shutil.copytree(served_run.path, run, symlinks=True)  # whose speculative config still names the first folder
    done = drafthead("export", "push", run, "--repo", REPO, "--dry-run")
    assert (done.code, done.stdout) == (1, "")
    assert done.complaints[0].startswith("drafthead: ExportGate: speculative_config.model: ")


@pytest.mark.parametrize(
    ("repo", "said"),
    [("head", "OWNER/NAME"), ("a/b/c", "Repo id must be"), ("me/he ad", "Repo id must"), ("me/-head", "Repo id must")],
)
def test_what_is_no_repository_is_refused(repo: str, said: str) -> None:
    with pytest.raises(InputError, match=f"--repo {repo}: .*{said}"):
        check_repo(repo, "eagle3")


def test_a_name_that_vllm_would_misread_is_refused() -> None:
    check_repo("me/my-eagle3-head", "eagle3")
    check_repo("me/my-head", "medusa")
    with pytest.raises(GateError, match="'eagle3' stands in its name"):
        check_repo("me/not-eagle3", "medusa")
