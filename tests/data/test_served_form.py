"""Messages and tools as vLLM's server hands them to a template, held against vLLM's own code where it is installed."""

import pytest
from drafthead.data.served_form import served_messages, served_tools, variables_read

LOOP = "{% for m in messages %}{{ m.role }}:{% for part in m.content %}{{ part.text }}{% endfor %};{% endfor %}"
PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}{% if thinking is defined %}{% endif %}"
USER = {"role": "user", "content": "hi"}
TEMPLATES = {
    "plain": PLAIN,
    "loop": LOOP,
    "loop-over-item": LOOP.replace("m.content", "m['content']"),
    "loop-over-slice": LOOP.replace("m.content", "m.content[1:]"),
    "loop-over-filter": LOOP.replace("m.content", "m.content | list"),
    "loop-over-name": PLAIN.replace(
        "{{ m.content }}", "{% set content = m.content %}{% for c in content %}{% endfor %}"
    ),
    "loop-over-macro-parameter": "{% macro show(given) %}{% for part in given %}{{ part }}{% endfor %}{% endmacro %}"
    + PLAIN.replace("{{ m.content }}", "{{ show(m.content) }}"),
    "loop-over-macro-keyword": "{% macro show(a, given) %}{% for part in given %}{{ part }}{% endfor %}{% endmacro %}"
    + PLAIN.replace("{{ m.content }}", "{{ show(1, given=m['content']) }}"),
    "other-macro": "{% macro show(given) %}{% for part in given %}{{ part }}{% endfor %}{% endmacro %}"
    + PLAIN.replace("{{ m.content }}", "{{ m.content }}{{ show(m.tool_calls) }}"),
    "other-loop": PLAIN.replace("{{ m.content }}", "{% for c in m.tool_calls %}{{ c }}{% endfor %}"),
    "generation-tag": PLAIN.replace("{{ m.content }}", "{%- generation %}{{ m.content }}{% endgeneration -%}"),
    "loop-control": PLAIN.replace("{{ m.content }}", "{% continue %}"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_content_comes_in_parts_where_the_template_loops_over_it(name):
    vllm = pytest.importorskip("vllm.renderers.hf")
    in_parts = vllm._detect_content_format(TEMPLATES[name], default="string") == "openai"
    served = served_messages([USER, {"role": "tool", "content": "4"}], TEMPLATES[name])
    assert served[0]["content"] == ([{"type": "text", "text": "hi"}] if in_parts else "hi")
    assert served[1]["content"] == "4"
    assert in_parts is (name.startswith("loop") and name != "loop-control")


def test_reasoning_has_both_names_and_our_own_keys_stay_here():
    message = {"role": "assistant", "content": "a", "reasoning_content": "r", "finish_reason": "stop", "weight": 1}
    expected = {"role": "assistant", "content": "a", "reasoning_content": "r", "reasoning": "r"}
    assert served_messages([message], PLAIN) == [expected]


def test_a_developer_is_the_system_of_templates_that_know_none():
    messages = [{"role": "system", "content": "s"}, USER, {"role": "developer", "content": "d"}]
    assert served_messages(messages, PLAIN) == [{"role": "system", "content": "s\n\nd"}, USER]
    assert served_messages(messages, PLAIN + "{# 'developer' #}") == messages
    assert served_messages([messages[0], USER, messages[0]], PLAIN) == [messages[0], USER, messages[0]]


TOOLS = [
    {"function": {"parameters": {"b": 1, "a": 2}, "name": "get", "x": 1}, "type": "function", "strict": True},
    {"type": "function", "function": {"name": "f", "strict": False, "description": "d"}},
]


def test_tools_have_the_keys_of_the_api():
    expected = [
        {"type": "function", "function": {"name": "get", "description": None, "parameters": {"b": 1, "a": 2}}},
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": None, "strict": False}},
    ]
    served = served_tools(TOOLS)
    assert str(served) == str(expected)  # the order of keys is rendered, too
    assert served_tools([]) is served_tools(None) is None
    protocol = pytest.importorskip("vllm.entrypoints.openai.chat_completion.protocol")
    assert str([protocol.ChatCompletionToolsParam(**tool).model_dump() for tool in TOOLS]) == str(expected)


def test_variables_of_a_template():
    assert variables_read(PLAIN) == {"messages", "thinking"}
