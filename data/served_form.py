"""What vLLM's server hands to a chat template: messages and tools, spelled as its API passes them on.

Agrees with vllm/renderers/hf.py and chat_utils.py (version 0.32): text content is a list of parts where the template
loops over content; reasoning comes under both of its names; a `developer` becomes the system message of a template
that does not know that role; tools have passed through the API's schema.
"""

import functools
import re
from collections.abc import Collection
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
from drafthead.data.conversations import Message
from jinja2 import nodes

OUR_OWN = ("finish_reason", "weight")
GENERATION_TAG = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
OPTIONAL_TOOL_KEYS = ("strict", "defer_loading")


def served_messages(messages: list[Message], chat_template: str) -> list[Message]:
    """The messages as the server's template gets them.

    Raises:
        jinja2.TemplateSyntaxError: The template cannot be parsed.
    """
    served = [_served_message(message) for message in messages]
    if "'developer'" not in chat_template and '"developer"' not in chat_template:
        served = _without_developer(served)
    if _loops_over_content(chat_template):
        served = [message if message["role"] == "tool" else _in_parts(message) for message in served]
    return served


def _served_message(message: Message) -> Message:
    served = {key: value for key, value in message.items() if key not in OUR_OWN}
    if "reasoning_content" in served:
        served["reasoning"] = served["reasoning_content"]
    return served


def _without_developer(messages: list[Message]) -> list[Message]:
    """Developer messages as system ones, and then all system messages as one at the beginning."""
    if not any(message["role"] == "developer" for message in messages):
        return messages
    system = [one["content"] for one in messages if one["role"] in ("system", "developer") and one["content"]]
    others = [one for one in messages if one["role"] not in ("system", "developer")]
    return [{"role": "system", "content": "\n\n".join(system)}, *others]


def _in_parts(message: Message) -> Message:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def served_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The tools as they come out of the API's schema: its keys in its order, a missing description as null."""
    return [{"type": "function", "function": _served_function(tool)} for tool in tools] if tools else None


def _served_function(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    served = {key: function.get(key) for key in ("name", "description", "parameters")}
    return served | {key: function[key] for key in OPTIONAL_TOOL_KEYS if function.get(key) is not None}


# ---- what a template does with its variables -------------------------------------------------------------


@functools.cache
def _parsed(chat_template: str) -> nodes.Template:
    environment = jinja2.Environment(extensions=[jinja2.ext.loopcontrols])
    return environment.parse(GENERATION_TAG.sub("", chat_template))


@functools.cache
def variables_read(chat_template: str) -> frozenset[str]:
    """Names that the template reads and does not set."""
    return frozenset(jinja2.meta.find_undeclared_variables(_parsed(chat_template)))


@functools.cache
def _loops_over_content(chat_template: str) -> bool:
    tree = _parsed(chat_template)
    names = {"content", *_macro_parameters_of_content(tree)}
    return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _macro_parameters_of_content(tree: nodes.Template) -> set[str]:
    """Names under which macros are given the content of a message."""
    parameters = {macro.name: [one.name for one in macro.args] for macro in tree.find_all(nodes.Macro)}
    found: set[str] = set()
    for call in tree.find_all(nodes.Call):
        names = parameters.get(call.node.name, []) if isinstance(call.node, nodes.Name) else []
        found |= {name for name, value in zip(names, call.args, strict=False) if _is_content(value)}
        found |= {given.key for given in call.kwargs if given.key in names and _is_content(given.value)}
    return found


def _is_content(node: nodes.Node, names: Collection[str] = ()) -> bool:
    """Whether an expression is the content of a message, all of it or a part, or one of the `names` of it."""
    if isinstance(node, nodes.Filter) and node.node is not None:
        return _is_content(node.node, names)
    if isinstance(node, nodes.Getitem):
        if isinstance(node.arg, nodes.Slice):
            return _is_content(node.node, names)
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Name) and node.name in names
