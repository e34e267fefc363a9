"""`drafthead inspect` as a user calls it; its contract is in tests/test_cli.py."""

import json
from pathlib import Path

from drafthead.data.encoding import read_rows
from drafthead.pipeline.run_dir import Run

from tests.conftest import CommandLine

CHATS = [
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there"}]},
    {"prompt": "no answer"},
    {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}]},
]


def write(folder: Path, rows: list[dict[str, object]]) -> Path:
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_text_without_colours_when_nobody_looks(drafthead: CommandLine, tiny_target: Path, tmp_path: Path) -> None:
    done = drafthead("inspect", "--target", tiny_target, "--conversations", write(tmp_path, CHATS))
    assert done.code == 0
    assert "\033" not in done.stdout
    assert ">>> supervised:\nhello there<|im_end|>" in done.stdout
    assert "row 1: dropped: no assistant turn" in done.stdout
    assert done.stdout.endswith("kept 1 (clipped 0), dropped 2\n  1 x no assistant turn\n  1 x empty answer\n")


def test_nothing_kept_is_shown_and_is_an_error(drafthead: CommandLine, tiny_target: Path, tmp_path: Path) -> None:
    done = drafthead("inspect", "--target", tiny_target, "--conversations", write(tmp_path, CHATS[1:]), "--json")
    assert done.code == 2
    assert [one["reason"] for one in done.json()["dropped"]] == ["no assistant turn", "empty answer"]
    (complaint,) = done.complaints
    assert "no samples remain of 2" in complaint


def test_an_argument_that_the_template_ignores_is_said(
    drafthead: CommandLine, tiny_target: Path, tmp_path: Path
) -> None:
    command = ("inspect", "--target", tiny_target, "--conversations", write(tmp_path, CHATS), "--json")
    done = drafthead(*command, "--template-kwargs", '{"enable_thinkng": false}')
    assert (done.code, done.json()["kept"]) == (0, 1)
    assert "enable_thinkng: the chat template of" in done.stderr


def test_rows_of_a_run(drafthead: CommandLine, tiny_run: Run) -> None:
    rows = read_rows(tiny_run.input("encode") / "heldout.parquet")
    done = drafthead("inspect", tiny_run.path, "--split", "heldout", "--json")
    assert done.code == 0
    assert [row["input_ids"] for row in done.json()["rows"]] == [row.input_ids for row in rows]
    one = drafthead("inspect", tiny_run.path, "--split", "heldout", "--row", "0", "--json")
    assert one.json()["rows"] == done.json()["rows"][:1]


def test_a_run_or_a_file(drafthead: CommandLine, tiny_target: Path, tmp_path: Path) -> None:
    for arguments in ((), ("--target", tiny_target), (tmp_path, "--target", tiny_target)):
        done = drafthead("inspect", *arguments)
        assert done.code == 2
        assert len(done.complaints) == 1
        assert "run directory" in done.complaints[0]
