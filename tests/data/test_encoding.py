"""Context and supervised ids of every turn, against templates that rewrite turns (C1, C3, C5)."""

import copy
import io
import json

import jinja2
import pytest
import torch
from drafthead.data.conversations import parse_conversation
from drafthead.data.encoding import (
    EncodeReport,
    Row,
    check_row,
    encode_answer,
    encode_conversation,
    inspect_conversations,
    print_inspection,
    read_rows,
    write_rows,
)
from drafthead.data.errors import GateError, InputError
from drafthead.data.template import Template, TurnError, read_end_of_turn_ids

from .templates import TOKENIZER, A, B, C, R, make_template, make_tokenizer

END = "<|im_end|>"


def user(text):
    return {"role": "user", "content": text}


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


def encode(template, messages, max_length=512, tools=None, **row):
    row = {"messages": messages, "tools": tools, **row}
    return encode_conversation(template, parse_conversation(row, number=0, source="t"), max_length=max_length)


def supervised(rows):
    return [TOKENIZER.decode(row.input_ids[row.context_length :]) for row in rows]


def context(row):
    return TOKENIZER.decode(row.input_ids[: row.context_length])


def served_ids(template, messages, tools=None, **kwargs):
    """Render with jinja alone, the way a server would, without any of our code."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    text = environment.from_string(template).render(
        messages=messages, tools=tools, add_generation_prompt=True, **kwargs
    )
    return TOKENIZER.encode(text, add_special_tokens=False)


# ---- C1: two turns under a template that strips reasoning ------------------------------------------------

TWO_TURNS = [user("1+1?"), answer("<think>easy</think>2"), user("2+2?"), answer("<think>hm</think>4")]


def test_two_turns_supervise_the_reasoning_of_each():
    rows, reasons = encode(make_template(A), TWO_TURNS)
    assert reasons == []
    assert supervised(rows) == [
        f"<think>\neasy\n</think>\n\n2{END}",
        f"<think>\nhm\n</think>\n\n4{END}",
    ]
    assert [row.turn for row in rows] == [0, 1]


def test_two_turns_have_the_served_prompt_as_context():
    rows, _ = encode(make_template(A), TWO_TURNS)
    for row, messages in zip(rows, (TWO_TURNS[:1], TWO_TURNS[:3]), strict=True):
        assert row.input_ids[: row.context_length] == served_ids(A, messages)
    assert "easy" not in context(rows[1])
    assert f"assistant\n2{END}" in context(rows[1])


def test_mask_covers_the_end_of_turn_and_not_the_newline_after_it():
    rows, _ = encode(make_template(A), TWO_TURNS)
    for row in rows:
        assert row.input_ids[-1] == TOKENIZER.eos_token_id
        assert row.loss_mask == [0] * row.context_length + [1] * (len(row.input_ids) - row.context_length)
        assert sum(row.loss_mask) > 2


def test_a_prefilled_think_tag_is_context():
    rows, _ = encode(make_template(B), TWO_TURNS)
    assert supervised(rows) == [f"easy\n</think>\n\n2{END}", f"hm\n</think>\n\n4{END}"]
    assert context(rows[0]).endswith("assistant\n<think>\n")


@pytest.mark.parametrize("text", ["reason\n</think>\n\nanswer", "reason</think>answer", "\n</think>\n\nanswer"])
def test_an_answer_with_only_the_closing_tag_round_trips(text):
    rows, reasons = encode(make_template(B), [user("why"), answer(text)])
    assert reasons == []
    assert rows[0].input_ids == served_ids(B, [user("why")]) + TOKENIZER.encode(text) + [TOKENIZER.eos_token_id]


def test_thinking_off_makes_the_empty_block_context():
    template = make_template(A, enable_thinking=False)
    rows, _ = encode(template, [user("1+1?"), answer("2, sure"), user("2+2?"), answer("4")])
    assert supervised(rows) == [f"2, sure{END}", f"4{END}"]
    assert context(rows[0]).endswith("<think>\n\n</think>\n\n")
    assert rows[0].input_ids[: rows[0].context_length] == served_ids(A, [user("1+1?")], enable_thinking=False)


def test_thinking_off_refuses_an_answer_with_reasoning():
    rows, reasons = encode(make_template(A, enable_thinking=False), TWO_TURNS[:2])
    assert rows == []
    assert reasons == ["the answer holds reasoning that does not follow the served prompt"]


@pytest.mark.parametrize("text", ["<b>bold</b>", "<think", "plain", "\nnew line"])
def test_scaffold_left_out_of_finished_turns_never_masks_a_real_answer(text):
    rows, reasons = encode(make_template(R, opening="<think>\n\n</think>\n\n"), [user("hi"), answer(text)])
    assert reasons == []
    assert supervised(rows) == [f"{text}{END}"]
    assert context(rows[0]).endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("text", ["hm\n</think>\n\n4", "<think>\nhm\n</think>\n\n4"])
def test_reasoning_that_the_template_strips_is_still_what_the_target_wrote(text):
    rows, reasons = encode(make_template(R, opening="<think>\n"), [user("2+2?"), answer(text)])
    assert reasons == []
    assert supervised(rows) == [f"hm\n</think>\n\n4{END}"]


@pytest.mark.parametrize(
    ("opening", "message", "reason"),
    [
        ("<think>\n", answer("4"), "the served prompt ends in text"),
        ("<|other|>", answer("4"), "the served prompt ends in text"),
        ("", answer("<think>hm</think>4"), "does not render the reasoning"),
        ("", answer("4", reasoning_content="hm"), "does not render the reasoning"),
        ("", answer("", tool_calls=[{"name": "get", "arguments": {}}]), "does not render the tool calls"),
        ("", answer(f"4{END}5"), "contains an end-of-turn token"),
    ],
)
def test_turns_in_doubt_are_refused(opening, message, reason):
    rows, reasons = encode(make_template(R, opening=opening), [user("2+2?"), message])
    assert rows == []
    assert len(reasons) == 1
    assert reason in reasons[0]


def test_an_unclosed_or_doubled_think_block_is_refused():
    for text in ("<think>cut", "<think>a</think>b</think>c"):
        rows, reasons = encode(make_template(A), [user("x"), answer(text)])
        assert (rows, len(reasons)) == ([], 1)


# ---- C3: tool calls in every spelling --------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": {"city": "Ålesund"}}}
TOOL_TURNS = [
    user("weather?"),
    answer("", reasoning_content="call it", tool_calls=[CALL]),
    {"role": "tool", "content": "4C", "tool_call_id": "c1"},
    answer("4C", reasoning_content="done"),
]


def tool_spellings():
    for arguments in (CALL["function"]["arguments"], json.dumps(CALL["function"]["arguments"])):
        for content in ("", None):
            for tools in ([TOOL], json.dumps([TOOL]), TOOL, [json.dumps(TOOL)]):
                messages = copy.deepcopy(TOOL_TURNS)
                messages[1]["content"] = content
                messages[1]["tool_calls"][0]["function"]["arguments"] = arguments
                yield messages, tools


def test_every_spelling_of_a_tool_call_gives_the_same_ids():
    expected = [row.input_ids for row in encode(make_template(A), TOOL_TURNS, tools=[TOOL])[0]]
    assert len(expected) == 2
    for messages, tools in tool_spellings():
        assert [row.input_ids for row in encode(make_template(A), messages, tools=tools)[0]] == expected


def test_call_tokens_are_supervised_and_results_are_context():
    rows, _ = encode(make_template(A), TOOL_TURNS, tools=[TOOL])
    call = '<tool_call>\nget {"city": "Ålesund"}\n</tool_call>'
    assert supervised(rows) == [
        f"<think>\ncall it\n</think>\n\n\n{call}{END}",
        f"<think>\ndone\n</think>\n\n4C{END}",
    ]
    assert '"parameters"' in context(rows[0])
    assert "<tool_response>\n4C" in context(rows[1])
    assert rows[0].input_ids[: rows[0].context_length] == served_ids(A, TOOL_TURNS[:1], [TOOL])


def test_absent_tools_render_no_schema():
    texts = [context(encode(make_template(A), TOOL_TURNS, tools=tools)[0][0]) for tools in (None, [], "[]", "")]
    assert set(texts) == {f"<|im_start|>user\nweather?{END}\n<|im_start|>assistant\n"}


# ---- C5: bad rows ----------------------------------------------------------------------------------------

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


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_bad_rows_are_counted_with_reasons(tmp_path):
    path = write_jsonl(tmp_path / "bad.jsonl", BAD_BATCH)
    shown = inspect_conversations(make_template(C), path, max_length=64)
    assert set(shown) == {"rows", "dropped", "kept", "clipped"}
    assert [row["source"] for row in shown["rows"]] == KEPT
    assert (shown["kept"], shown["clipped"]) == (4, 2)
    assert shown["kept"] + len(shown["dropped"]) == 10
    reasons = {one["source"]: one["reason"] for one in shown["dropped"]}
    assert reasons[0] == "empty answer"
    assert reasons[1] == "starts with an assistant turn"
    assert reasons[2] == "no assistant turn"
    assert "roles must alternate" in reasons[3]
    assert reasons[4] == "prompt longer than max_length"
    assert "unknown role 'wizard'" in reasons[8]


def test_kept_rows_are_supervised_and_their_loss_is_finite(tmp_path):
    shown = inspect_conversations(make_template(C), write_jsonl(tmp_path / "b.jsonl", BAD_BATCH), max_length=64)
    for row in shown["rows"]:
        assert set(row) == {"source", "turn", "input_ids", "loss_mask", "supervised_text"}
        assert len(row["input_ids"]) == len(row["loss_mask"]) <= 64
        mask = torch.tensor(row["loss_mask"])
        assert torch.isfinite((torch.ones(len(mask)) * mask).sum() / mask.sum())
    texts = {row["source"]: row["supervised_text"] for row in shown["rows"]}
    assert texts[7] == "[assistant]4[/]"
    assert texts[6] == "[assistant]cut in the mid"


def test_nothing_left_is_an_error_that_names_the_reasons(tmp_path):
    rows = [row for number, row in enumerate(BAD_BATCH) if number not in KEPT]
    with pytest.raises(InputError, match=r"no samples remain of 6: .*empty answer \(1\)"):
        inspect_conversations(make_template(C), write_jsonl(tmp_path / "x.jsonl", rows), max_length=64)


def test_a_clipped_answer_loses_its_end_of_turn():
    template = make_template(A)
    whole = encode(template, [user("a"), answer("one two three")])[0][0]
    cut = encode(template, [user("a"), answer("one two three")], max_length=len(whole.input_ids) - 1)[0][0]
    assert cut.input_ids == whole.input_ids[:-1]
    assert (whole.clipped, cut.clipped) == (False, True)
    written_short = encode(template, [user("a"), answer("one two three")], finish_reason="length")[0][0]
    assert written_short.input_ids == whole.input_ids[:-1]
    assert written_short.clipped


def test_an_answer_clipped_to_one_token_is_dropped():
    template = make_template(A)
    row = encode(template, [user("a"), answer("one two three")])[0][0]
    for extra, kept in ((0, 0), (1, 0), (2, 1)):
        rows, reasons = encode(template, [user("a"), answer("x y")], max_length=row.context_length + extra)
        assert (len(rows), len(reasons)) == (kept, 1 - kept)


def test_a_leading_assistant_turn_drops_that_turn_alone():
    rows, reasons = encode(make_template(A), [answer("hello"), user("a"), answer("b")])
    assert reasons == ["starts with an assistant turn"]
    assert [row.turn for row in rows] == [1]


# ---- templates and tokenizers ----------------------------------------------------------------------------


def test_a_target_without_a_template_is_refused_with_the_remedy():
    with pytest.raises(InputError, match=r"^some/target: .*--chat-template"):
        Template(make_tokenizer(), target="some/target")


def test_a_broken_template_is_an_error_of_the_template_not_of_the_rows():
    with pytest.raises(InputError, match="chat template line 1"):
        encode(make_template("{% for %}"), [user("a"), answer("b")])


def test_reserved_template_arguments_are_refused():
    with pytest.raises(InputError, match=r"encode\.template_kwargs\.tokenize"):
        make_template(A, tokenize=True)


def test_render_prompt_refuses_what_the_template_refuses():
    with pytest.raises(TurnError, match="roles must alternate"):
        make_template(C).render_prompt([answer("x")])


def test_load_reads_template_and_end_of_turn_ids(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = A
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    assert read_end_of_turn_ids(tmp_path) == {7, 8, 9}
    template = Template.load(tmp_path)
    assert template.end_of_turn_ids == {7, 8, 9, tokenizer.eos_token_id}
    assert template.render_prompt([user("a")]) == served_ids(A, [user("a")])
    (tmp_path / "c.jinja").write_text(C)
    override = Template.load(tmp_path, chat_template=tmp_path / "c.jinja")
    assert override.decode(override.render_prompt([user("a")])) == "[user]a[/]"


def test_load_names_a_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(InputError, match=f"{tmp_path}: no tokenizer"):
        Template.load(tmp_path)


def test_an_answer_never_merges_with_the_prompt():
    """The prompt ends in a line break, the answer starts with one; together they would be one token."""
    template = make_template(R)
    prompt = served_ids(R, [user("a")])
    rows, _ = encode(template, [user("a"), answer("\nthe")])
    assert TOKENIZER.encode("\n\n") != TOKENIZER.encode("\n") * 2
    assert rows[0].input_ids == prompt + TOKENIZER.encode(f"\nthe{END}")


# ---- engine-written answers ------------------------------------------------------------------------------

FIELDS = {"id": "a", "source": "s", "domain": "d", "turn": 0}


def test_engine_ids_are_kept_as_they_are():
    split = [TOKENIZER.encode(letter)[0] for letter in "the"]
    assert split != TOKENIZER.encode("the")
    row = encode_answer(**FIELDS, context_ids=[1, 2, 3], completion_ids=split, finish_reason="stop", max_length=9)
    assert isinstance(row, Row)
    assert (row.input_ids, row.context_length, row.clipped) == ([1, 2, 3, *split], 3, False)


@pytest.mark.parametrize(
    ("completion", "finish", "max_length", "clipped"),
    [([4, 5], "length", 9, True), ([4, 5, 6], "stop", 5, True), ([4, 5, 6], "stop", 6, False)],
)
def test_cut_engine_answers_are_marked(completion, finish, max_length, clipped):
    row = encode_answer(
        **FIELDS,
        context_ids=[1, 2, 3],
        completion_ids=completion,
        finish_reason=finish,
        max_length=max_length,
    )
    assert isinstance(row, Row)
    assert row.clipped is clipped
    assert len(row.input_ids) <= max_length


@pytest.mark.parametrize(
    ("completion", "max_length", "reason"),
    [
        ([], 9, "empty answer"),
        ([4], 9, "empty answer"),
        ([4, 5], 3, "prompt longer than max_length"),
        ([4, 5], 4, "nothing supervised"),
    ],
)
def test_unusable_engine_answers_give_a_reason(completion, max_length, reason):
    result = encode_answer(
        **FIELDS,
        context_ids=[1, 2, 3],
        completion_ids=completion,
        finish_reason="stop",
        max_length=max_length,
    )
    assert isinstance(result, str)
    assert reason in result


# ---- gate, report, files ---------------------------------------------------------------------------------


def make_row(input_ids, context_length):
    return Row(**FIELDS, input_ids=input_ids, context_length=context_length, clipped=False)


def test_gate_passes_what_encoding_makes():
    template = make_template(A)
    rows, _ = encode(template, TWO_TURNS)
    check_row(rows[0], template.render_prompt(TWO_TURNS[:1]))
    check_row(rows[1], template.render_prompt(TWO_TURNS[:3]))
    with pytest.raises(GateError, match="differs from the served prompt"):
        check_row(rows[1], template.render_prompt(TWO_TURNS[:1]))


@pytest.mark.parametrize(
    ("row", "served", "problem"),
    [
        (make_row([1, 2, 3, 4], 2), [1, 9], "differs from the served prompt .id 1."),
        (make_row([1, 2, 3, 4], 2), [1, 2, 3], "differs from the served prompt .lengths 2 and 3."),
        (make_row([1, 2], 2), [1, 2], "nothing is supervised"),
        (make_row([1, 2, 3], 2), [1, 2], "first draft slot"),
        (make_row([1, 2, 3], 0), [], "first draft slot"),
    ],
)
def test_gate_refuses(row, served, problem):
    with pytest.raises(GateError, match=f"MaskGate: row a turn 0: .*{problem}"):
        check_row(row, served)


def test_report_adds_up():
    report = EncodeReport()
    report.add([make_row([1, 2, 3], 1)], ["empty answer"])
    report.add([Row(**FIELDS, input_ids=[1, 2, 3], context_length=1, clipped=True)], ["empty answer", "other"])
    assert report.as_json() == {
        "kept": 2,
        "clipped": 1,
        "dropped": {"empty answer": 2, "other": 1},
        "total": 5,
    }
    report.require_samples("here")
    with pytest.raises(InputError, match="here: no samples remain"):
        EncodeReport().require_samples("here")


def test_rows_survive_parquet(tmp_path):
    rows = [make_row([1, 2, 3], 1), Row(**FIELDS, input_ids=[151_935], context_length=0, clipped=True)]
    write_rows(tmp_path / "rows.parquet", rows)
    assert read_rows(tmp_path / "rows.parquet") == rows
    assert [path.name for path in tmp_path.iterdir()] == ["rows.parquet"]


def test_unreadable_rows_are_named(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        read_rows(tmp_path / "none.parquet")
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(InputError, match=r"bad\.parquet: not a parquet file"):
        read_rows(tmp_path / "bad.parquet")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["file", "terminal"])
def test_inspection_is_printed(stream, tmp_path):
    rows = [{"messages": [user("red \033[31m"), answer("blue")]}, {"messages": [user("only")]}]
    template = make_template(A)
    shown = inspect_conversations(template, write_jsonl(tmp_path / "x.jsonl", rows), max_length=64)
    print_inspection(template, shown, stream)
    text = stream.getvalue()
    assert "row 1: dropped: no assistant turn" in text
    assert "kept 1 (clipped 0), dropped 1" in text
    # the data's own escape code is defused; ours are there on a terminal only
    assert "red \033" not in text
    assert ("\033[" in text) is stream.isatty()
