"""Shapes of chat data, spellings of tool calls, and files that cannot be used."""

import json

import pytest
from drafthead.data.conversations import Dropped, parse_conversation, read_conversations, read_numbered
from drafthead.data.errors import InputError

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "hello"}


def parse(row):
    return parse_conversation(row, number=3, source="s")


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ANSWER]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
        {"conversations": [{"from": "user", "value": "hi"}, {"from": "assistant", "value": "hello"}]},
        {"prompt": "hi", "response": "hello"},
        {"prompt": "hi", "completion": "hello"},
    ],
    ids=["messages", "sharegpt", "sharegpt-openai-names", "prompt-response", "prompt-completion"],
)
def test_shapes_become_the_same_messages(row):
    conversation = parse(row)
    assert conversation.messages == [USER, ANSWER]
    assert conversation.id == parse({"messages": [USER, ANSWER]}).id
    assert (conversation.source, conversation.domain, conversation.tools) == ("s", "all", None)


def test_prompts_and_turns_are_user_messages():
    assert parse({"prompt": "hi"}).messages == [USER]
    assert parse({"turns": ["hi", "more"]}).messages == [USER, {"role": "user", "content": "more"}]


def test_ids_and_domains():
    assert parse({"id": "x7", "prompt": "hi"}).id == "x7"
    assert parse({"id": 7, "prompt": "hi"}).id == parse({"prompt": "hi"}).id != parse({"prompt": "ho"}).id
    assert parse({"prompt": "hi", "domain": "code"}).domain == "code"
    assert parse({"prompt": "hi", "category": "math"}).domain == "math"


def test_null_content_is_empty_and_reasoning_is_kept():
    message = parse({"messages": [USER, {"role": "assistant", "content": None, "reasoning_content": "r"}]}).messages[1]
    assert message == {"role": "assistant", "content": "", "reasoning_content": "r"}
    assert parse({"messages": [{"role": "assistant", "content": "a", "reasoning": "r"}]}).messages[0] == {
        "role": "assistant",
        "content": "a",
        "reasoning_content": "r",
    }


def call_row(call, tools=None):
    return {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}], "tools": tools}


@pytest.mark.parametrize(
    "call",
    [
        {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
        {"function": {"name": "f", "arguments": '{"a": 1}'}},
        {"name": "f", "arguments": {"a": 1}},
    ],
    ids=["object", "json-text", "flat"],
)
def test_tool_calls_have_one_spelling(call):
    expected = [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    assert parse(call_row(call)).messages[1]["tool_calls"] == expected


@pytest.mark.parametrize("arguments", [None, "", {}])
def test_absent_arguments_are_an_empty_object(arguments):
    message = parse(call_row({"function": {"name": "f", "arguments": arguments}})).messages[1]
    assert message["tool_calls"][0]["function"]["arguments"] == {}


def test_tools_have_one_spelling():
    tool = {"type": "function", "function": {"name": "f"}}
    for spelling in ([tool], tool, json.dumps([tool]), json.dumps(tool), [json.dumps(tool)]):
        assert parse(call_row({"name": "f"}, spelling)).tools == [tool]
    for absent in (None, [], "", "null", "[]"):
        assert parse(call_row({"name": "f"}, absent)).tools is None


def test_finish_reason_of_the_row_belongs_to_the_last_answer():
    messages = parse({"messages": [USER, ANSWER, USER, ANSWER], "finish_reason": "length"}).messages
    assert [message.get("finish_reason") for message in messages] == [None, None, None, "length"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": []}, "no messages"),
        ({"text": "x"}, "none of `messages`"),
        ({"messages": "x"}, "`messages` is text, not a list"),
        ({"messages": ["x"]}, "a message is text, not an object"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "unknown role 'wizard'"),
        ({"messages": [{"content": "x"}]}, "unknown role None"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "unknown role"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content is a list, not text"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
        ({"turns": [1]}, "a prompt or user turn is a int"),
        (call_row({"function": {"name": "f", "arguments": '{"a": '}}), "tool call arguments: malformed JSON"),
        (call_row({"function": {"name": "f", "arguments": "[1]"}}), "tool call arguments are a list"),
        (call_row({"function": {"arguments": {}}}), "without a function name"),
        (call_row("f"), "without a function name"),
        (call_row({"name": "f"}, "{"), "tools: malformed JSON"),
        (call_row({"name": "f"}, [1]), "a tool is not an object"),
        ([], "a row is an object"),
    ],
)
def test_unusable_rows_say_why(row, reason):
    with pytest.raises(InputError, match=r"^s row 3: ") as error:
        parse(row)
    assert reason in str(error.value)


# ---- files -----------------------------------------------------------------------------------------------


def test_bad_lines_are_dropped_by_number(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": \n{"messages": []}\n{"prompt": "b\u2028c"}\n')
    conversations, dropped = read_conversations(path, "s")
    assert [one.messages[0]["content"] for one in conversations] == ["a", "b\u2028c"]
    assert [one.source for one in dropped] == [2, 3]
    assert dropped[0].reason.startswith("line 3: not valid JSON")
    assert dropped[1] == Dropped(3, "no messages")
    assert [number for number, _ in read_numbered(path, "s")[0]] == [0, 4]


def test_a_json_list_is_read(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"prompt": "a"}, 5, {"prompt": "b"}], indent=1), encoding="utf-8-sig")
    conversations, dropped = read_conversations(path, "s")
    assert len(conversations) == 2
    assert [one.source for one in dropped] == [1]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "no such file"),
        (b"", "empty file"),
        (b" \n\n", "empty file"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"[]", "the list is empty"),
        (b"[1", "not valid JSON"),
        (b'{"a": 1}\nnope\n', "no samples remain, 2 rows dropped; the first: none of `messages`"),
        (b"[" * 100_000, "not usable JSON"),
    ],
    ids=["missing", "empty", "blank", "binary", "empty-list", "torn-list", "nothing-usable", "deep"],
)
def test_unusable_files_are_named(tmp_path, content, problem):
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError) as error:
        read_conversations(path, "s")
    assert str(error.value).startswith(f"{path}: ")
    assert problem in str(error.value)


def test_a_folder_is_not_a_file_of_conversations(tmp_path):
    with pytest.raises(InputError, match="is a directory"):
        read_conversations(tmp_path, "s")
