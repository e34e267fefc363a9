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
        {"prompt": [USER], "completion": [ANSWER]},
        {"prompt": [USER], "response": "hello"},
        {"messages": [USER], "response": "hello"},
        {"messages": [USER, ANSWER], "response": "hello"},
        {"conversation": [USER, ANSWER]},
        {"messages": json.dumps([USER, ANSWER])},
        {"conversations": [{"from": "Human", "value": "hi"}, {"from": "GPT", "value": "hello"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, ANSWER]},
        {"messages": [USER, ANSWER], "system": "", "tools": None, "functions": []},
    ],
    ids=lambda row: "-".join(row)[:40] if isinstance(row, dict) else None,
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


@pytest.mark.parametrize(
    "keys",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"thinking": "hm"},
        {"reasoning_content": None, "reasoning": "hm"},
        {"reasoning_content": "hm", "reasoning": None},
    ],
    ids=str,
)
def test_reasoning_is_kept_under_each_of_its_names(keys):
    message = {"role": "assistant", "content": "4", **keys}
    parsed = parse_conversation({"messages": [message]}, number=0, source="t").messages[0]
    assert parsed["reasoning_content"] == "hm"


def test_the_system_prompt_beside_the_messages_is_not_lost():
    expected = [{"role": "system", "content": "Be brief."}, USER, ANSWER]
    sharegpt = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
    assert parse({"system": "Be brief.", "conversations": sharegpt}).messages == expected
    assert parse({"system_prompt": "Be brief.", "prompt": "hi", "response": "hello"}).messages == expected
    assert parse({"system": "Be long.", "messages": expected}).messages == expected


def test_text_parts_are_joined_as_a_server_joins_them():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, "c"]
    assert parse({"messages": [{"role": "user", "content": parts}]}).messages[0]["content"] == "a\nb\nc"


def test_calls_of_older_formats_are_not_lost():
    expected = [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    call = {"name": "f", "arguments": '{"a": 1}'}
    old = parse({"messages": [USER, {"role": "assistant", "content": "so", "function_call": call}]}).messages[1]
    assert old == {"role": "assistant", "content": "so", "tool_calls": expected}
    turns = [{"from": "function_call", "value": json.dumps(call)}, {"from": "observation", "value": "4"}]
    spoken = parse({"conversations": [{"from": "human", "value": "hi"}, *turns]}).messages
    assert spoken[1:] == [
        {"role": "assistant", "content": "", "tool_calls": expected},
        {"role": "tool", "content": "4"},
    ]
    answered = parse({"messages": [USER, {"role": "function", "name": "f", "content": "4"}]}).messages[1]
    assert answered == {"role": "tool", "content": "4", "name": "f"}


@pytest.mark.parametrize("nothing", [None, [], "null", "[]"])
def test_no_tool_calls_are_no_tool_calls(nothing):
    assert parse({"messages": [{**ANSWER, "tool_calls": nothing}]}).messages == [ANSWER]


def test_a_weight_of_the_data_is_kept():
    assert parse({"messages": [USER, {**ANSWER, "weight": 0}]}).messages[1]["weight"] == 0


@pytest.mark.parametrize("arguments", [None, "", "null", {}])
def test_absent_arguments_are_an_empty_object(arguments):
    message = parse(call_row({"function": {"name": "f", "arguments": arguments}})).messages[1]
    assert message["tool_calls"][0]["function"]["arguments"] == {}


def test_tools_have_one_spelling():
    tool = {"type": "function", "function": {"name": "f"}}
    for spelling in ([tool], tool, json.dumps([tool]), json.dumps(tool), [json.dumps(tool)], [{"name": "f"}]):
        assert parse(call_row({"name": "f"}, spelling)).tools == [tool]
    assert parse({"prompt": "hi", "functions": [{"name": "f"}]}).tools == [tool]
    for absent in (None, [], "", "null", "[]"):
        assert parse(call_row({"name": "f"}, absent)).tools is None


def test_finish_reason_of_the_row_belongs_to_the_last_answer():
    messages = parse({"messages": [USER, ANSWER, USER, ANSWER], "finish_reason": "length"}).messages
    assert [message.get("finish_reason") for message in messages] == [None, None, None, "length"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": []}, "no messages"),
        ({"messages": [], "response": "x"}, "no messages"),
        ({"prompt": ["x"], "response": "y"}, "a message is text, not an object"),
        ({"text": "x"}, "none of `messages`"),
        ({"messages": "x"}, "`messages` is text, not a list"),
        ({"messages": ["x"]}, "a message is text, not an object"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "unknown role 'wizard'"),
        ({"messages": [{"content": "x"}]}, "unknown role None"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "unknown role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "a part that is not text (image_url)"),
        ({"messages": [{"role": "user", "content": {"text": "x"}}]}, "content is an object, not text"),
        ({"messages": [{"role": "user", "text": "x"}]}, "a message of role user without content"),
        ({"messages": [{"role": "user", "content": None}]}, "a message of role user without content"),
        ({"messages": [USER, {"role": "assistant"}]}, "a message of role assistant without content"),
        ({"messages": "[1"}, "messages: malformed JSON"),
        ({"prompt": None}, "none of `messages`"),
        ({"conversations": [{"from": "function_call", "value": "get it"}]}, "tool_calls: malformed JSON"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
        ({"turns": [1]}, "a prompt or user turn is a int"),
        (call_row({"function": {"name": "f", "arguments": '{"a": '}}), "tool call arguments: malformed JSON"),
        (call_row({"function": {"name": "f", "arguments": "[1]"}}), "tool call arguments are a list"),
        (call_row({"function": {"arguments": {}}}), "without a function name"),
        (call_row("f"), "without a function name"),
        (call_row({"name": "f"}, "{"), "tools: malformed JSON"),
        (call_row({"name": "f"}, [1]), "a tool is not an object"),
        (call_row({"name": "f"}, {"f": {}}), "a tool without a function name"),
        (call_row({"name": "f", "arguments": '"text"'}), "tool call arguments are text"),
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
