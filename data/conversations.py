"""What rows of chat data look like, and which cannot be used, with the reason.

Four shapes are read: OpenAI `messages`, ShareGPT `conversations`, `prompt` (with or without `response`) and
`turns` (user turns alone). All become the one spelling that chat templates are rendered with: text content,
tool calls with `arguments` as an object, tools as a list. What is not understood is a reason, never left out.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafthead.data.errors import InputError
from drafthead.data.files import digest

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
OPENAI_ROLES = {**{role: role for role in ROLES}, "function": "tool"}
CALLS = ("function_call", "tool_call")
"""ShareGPT speakers whose text is a call, or a list of calls, as JSON."""
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
    **dict.fromkeys(CALLS, "assistant"),
    **OPENAI_ROLES,
}
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message's reasoning."""
SYSTEM_COLUMNS = ("system", "system_prompt")
LISTS = ("messages", "conversations", "conversation", "turns")
SHAPES = "`messages`, `conversations`, `prompt` or `turns`"
REMEDY = f"give JSONL, one object with {SHAPES} a line"


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One usable row; `messages` and `tools` are spelled as a chat template expects them.

    An assistant message may carry `finish_reason` and `weight` (0: not to be trained on), which no template sees.
    """

    id: str
    source: str
    domain: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None


@dataclass(frozen=True)
class Dropped:
    """One row that was left out; `source` is its number in the file, from 0."""

    source: int
    reason: str


class _RowError(Exception):
    """The row cannot be used; the text is the reason, without the row's number so that equal ones count."""


def parse_conversation(row: dict[str, Any], *, number: int, source: str) -> Conversation:
    """Read one row in any of the four shapes.

    Raises:
        InputError: The row cannot be used; says which row and why.
    """
    try:
        return _parse_row(row, source)
    except _RowError as error:
        raise InputError(f"{source} row {number}: {error}") from None


def parse_rows(rows: Iterator[tuple[int, Any]], source: str) -> tuple[list[tuple[int, Conversation]], list[Dropped]]:
    """Parse numbered rows; a row that is an exception counts as dropped for that reason."""
    kept: list[tuple[int, Conversation]] = []
    dropped: list[Dropped] = []
    for number, row in rows:
        try:
            if isinstance(row, _RowError):
                raise row
            kept.append((number, _parse_row(row, source)))
        except _RowError as error:
            dropped.append(Dropped(number, str(error)))
    return kept, dropped


def read_numbered(path: Path, source: str) -> tuple[list[tuple[int, Conversation]], list[Dropped]]:
    """Read a file of conversations, with the row number of each.

    Raises:
        InputError: What `parse_file` raises, or not one usable row.
    """
    kept, dropped = parse_file(path, source)
    if not kept:
        reason = dropped[0].reason if dropped else "the list is empty"
        raise InputError(f"{path}: no samples remain, {len(dropped)} rows dropped; the first: {reason}")
    return kept, dropped


def parse_file(path: Path, source: str) -> tuple[list[tuple[int, Conversation]], list[Dropped]]:
    """Parse a JSONL file, or a `.json` file that holds a list; perhaps not one row of it can be used.

    Raises:
        InputError: No such file, a directory, not UTF-8, or empty; names the remedy.
    """
    text = _read_text(path)
    if not text.strip():
        raise InputError(f"{path}: empty file; {REMEDY}")
    return parse_rows(_rows_of(text), source)


def read_conversations(path: Path, source: str) -> tuple[list[Conversation], list[Dropped]]:
    """Read a file of conversations; see `read_numbered` for what is raised."""
    numbered, dropped = read_numbered(path, source)
    return [conversation for _, conversation in numbered], dropped


# ---- files -----------------------------------------------------------------------------------------------


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; {REMEDY}") from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a directory; give one file of it") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text (byte {error.start}); {REMEDY}") from None


def _rows_of(text: str) -> Iterator[tuple[int, Any]]:
    if text.lstrip().startswith("["):
        whole = _parse_json(text, "the list")
        yield from enumerate(whole) if isinstance(whole, list) else [(0, whole)]
        return
    # not splitlines(): JSON strings may hold U+2028 and the like
    for number, line in enumerate(text.split("\n")):
        if line.strip():
            yield number, _parse_json(line, f"line {number + 1}")


def _parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        return _RowError(f"{where}: not valid JSON ({error.msg} at column {error.colno})")
    except (ValueError, RecursionError) as error:
        return _RowError(f"{where}: not usable JSON ({error})")


# ---- rows ------------------------------------------------------------------------------------------------


def _parse_row(row: Any, source: str) -> Conversation:
    if not isinstance(row, dict):
        raise _RowError(f"a row is an object with {SHAPES}, this is {_kind(row)}")
    _check_unicode(row)
    messages = [_parse_message(value) for value in _raw_messages(row)]
    if not messages:
        raise _RowError("no messages")
    messages = _with_system(messages, row)
    _mark_finish_reason(messages, row.get("finish_reason"))
    tools = _parse_tools(row.get("tools") or row.get("functions"))
    name = row.get("id")
    domain = row.get("domain") or row.get("category")
    return Conversation(
        id=name if isinstance(name, str) and name else content_id(messages, tools),
        source=source,
        domain=domain if isinstance(domain, str) else "all",
        messages=messages,
        tools=tools,
    )


def content_id(messages: list[Message], tools: list[dict[str, Any]] | None) -> str:
    """An id that depends on the content alone, not on the row's place."""
    return digest({"messages": messages, "tools": tools})


def _check_unicode(row: dict[str, Any]) -> None:
    try:
        json.dumps(row, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise _RowError("text with half a surrogate pair") from None


def _raw_messages(row: dict[str, Any]) -> list[Any]:
    found = next((key for key in LISTS if row.get(key) is not None), None)
    if found is None and row.get("prompt") is None:
        raise _RowError(f"none of {SHAPES} in the row")
    given = row[found] if found else row["prompt"]
    if found and isinstance(given, str) and given.lstrip().startswith("["):
        given = _decode(given, found)
    if found and not isinstance(given, list):
        raise _RowError(f"`{found}` is {_kind(given)}, not a list")
    if found == "turns":
        return [_user_turn(value) for value in given]
    messages = given if isinstance(given, list) else [_user_turn(given)]
    answer = next((row[key] for key in ("response", "completion") if row.get(key) is not None), None)
    if answer is None or not messages or _is_answered(messages):
        return messages
    return [*messages, *(answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}])]


def _is_answered(messages: list[Any]) -> bool:
    """Whether the list ends with an answer, which a `response` beside it repeats."""
    last = messages[-1]
    return isinstance(last, dict) and _parse_role(last) == "assistant"


def _user_turn(text: Any) -> Message:
    if not isinstance(text, str):
        raise _RowError(f"a prompt or user turn is {_kind(text)}, not text")
    return {"role": "user", "content": text}


def _with_system(messages: list[Message], row: dict[str, Any]) -> list[Message]:
    """Put the system prompt that a row holds beside its messages in front of them."""
    texts = [row[key] for key in SYSTEM_COLUMNS if isinstance(row.get(key), str) and row[key].strip()]
    if not texts or messages[0]["role"] in ("system", "developer"):
        return messages
    return [{"role": "system", "content": texts[0]}, *messages]


def _mark_finish_reason(messages: list[Message], reason: Any) -> None:
    """A row's `finish_reason` belongs to its last answer."""
    if isinstance(reason, str) and messages[-1]["role"] == "assistant":
        messages[-1].setdefault("finish_reason", reason)


def _parse_message(value: Any) -> Message:
    if not isinstance(value, dict):
        raise _RowError(f"a message is {_kind(value)}, not an object")
    role = _parse_role(value)
    given = value.get("content", value.get("value"))
    calls = value.get("tool_calls") or value.get("function_call")
    if "role" not in value and str(value["from"]).lower() in CALLS:
        given, calls = None, given
    # a server may answer with one of these and null under another
    reasoning = next((value[key] for key in REASONING if value.get(key) is not None), None)
    may_be_null = role in ("assistant", "tool") and bool({"content", "value"} & value.keys())
    if given is None and not (may_be_null or calls or reasoning):
        raise _RowError(f"a message of role {role} without content")
    message: Message = {"role": role, "content": _text(given)}
    if reasoning is not None:
        message["reasoning_content"] = _text(reasoning, "reasoning_content")
    if calls and (parsed := _parse_tool_calls(calls)):
        message["tool_calls"] = parsed
    for key in ("tool_call_id", "name", "finish_reason"):
        if isinstance(value.get(key), str):
            message[key] = value[key]
    if isinstance(value.get("weight"), int | float):
        message["weight"] = value["weight"]
    return message


def _parse_role(value: dict[str, Any]) -> str:
    if "role" in value:
        role, known = value["role"], OPENAI_ROLES
    else:
        role, known = value.get("from"), SHAREGPT_ROLES
        role = role.lower() if isinstance(role, str) else role
    if not isinstance(role, str) or role not in known:
        raise _RowError(f"unknown role {role!r}; known are {', '.join(known)}")
    return known[role]


def _text(value: Any, field: str = "content") -> str:
    """Text, or the text of a list of text parts, which a server joins by line breaks."""
    if value is None:
        return ""
    if isinstance(value, list):
        return "\n".join(_part(part, field) for part in value)
    if not isinstance(value, str):
        raise _RowError(f"{field} is {_kind(value)}, not text")
    return value


def _part(part: Any, field: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, dict) else _kind(part)
        raise _RowError(f"{field} holds a part that is not text ({kind}); only text is trained on")
    return str(part["text"])


def _parse_tool_calls(value: Any) -> list[dict[str, Any]]:
    calls = _decode(value, "tool_calls")
    calls = [calls] if isinstance(calls, dict) else calls or []
    if not isinstance(calls, list):
        raise _RowError(f"tool_calls is {_kind(calls)}, not a list")
    return [_parse_tool_call(call) for call in calls]


def _parse_tool_call(value: Any) -> dict[str, Any]:
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _RowError("a tool call without a function name")
    arguments = _decode(function.get("arguments") or {}, "tool call arguments")
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise _RowError(f"tool call arguments are {_kind(arguments)}, not an object")
    call: dict[str, Any] = {"id": value["id"]} if isinstance(value.get("id"), str) else {}
    return {**call, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _parse_tools(value: Any) -> list[dict[str, Any]] | None:
    tools = _decode(value, "tools") if value else None
    if not tools:
        return None
    tools = [tools] if isinstance(tools, dict) else tools
    if not isinstance(tools, list):
        raise _RowError(f"tools is {_kind(tools)}, not a list")
    return [_parse_tool(_decode(tool, "tools")) for tool in tools]


def _parse_tool(tool: Any) -> dict[str, Any]:
    """A function as a server's API has it; data sets also hold the bare function."""
    if not isinstance(tool, dict):
        raise _RowError("a tool is not an object")
    function = tool.get("function", tool)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _RowError("a tool without a function name")
    return tool if "function" in tool else {"type": "function", "function": tool}


def _decode(value: Any, field: str) -> Any:
    """Data sets store nested values as objects or as JSON text; read both."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise _RowError(f"{field}: malformed JSON") from None


def _kind(value: Any) -> str:
    names = {"str": "text", "list": "a list", "dict": "an object", "NoneType": "null", "bool": "a boolean"}
    return names.get(type(value).__name__, f"a {type(value).__name__}")
