"""The command line from outside: bad input is one line and an exit code, `--json` is one object.

Commands run in processes forked from one that has imported everything (tests/conftest.py), but for the few where the
start itself, or a signal, is the point.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from drafthead.pipeline.run_dir import Run

COMMAND = [sys.executable, "-m", "drafthead.pipeline.cli"]
CommandLine = Any
SMALL: dict[str, Any] = {
    "target": "builtin:tiny-random",
    "prompts": {"sources": [{"source": "builtin", "limit": 6}], "heldout": [{"source": "builtin", "limit": 2}]},
    "respond": {"engine": "transformers", "dtype": "float32", "max_new_tokens": 8},
    "draft_vocab": {"size": 256},
    "capture": {"dtype": "float32"},
    "train": {"tokens": "1k", "batch_tokens": 256, "depth": 2, "precision": "fp32"},
}


def recipe_file(folder: Path, name: str = "small", **changes: Any) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**SMALL, **changes}))
    return path


def run_folder(folder: Path, **changes: Any) -> Path:
    """A run directory as `drafthead run` makes it, before its first stage."""
    path = folder / "runs" / "small"
    path.mkdir(parents=True)
    recipe_file(path, "recipe", run={"name": "small", "dir": str(folder / "runs")}, **changes)
    return path


def copied_target(source: Path, folder: Path) -> Path:
    return shutil.copytree(source, folder / "target")


def assert_one_line(done: Any, code: int, *said: str) -> None:
    assert len(done.complaints) == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    for text in said:
        assert text in done.complaints[0]
    assert done.code == code


# ---- bad input: recipes


@pytest.mark.parametrize(
    ("content", "overrides", "said"),
    [
        (None, [], "nowhere.yaml: no such recipe"),
        ("target: [\n", [], "nowhere.yaml line 2: not valid YAML"),
        ("", [], "a recipe is a mapping"),
        (SMALL | {"trian": {}}, [], "unknown key trian; did you mean train?"),
        (SMALL, ["head.type=eagle9"], "head.type='eagle9'"),
        (SMALL, ["train.tokens=lots"], "train.tokens='lots'"),
        (SMALL, ["train.tokens"], "an override is written key=value"),
        (SMALL, ["target=builtin:nothing"], "target=builtin:nothing: no such built-in target"),
        (SMALL, ["target=./no/folder"], "target=./no/folder: no such folder"),
        (SMALL, ["capture.aux_layers=[9]"], "capture.aux_layers=[9]"),
        (SMALL, ["train.init_from=no/head"], "train.init_from=no/head: no such folder"),
    ],
    ids=[
        "missing",
        "malformed",
        "empty",
        "unknown-key",
        "unknown-head",
        "bad-count",
        "no-equals",
        "unknown-builtin",
        "missing-target",
        "impossible-layer",
        "missing-head",
    ],
)
def test_a_recipe_that_cannot_be_used(
    content: Any, overrides: list[str], said: str, drafthead: CommandLine, tmp_path: Path
) -> None:
    if content is not None:
        text = content if isinstance(content, str) else yaml.safe_dump(content)
        (tmp_path / "nowhere.yaml").write_text(text)
    assert_one_line(drafthead("run", "nowhere.yaml", "--plan", *overrides), 2, said)
    assert not (tmp_path / "runs").exists()


# ---- bad input: targets


def test_a_target_without_config(drafthead: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    path = recipe_file(tmp_path, target=str(tmp_path / "empty"))
    assert_one_line(drafthead("run", path), 2, "no config.json in that folder")


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "generation_config.json"])
def test_a_target_with_a_broken_file(file: str, drafthead: CommandLine, tiny_target: Path, tmp_path: Path) -> None:
    target = copied_target(tiny_target, tmp_path)
    (target / file).write_text('{"torn": ')
    (tmp_path / "chats.jsonl").write_text('{"prompt": "Hi", "response": "Hello"}\n')
    done = drafthead("inspect", "--target", target, "--conversations", tmp_path / "chats.jsonl", "--json")
    assert_one_line(done, 2, str(target))


def test_a_target_without_a_chat_template(drafthead: CommandLine, tiny_target: Path, tmp_path: Path) -> None:
    target = copied_target(tiny_target, tmp_path)
    (target / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((target / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    run = run_folder(tmp_path, target=str(target))
    assert drafthead("prompts", run).code == 0
    assert_one_line(drafthead("respond", run), 2, "no chat template", str(target))


@pytest.mark.parametrize("damage", ["truncated", "garbage", "missing"])
def test_a_target_with_broken_weights(damage: str, drafthead: CommandLine, tiny_target: Path, tmp_path: Path) -> None:
    target = copied_target(tiny_target, tmp_path)
    path = target / "model.safetensors"
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:10_000] if damage == "truncated" else b"\xff" * 10_000)
    assert_one_line(drafthead("run", recipe_file(tmp_path, target=str(target))), 2, str(target), "safetensors")


# ---- bad input: prompts and folders


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file"),
        (b"", "empty file"),
        (b"\x93NUMPY\x01\x00\xff\xfe", "not UTF-8 text"),
        (b'{"text": "x"}\n{"prompt": 5}\nnot json\n', "no samples remain, 3 rows dropped"),
    ],
    ids=["missing", "empty", "binary", "all-rows-bad"],
)
def test_prompts_that_cannot_be_read(content: bytes | None, said: str, drafthead: CommandLine, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    if content is not None:
        path.write_bytes(content)
    run = run_folder(tmp_path, prompts={"sources": [{"source": str(path)}], "heldout": [{"source": "builtin"}]})
    assert_one_line(drafthead("prompts", run), 2, str(path), said)
    assert not list(run.glob("prompts/manifest.json"))


def test_a_hub_data_set_that_is_not_there(drafthead: CommandLine, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run = run_folder(tmp_path, prompts={"sources": [{"source": "nobody/nothing"}]})
    assert_one_line(drafthead("prompts", run), 2, "nobody/nothing")


@pytest.mark.parametrize("stage", ["prompts", "eval", "serve-check"])
def test_a_folder_that_is_no_run(stage: str, drafthead: CommandLine, tmp_path: Path) -> None:
    assert_one_line(drafthead(stage, tmp_path), 2, f"{tmp_path}: not a run directory")


def test_a_stage_before_its_turn_names_the_command(drafthead: CommandLine, tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    assert_one_line(drafthead("train", run), 2, f"stage encode has not finished; run `drafthead encode {run}`")


@pytest.mark.parametrize("folder", ["gone", "empty"])
def test_preflight_of_no_export(folder: str, drafthead: CommandLine, tiny_target: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = drafthead("export", "preflight", tmp_path / folder, "--target", tiny_target, "--json")
    assert_one_line(done, 2, str(tmp_path / folder))


@pytest.mark.parametrize(
    "arguments",
    [["eval", ".", "--k", "0"], ["eval", ".", "--temperature", "-1"], ["fly"], [], ["run"]],
    ids=lambda arguments: "-".join(arguments) or "nothing",
)
def test_wrong_usage_exits_2(arguments: list[str], drafthead: CommandLine) -> None:
    command = f"drafthead {arguments[0]}" if arguments[:1] in (["eval"], ["run"]) else "drafthead"
    assert_one_line(drafthead(*arguments), 2, f"`{command} --help` lists what can be given")


# ---- the disk


@pytest.mark.slow
@pytest.mark.parametrize("limit", [200, 4_000, 60_000])
def test_no_space_left(limit: int, drafthead: CommandLine, tmp_path: Path, monkeypatch: Any) -> None:
    """Files cannot grow beyond `limit` bytes; each stage stops in one line, and goes on when there is room again."""
    run = run_folder(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("DRAFTHEAD_CACHE", str(tmp_path / "cache"))
    assert drafthead("prompts", run).code == 0
    for stage in ("prompts", "respond", "encode", "capture", "draft-vocab", "train"):
        done = drafthead(stage, run, file_limit=limit)
        if done.code != 0:
            assert_one_line(done, 2)
            assert not (run / stage / "manifest.json").exists() or stage == "prompts"
            assert drafthead(stage, run).code == 0
            return
    pytest.fail("no stage met the limit")


@pytest.mark.slow
def test_no_space_left_for_a_checkpoint(
    drafthead: CommandLine, tiny_run: Run, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    run = copied_run(tiny_run, tmp_path)
    done = drafthead("train", run, file_limit=400_000)
    assert_one_line(done, 2)
    assert not (run / "train" / "manifest.json").exists()


def copied_run(run: Run, folder: Path) -> Path:
    """A copy of a run that has its states and is not trained yet."""
    path = folder / "runs" / "copy"
    shutil.copytree(run.path, path, symlinks=True)
    for name in ("train", "eval", "export"):
        shutil.rmtree(path / name)
    return path


def test_a_run_directory_that_is_read_only(drafthead: CommandLine, tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    run.chmod(0o555)
    try:
        assert_one_line(drafthead("prompts", run, no_powers=True), 2, "Permission denied", str(run))
    finally:
        run.chmod(0o755)


def test_a_runs_folder_that_cannot_be_made(drafthead: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where the folder should be")
    assert_one_line(drafthead("run", recipe_file(tmp_path)), 2, "runs")


# ---- Ctrl-C


def start(folder: Path, *arguments: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    )


def interrupt(process: "subprocess.Popen[str]") -> Any:
    """As a terminal does it: to the whole process group."""
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=120)

    complaints = [line for line in stderr.splitlines() if line.startswith("drafthead:")]
    return SimpleNamespace(code=process.returncode, stdout=stdout, stderr=stderr, complaints=complaints)


def wait_for(found: Any, process: "subprocess.Popen[str]", timeout_s: float = 240) -> None:
    end = time.monotonic() + timeout_s
    while not found():
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            pytest.fail(f"it did not get there: {process.communicate()[1][-3000:]}")
        time.sleep(0.02)


@pytest.mark.slow
def test_ctrl_c_in_respond_keeps_the_answers(cache: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("DRAFTHEAD_CACHE", str(tmp_path / "cache"))
    respond = {"engine": "transformers", "dtype": "float32", "max_new_tokens": 600, "max_num_seqs": 1}
    run = run_folder(tmp_path, respond=respond)
    subprocess.run([*COMMAND, "prompts", str(run)], check=True, capture_output=True)
    process = start(tmp_path, "respond", run)
    part = run / "respond" / "answers.part.jsonl"
    wait_for(lambda: part.exists() and part.stat().st_size > 0, process)
    assert_one_line(interrupt(process), 130, "interrupted")
    assert part.read_text().count("\n") >= 1
    assert not (run / "respond" / "manifest.json").exists()


@pytest.mark.slow
def test_ctrl_c_in_train_keeps_the_checkpoint(tiny_run: Run, cache: Path, tmp_path: Path) -> None:
    run = copied_run(tiny_run, tmp_path)
    path = run / "recipe.yaml"
    values = yaml.safe_load(path.read_text())
    values["train"] |= {"tokens": 3_000_000, "checkpoint_every": 2}
    path.write_text(yaml.safe_dump(values))
    process = start(tmp_path, "train", run)
    wait_for(lambda: list(run.glob("train/checkpoints/step-*/state.json")), process)
    assert_one_line(interrupt(process), 130, "interrupted")
    left = list(run.glob("train/checkpoints/step-*/state.json"))
    assert left
    time.sleep(1)
    assert list(run.glob("train/checkpoints/step-*/state.json")) == left, "an orphan still trains"


# ---- one object on stdout


@pytest.mark.slow
def test_the_module_and_the_script_start(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("drafthead")
    for command in (COMMAND, [str(script)]):
        done = subprocess.run([*command, "prompts", "nowhere"], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.startswith("drafthead: nowhere: not a run directory")
        assert done.stderr.count("\n") == 1


def test_doctor_json(drafthead: CommandLine) -> None:
    done = drafthead("doctor", "--json")
    assert done.code == (0 if done.json()["ok"] else 1)


def test_plan_json(drafthead: CommandLine, tmp_path: Path) -> None:
    done = drafthead("run", recipe_file(tmp_path), "--plan", "--json", "eval.k=2")
    assert done.code == 0
    plan = done.json()
    assert plan["stages"][0]["name"] == "prompts"
    assert plan["prompts"] == {"count": 6, "exact": True}
    assert not (tmp_path / "runs").exists()


def test_inspect_json(drafthead: CommandLine, tiny_target: Path, tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": role, "content": f"{role} text"} for role in ("user", "assistant") * 2]},
        {"prompt": "no answer"},
        {"nothing": 1},
        {"prompt": "cut", "response": "word " * 200},
    ]
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = drafthead("inspect", "--target", tiny_target, "--conversations", chats, "--max-length", "100", "--json")
    assert done.code == 0
    found = done.json()
    assert found.keys() == {"rows", "dropped", "kept", "clipped"}
    assert [(row["source"], row["turn"]) for row in found["rows"]] == [(0, 0), (0, 1), (3, 0)]
    for row in found["rows"]:
        assert row.keys() >= {"source", "turn", "input_ids", "loss_mask", "supervised_text"}
        assert len(row["input_ids"]) == len(row["loss_mask"]) <= 100
        assert set(row["loss_mask"]) == {0, 1}
    assert found["rows"][0]["supervised_text"].startswith("assistant text<|im_end|>")
    assert {one["source"] for one in found["dropped"]} == {1, 2}
    assert all(one["reason"] for one in found["dropped"])
    assert (found["kept"], found["clipped"]) == (3, 1)


def test_inspect_without_a_usable_row_says_so(drafthead: CommandLine, tiny_target: Path, tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text('{"prompt": "no answer"}\n')
    done = drafthead("inspect", "--target", tiny_target, "--conversations", tmp_path / "chats.jsonl")
    assert done.code == 2
    assert len(done.complaints) == 1
    assert "no samples remain" in done.complaints[0]


@pytest.mark.slow
def test_eval_json_of_the_stage_and_of_other_settings(drafthead: CommandLine, tiny_run: Run, tmp_path: Path) -> None:
    before = (tiny_run.path / "eval" / "report.json").read_bytes()
    stage = drafthead("eval", tiny_run.path, "--json")
    assert stage.code == 0
    assert stage.json()["k"] == tiny_run.recipe.eval.k
    prompts = tmp_path / "mine.jsonl"
    rows = [{"prompt": "1?"}, {"turns": ["2?", "3?"]}, {"messages": [{"role": "user", "content": "4?"}]}]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = drafthead("eval", tiny_run.path, "--prompts", prompts, "--k", "2", "--max-new-tokens", "9", "--json")
    assert done.code == 0
    report = done.json()
    assert (report["k"], report["identical_to_plain"]) == (2, "3/3")
    assert len(report["per_position"]) == len(report["conditional"]) == 2
    lengths = {"mean_acceptance_length", "mean_of_requests_acceptance_length"}
    assert {*lengths, "drafts", "draft_acceptance_rate", "by_domain"} <= report.keys()
    assert 1 <= report["mean_acceptance_length"] <= 3
    sampled = drafthead("eval", tiny_run.path, "--prompts", prompts, "--temperature", "1", "--json")
    assert sampled.code == 0
    assert sampled.json()["temperature"] == 1
    assert (tiny_run.path / "eval" / "report.json").read_bytes() == before


@pytest.mark.slow
def test_preflight_json(drafthead: CommandLine, tiny_run: Run, tmp_path: Path) -> None:
    export = tiny_run.path / "export"
    done = drafthead("export", "preflight", export, "--target", "builtin:tiny-random", "--json")
    assert done.code == 0
    report = done.json()
    assert report["ok"]
    assert report["failures"] == []
    assert "--speculative-config" in report["serve_command"]
    broken = shutil.copytree(export, tmp_path / "export")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    done = drafthead("export", "preflight", broken, "--target", tiny_run.target.path, "--json")
    assert done.code == 1
    assert any(failure["field"] == "num_hidden_layers" for failure in done.json()["failures"])


@pytest.mark.slow
def test_a_state_file_cut_off_is_one_line(drafthead: CommandLine, tiny_run: Run, cache: Path, tmp_path: Path) -> None:
    run = copied_run(tiny_run, tmp_path)
    other = shutil.copytree(cache, tmp_path / "cache", symlinks=True)
    (shard,) = (other / "stages").glob(f"capture-{tiny_run.key('capture')}/train/shard-0-00000.safetensors")
    shard.write_bytes(shard.read_bytes()[:5000])
    os.environ["DRAFTHEAD_CACHE"] = str(other)  # put back by the fixture `cache`
    assert_one_line(drafthead("train", run), 2, "shard-0-00000.safetensors", "missing or cut off")
    assert not (run / "train" / "manifest.json").exists()
    assert_one_line(drafthead("eval", run), 2, "stage train has not finished")


@pytest.mark.slow
def test_a_launch_that_does_not_exist(drafthead: CommandLine, tiny_run: Run, tmp_path: Path) -> None:
    run = copied_run(tiny_run, tmp_path)
    path = run / "recipe.yaml"
    path.write_text(path.read_text().replace("launch: single", "launch: zero9"))
    assert_one_line(drafthead("train", run), 2, "run.launch=zero9: no such launch")
