"""What `drafthead inspect` finds and shows; the batch of bad rows (C5)."""

import io
import json

import pytest
import torch
from drafthead.data.encoding import write_rows
from drafthead.data.errors import InputError
from drafthead.data.inspection import Inspection, print_inspection

from .templates import A, C, R, make_template


def user(text):
    return {"role": "user", "content": text}


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


BAD_BATCH = [
    {"messages": [user("a"), answer("")]},
    {"messages": [answer("Sure"), user("Hello")]},
    {"messages": [user("only")]},
    {"messages": [user("a"), user("b"), answer("c")]},
    {"messages": [user("long " * 60), answer("short")]},
    {"messages": [user("a"), answer("word " * 60)]},
    {"messages": [user("a"), answer("cut in the mid")], "finish_reason": "length"},
    {"messages": [user("a"), answer("4")]},
    {"messages": [user("a"), {"role": "wizard", "content": "b"}]},
    {"messages": [user("a"), answer("a good answer")]},
]
KEPT = [5, 6, 7, 9]


@pytest.fixture
def template():
    return make_template(C)


def inspect(template, folder, rows, **options):
    path = write_jsonl(folder / "rows.jsonl", rows)
    return Inspection.of(template, path, **{"max_length": 64, **options})


def test_bad_rows_are_counted_with_reasons(template, tmp_path):
    shown = inspect(template, tmp_path, BAD_BATCH).as_json(template)
    assert set(shown) == {"rows", "dropped", "kept", "clipped"}
    assert [row["source"] for row in shown["rows"]] == KEPT
    assert (shown["kept"], shown["clipped"]) == (4, 2)
    assert shown["kept"] + len(shown["dropped"]) == 10
    reasons = {one["source"]: one["reason"] for one in shown["dropped"]}
    assert list(reasons) == [0, 1, 2, 3, 4, 8]
    assert reasons[0] == "empty answer"
    assert reasons[1] == "starts with an assistant turn"
    assert reasons[2] == "no assistant turn"
    assert "roles must alternate" in reasons[3]
    assert reasons[4] == "prompt longer than max_length"
    assert "unknown role 'wizard'" in reasons[8]


def test_kept_rows_are_supervised_and_their_loss_is_finite(template, tmp_path):
    shown = inspect(template, tmp_path, BAD_BATCH).as_json(template)
    for row in shown["rows"]:
        assert set(row) == {"source", "turn", "input_ids", "loss_mask", "supervised_text"}
        assert len(row["input_ids"]) == len(row["loss_mask"]) <= 64
        mask = torch.tensor(row["loss_mask"])
        assert torch.isfinite((torch.ones(len(mask)) * mask).sum() / mask.sum())
    texts = {row["source"]: row["supervised_text"] for row in shown["rows"]}
    assert texts[7] == "[assistant]4[/]"
    assert texts[6] == "[assistant]cut in the mid"


def test_nothing_left_is_an_error_that_names_the_reasons_after_showing_them(template, tmp_path):
    rows = [row for number, row in enumerate(BAD_BATCH) if number not in KEPT]
    inspection = inspect(template, tmp_path, rows)
    assert len(inspection.as_json(template)["dropped"]) == 6
    with pytest.raises(InputError, match=r"no samples remain of 6: .*empty answer \(1\)"):
        inspection.require_samples()
    unread = inspect(template, tmp_path, [{"a": 1}, 5])
    with pytest.raises(InputError, match="no samples remain of 2: none of"):
        unread.require_samples()


def test_one_row_alone(template, tmp_path):
    shown = inspect(template, tmp_path, BAD_BATCH, only=9).as_json(template)
    assert ([row["source"] for row in shown["rows"]], shown["dropped"]) == ([9], [])
    assert [one["source"] for one in inspect(template, tmp_path, BAD_BATCH, only=8).as_json(template)["dropped"]] == [8]
    with pytest.raises(InputError, match="no row 10; rows are counted from 0"):
        inspect(template, tmp_path, BAD_BATCH, only=10)


def test_last_turns_alone(tmp_path):
    template = make_template(R)
    rows = [{"messages": [user("a"), answer("one 1"), user("b"), answer("two 2")]}]
    every = inspect(template, tmp_path, rows).as_json(template)["rows"]
    last = inspect(template, tmp_path, rows, turns="last").as_json(template)["rows"]
    assert [row["turn"] for row in every] == [0, 1]
    assert last == every[1:]
    assert sum(map(sum, (row["loss_mask"] for row in last))) < sum(map(sum, (row["loss_mask"] for row in every)))


def test_rows_of_a_run_are_shown_as_they_were_encoded(tmp_path):
    template = make_template(R)
    conversation = {"messages": [user("a"), answer("one 1"), user("b"), answer("two 2")]}
    rows = [one.made for one in inspect(template, tmp_path, [conversation]).seen]
    path = tmp_path / "train.parquet"
    write_rows(path, rows)
    found = Inspection.of_rows(path, dropped={"empty answer": 3})
    shown = found.as_json(template)
    assert [row["input_ids"] for row in shown["rows"]] == [row.input_ids for row in rows]
    assert (shown["kept"], found.report.dropped) == (2, {"empty answer": 3})
    out = io.StringIO()
    print_inspection(template, found, out, {})
    assert "kept 2 (clipped 0), dropped 3\n  3 x empty answer" in out.getvalue()
    assert [one.source for one in Inspection.of_rows(path, dropped={}, only=1).seen] == [1]
    for call in (
        lambda: Inspection.of_rows(path, dropped={}, only=2),
        lambda: Inspection.of_rows(tmp_path, dropped={}),
    ):
        with pytest.raises(InputError):
            call()


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "environment", "coloured"),
    [
        (io.StringIO, {}, False),
        (Terminal, {"TERM": "xterm"}, True),
        (Terminal, {"NO_COLOR": ""}, True),
        (Terminal, {"NO_COLOR": "1"}, False),
        (Terminal, {"TERM": "dumb"}, False),
    ],
    ids=["file", "terminal", "empty-no-color", "no-color", "dumb"],
)
def test_inspection_is_printed(stream, environment, coloured, tmp_path):
    rows = [
        {"messages": [user("red \033[31m \x9b31m \r"), answer("blue")]},
        {"messages": [user("only")]},
        {"messages": [user("x"), answer("fine one"), user("y"), answer("lost\n\n<|im_end|>more" + "z" * 400)]},
    ]
    template, out = make_template(A), stream()
    print_inspection(template, inspect(template, tmp_path, rows), out, environment)
    text = out.getvalue()
    order = [
        "row 0, turn 0",
        "row 1: dropped: no assistant turn",
        "row 2, turn 0",
        "row 2, turn 1: dropped: the answer",
    ]
    assert [text.index(part) for part in order] == sorted(text.index(part) for part in order)
    assert "lost" in text
    assert "z" * 400 not in text
    assert "kept 2 (clipped 0), dropped 2" in text
    # the data's own control codes are defused; ours are there on a terminal only
    assert not {"\x9b", "\r"} & set(text)
    assert "red \033" not in text
    assert ("\033[" in text) is coloured
    assert (">>> supervised:" in text) is not coloured
    if coloured:
        assert "\033[2m<|im_start|>user\nred" in text
        assert "\033[1;32m<think>\n\n</think>\n\nblue<|im_end|>\033[0m" in text
