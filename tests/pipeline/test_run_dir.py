"""Stages run once, go on after a kill, are shared between runs, and never mix two settings."""

import json
import multiprocessing
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from drafthead.data.errors import InputError
from drafthead.data.files import digest, read_json, sha256_of
from drafthead.pipeline.recipe import load_recipe
from drafthead.pipeline.run_dir import Run, Stage, create_run, open_run
from drafthead.pipeline.stages import STAGES


@pytest.fixture
def own_cache(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that only this test fills; the target is made once for all."""
    folder = tmp_path / "cache"
    folder.mkdir()
    if (cache / "targets").exists():
        (folder / "targets").symlink_to(cache / "targets")
    monkeypatch.setenv("DRAFTHEAD_CACHE", str(folder))
    return folder


class Counting:
    """Two small stages that count how often they work: `shared` by settings of encode, `own` by those of train."""

    def __init__(self, folder: Path):
        self.log = folder / "calls.txt"
        self.fail = False
        self.pause_s = 0.0
        self.stages = {
            "shared": Stage(name="shared", reads=(), settings=lambda r: r.encode, work=self.shared, shared=True),
            "own": Stage(name="own", reads=("shared",), settings=lambda r: {"train": r.train}, work=self.own),
        }

    def calls(self) -> list[str]:
        return self.log.read_text().split() if self.log.exists() else []

    def note(self, name: str) -> None:
        with open(self.log, "a") as file:
            file.write(f"{name}\n")

    def shared(self, run: Run) -> dict[str, Any]:
        return self.work(run, "shared")

    def own(self, run: Run) -> dict[str, Any]:
        return self.work(run, "own")

    def work(self, run: Run, name: str) -> dict[str, Any]:
        """A file of lines that is gone on with; fails after the first line if asked to."""
        self.note(name)
        time.sleep(self.pause_s)
        part, whole = run.folder(name) / "part.txt", run.folder(name) / "whole.jsonl"
        lines = part.read_text().split() if part.exists() else []
        for number in range(len(lines), 3):
            part.write_text(" ".join([*lines, f"line{number}"]))
            lines.append(f"line{number}")
            if self.fail:
                raise KeyboardInterrupt
        whole.write_text("\n".join(lines))
        part.unlink()
        return {"lines": len(lines)}


@pytest.fixture
def counting(own_cache: Path, tmp_path: Path) -> Counting:
    return Counting(tmp_path)


def make(counting: Counting, folder: Path, name: str, *overrides: str) -> Run:
    recipe = load_recipe("smoke/eagle3", [f"run.dir={folder}/runs", f"run.name={name}", *overrides])
    return create_run(recipe, counting.stages)


def run_all(run: Run) -> list[bool]:
    return [run.run_stage(name) for name in run.stages]


# ---- once


def test_finished_stages_are_skipped(counting: Counting, tmp_path: Path) -> None:
    assert run_all(make(counting, tmp_path, "a")) == [True, True]
    assert run_all(make(counting, tmp_path, "a")) == [False, False]
    assert run_all(open_run(tmp_path / "runs" / "a", counting.stages, [])) == [False, False]
    assert counting.calls() == ["shared", "own"]


def test_a_shared_stage_serves_runs_of_other_names(counting: Counting, tmp_path: Path) -> None:
    first, second = make(counting, tmp_path, "a"), make(counting, tmp_path, "b")
    run_all(first)
    assert run_all(second) == [False, True]
    links = [run.path / "shared" for run in (first, second)]
    assert all(link.is_symlink() for link in links)
    assert links[0].resolve() == links[1].resolve() == second.folder("shared")
    assert first.folder("own") != second.folder("own")


def test_two_processes_do_a_stage_once(counting: Counting, tmp_path: Path) -> None:
    counting.pause_s = 0.5
    runs = [make(counting, tmp_path, name) for name in ("a", "b")]
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=run.run_stage, args=("shared",)) for run in runs]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert counting.calls() == ["shared"]
    for run in runs:
        assert read_json(run.path / "run.json")["stages"]["shared"]["state"] == "finished"


def test_a_stage_waits_for_what_it_reads(counting: Counting, tmp_path: Path) -> None:
    run = make(counting, tmp_path, "a")
    with pytest.raises(InputError, match=r"stage shared has not finished; run `drafthead shared "):
        run.run_stage("own")
    assert counting.calls() == []


# ---- other settings


def test_other_settings_of_a_shared_stage_get_a_folder_of_their_own(counting: Counting, tmp_path: Path) -> None:
    first, second = make(counting, tmp_path, "a"), make(counting, tmp_path, "b", "encode.max_length=99")
    run_all(first)
    run_all(second)
    assert first.folder("shared") != second.folder("shared")
    assert counting.calls() == ["shared", "own"] * 2


@pytest.mark.parametrize("begun", [False, True], ids=["finished", "begun"])
def test_other_settings_of_the_runs_own_stage_are_named(begun: bool, counting: Counting, tmp_path: Path) -> None:
    run = make(counting, tmp_path, "a", "train.depth=2")
    run.run_stage("shared")
    counting.fail = begun
    if begun:
        with pytest.raises(KeyboardInterrupt):
            run.run_stage("own")
    else:
        run.run_stage("own")
    saved = (run.path / "recipe.yaml").read_text()
    with pytest.raises(InputError) as caught:
        make(counting, tmp_path, "a", "train.depth=3")
    assert "train.depth: 2 there, 3 now" in str(caught.value)
    assert str(run.folder("own")) in str(caught.value)
    assert "run.name" in str(caught.value)
    assert (run.path / "recipe.yaml").read_text() == saved, "the recipe of what is there is kept"


def test_a_setting_of_an_earlier_stage_is_named_too(counting: Counting, tmp_path: Path) -> None:
    run_all(make(counting, tmp_path, "a", "encode.max_length=300"))
    with pytest.raises(InputError, match="shared: max_length: 300 there, 200 now"):
        run_all(make(counting, tmp_path, "a", "encode.max_length=200"))


def test_a_recipe_edited_by_hand_is_noticed(counting: Counting, tmp_path: Path) -> None:
    run = make(counting, tmp_path, "a", "train.depth=2")
    run_all(run)
    path = run.path / "recipe.yaml"
    path.write_text(path.read_text().replace("depth: 2", "depth: 4"))
    with pytest.raises(InputError, match=r"train\.depth: 2 there, 4 now"):
        open_run(run.path, counting.stages, []).run_stage("own")


def test_settings_that_the_output_does_not_depend_on_may_change(counting: Counting, tmp_path: Path) -> None:
    run_all(make(counting, tmp_path, "a"))
    assert run_all(make(counting, tmp_path, "a", "eval.k=5")) == [False, False]


# ---- damage


@pytest.mark.parametrize("damage", ["missing", "truncated"])
@pytest.mark.parametrize("name", ["shared", "own"])
def test_a_damaged_output_is_noticed(name: str, damage: str, counting: Counting, tmp_path: Path) -> None:
    run = make(counting, tmp_path, "a")
    run_all(run)
    path = run.folder(name) / "whole.jsonl"
    path.unlink() if damage == "missing" else path.write_text("line0")
    with pytest.raises(InputError) as caught:
        run.run_stage(name)
    assert str(path) in str(caught.value)
    assert "remove" in str(caught.value)


def test_an_output_of_the_same_size_and_time_is_noticed(counting: Counting, tmp_path: Path) -> None:
    """Another map of the same length, a head of another training: what is behind would be made from it."""
    run_all(make(counting, tmp_path, "a"))
    run = make(counting, tmp_path, "a")
    path = run.folder("shared") / "whole.jsonl"
    stat = path.stat()
    path.write_text(path.read_text().replace("line2", "line7"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    for look in (run.run_stage, run.input):
        with pytest.raises(InputError, match=r"shared-\w+/whole\.jsonl: changed since the stage finished; remove"):
            look("shared")
    with pytest.raises(InputError, match="changed since the stage finished"):
        run.run_stage("own")


def test_an_input_of_other_settings_says_which(counting: Counting, tmp_path: Path) -> None:
    """As of a target that was changed since: not only that the stage has not finished."""
    make(counting, tmp_path, "a").run_stage("shared")
    changed = make(counting, tmp_path, "a", "encode.max_length=99")
    with pytest.raises(
        InputError, match=r"stage shared has finished with other settings .*max_length: 1024 there, 99 now"
    ):
        changed.input("shared")


def test_an_input_that_lies_in_another_cache_is_found_there(
    counting: Counting, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell in which DRAFTHEAD_CACHE was not set: the stage has finished, elsewhere."""
    made = make(counting, tmp_path, "a")
    made.run_stage("shared")
    other = tmp_path / "other"
    other.mkdir()
    (other / "targets").symlink_to(own_cache / "targets")
    monkeypatch.setenv("DRAFTHEAD_CACHE", str(other))
    run = open_run(made.path, counting.stages, [])
    with pytest.raises(InputError, match=rf"shared has finished in the cache {own_cache}, not in {other} \(DRAFTHEAD_"):
        run.input("shared")


def test_a_killed_stage_goes_on_with_what_it_wrote(counting: Counting, tmp_path: Path) -> None:
    run = make(counting, tmp_path, "a")
    counting.fail = True
    for kills in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            run.run_stage("shared")
        assert (run.folder("shared") / "part.txt").read_text().split() == ["line0", "line1"][:kills]
        assert not (run.folder("shared") / "manifest.json").exists()
        assert read_json(run.path / "run.json")["stages"]["shared"]["state"] == "running"
    counting.fail = False
    assert run.run_stage("shared")
    assert (run.folder("shared") / "whole.jsonl").read_text().split() == ["line0", "line1", "line2"]
    assert run.record["stages"]["shared"]["state"] == "finished"


def test_torn_files_of_a_killed_try_are_swept_away(counting: Counting, tmp_path: Path) -> None:
    run = make(counting, tmp_path, "a")
    folder = run.folder("shared")
    (folder / "checkpoints" / ".step-00000007.part").mkdir(parents=True)
    (folder / "checkpoints" / ".step-00000007.part" / "model.safetensors").write_bytes(b"torn")
    (folder / ".shard.safetensors.abc.part").write_bytes(b"torn")
    run.run_stage("shared")
    assert list(folder.rglob("*.part*")) == []
    assert set(read_json(folder / "manifest.json")["files"]) == {"whole.jsonl", "ingredients.json"}


def test_old_torn_files_beside_the_stages_are_swept_away(counting: Counting, tmp_path: Path) -> None:
    run = make(counting, tmp_path, "a")
    for name in (".run.json.abc.part", ".run.json.def.part"):
        (run.path / name).write_text("torn")
    for name in (".export.abc.part", ".export.abc.old"):
        (run.path / name).mkdir()
        (run.path / name / "model.safetensors").write_bytes(b"torn")
        os.utime(run.path / name, (1, 1))
    os.utime(run.path / ".run.json.abc.part", (1, 1))
    make(counting, tmp_path, "a")
    left = {path.name for end in ("part", "old") for path in run.path.glob(f".*.{end}")}
    assert left == {".run.json.def.part"}, "another command may be writing that one"


def test_a_cleared_cache_is_filled_again(counting: Counting, tmp_path: Path, own_cache: Path) -> None:
    run = make(counting, tmp_path, "a")
    run.run_stage("shared")
    shutil.rmtree(own_cache / "stages")
    assert run.run_stage("shared")
    assert (run.path / "shared" / "whole.jsonl").is_file()


def test_a_real_folder_in_the_place_of_a_link_is_left_alone(counting: Counting, tmp_path: Path) -> None:
    run = make(counting, tmp_path, "a")
    (run.path / "shared").mkdir()
    (run.path / "shared" / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="not a link into the cache"):
        run.run_stage("shared")
    assert (run.path / "shared" / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["a/b", "..", ""])
def test_a_run_name_is_one_folder_name(name: str, counting: Counting, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"run\.name"):
        make(counting, tmp_path, f"'{name}'")


# ---- what is written down


def test_the_manifest_says_what_made_the_output(counting: Counting, tmp_path: Path) -> None:
    run = make(counting, tmp_path, "a")
    run_all(run)
    folder = run.folder("own")
    manifest = read_json(folder / "manifest.json")
    assert manifest["ingredients"]["settings"]["train"]["depth"] == run.recipe.train.depth
    assert manifest["ingredients"]["reads"] == {"shared": run.key("shared")}
    assert manifest["ingredients"]["target"] == run.target.fingerprint
    assert manifest["key"] == run.key("own") == digest(manifest["ingredients"])
    assert manifest["counts"] == {"lines": 3}
    assert manifest["seconds"] >= 0
    assert {"python", "torch", "transformers"} <= manifest["versions"].keys()
    assert "commit" in manifest
    assert manifest["argv"]
    assert manifest["files"]["whole.jsonl"] == (folder / "whole.jsonl").stat().st_size
    assert manifest["sha256"]["whole.jsonl"] == sha256_of(folder / "whole.jsonl")


@pytest.mark.slow
def test_run_json_of_a_finished_run(tiny_run: Run) -> None:
    record = json.loads((tiny_run.path / "run.json").read_text())
    assert {"recipe", "target_path", "export_path", "stages", "versions", "commit"} <= record.keys()
    assert record["recipe"] == tiny_run.recipe.model_dump(mode="json")
    assert (Path(record["target_path"]) / "config.json").is_file()
    assert (Path(record["export_path"]) / "model.safetensors").is_file()
    finished = [name for name in STAGES if name != "serve-check"]
    assert list(record["stages"]) == finished
    for name in finished:
        assert record["stages"][name]["state"] == "finished"
        assert record["stages"][name]["seconds"] >= 0
        assert Path(record["stages"][name]["path"], "manifest.json").is_file()


@pytest.mark.slow
def test_a_moved_run_still_opens(tiny_run: Run, cache: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "other_name"
    shutil.copytree(tiny_run.path, moved, symlinks=True)
    run = open_run(moved, STAGES, [])
    assert [run.run_stage(name) for name in tiny_run.record["stages"]] == [False] * len(tiny_run.record["stages"])
    record = read_json(moved / "run.json")
    assert record["export_path"] == str(moved / "export")
    assert record["recipe"]["run"]["name"] == "other_name"


def test_a_run_with_relative_paths_opens_from_any_folder(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data.jsonl").write_text("".join(f'{{"prompt": "Question {i}?"}}\n' for i in range(4)))
    monkeypatch.chdir(tmp_path)
    prompts = "prompts={sources: [{source: data.jsonl}], heldout: 0.5}"
    run = create_run(load_recipe("smoke/eagle3", ["run.name=r", prompts]), STAGES)
    assert run.run_stage("prompts")
    key = run.key("prompts")
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    again = open_run(Path(os.pardir) / "runs" / "r", STAGES, [])
    assert again.key("prompts") == key
    assert not again.run_stage("prompts")
