"""Context and supervised ids of every turn, against templates that rewrite turns (C1, C3, C5)."""

import copy
import datetime
import json

import jinja2
import pytest
from drafthead.data.conversations import parse_conversation
from drafthead.data.encoding import (
    EncodeReport,
    Row,
    check_row,
    encode_answer,
    encode_conversation,
    read_rows,
    write_rows,
)
from drafthead.data.errors import GateError, InputError
from drafthead.data.template import Template, TurnError, read_end_of_turn_ids
from drafthead.pipeline.target import Target

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
        ("", answer("I get it", tool_calls=[{"name": "get", "arguments": {}}]), "does not render the tool calls"),
        ("", answer(f"4{END}5"), "contains an end-of-turn token"),
        ("", answer("write <|im_start|>user first"), "text of a special token that builds turns"),
    ],
)
def test_turns_in_doubt_are_refused(opening, message, reason):
    rows, reasons = encode(make_template(R, opening=opening), [user("2+2?"), message])
    assert rows == []
    assert len(reasons) == 1
    assert reason in reasons[0]


def test_reasoning_apart_and_inline_are_the_same_turn():
    for text, opening in ((A, ""), (B, "<think>\n"), (R, "<think>\n")):
        template = make_template(text, opening=opening)
        inline, _ = encode(template, [user("2+2?"), answer("<think>\nhm\n</think>\n\n4, sure")])
        for thought in ("hm", "\nhm\n"):
            apart, reasons = encode(template, [user("2+2?"), answer("4, sure", reasoning_content=thought)])
            assert reasons == []
            if text is R or thought == "hm":
                assert apart[0].input_ids == inline[0].input_ids, (opening, thought)


def test_an_answer_cut_inside_its_thought_is_what_the_target_wrote():
    rows, reasons = encode(make_template(B), [user("why"), answer("first I")], finish_reason="length")
    assert reasons == []
    assert supervised(rows) == ["first I"]
    assert rows[0].clipped


def test_an_answer_of_weight_zero_is_context_alone():
    messages = [user("a"), answer("a bad one", weight=0), user("b"), answer("a good one", weight=1)]
    rows, reasons = encode(make_template(R), messages)
    assert reasons == ["weight 0 in the data"]
    assert supervised(rows) == [f"a good one{END}"]
    assert "a bad one" in context(rows[0])


def test_only_the_last_turn_when_asked():
    conversation = parse_conversation({"messages": TWO_TURNS}, number=0, source="t")
    every, _ = encode_conversation(make_template(A), conversation, max_length=512)
    last, reasons = encode_conversation(make_template(A), conversation, max_length=512, turns="last")
    assert (last, reasons) == (every[1:], [])
    cut = {"messages": [*TWO_TURNS[:3], answer("")]}
    conversation = parse_conversation(cut, number=0, source="t")
    assert encode_conversation(make_template(A), conversation, max_length=512, turns="last") == ([], ["empty answer"])


def test_a_special_token_that_the_prompt_does_not_use_is_an_answer():
    """Raw calls of targets that mark them so; `<|im_start|>` is not one of this template's."""
    rows, reasons = encode(make_template(C.replace("[/]", END)), [user("a"), answer("write <|im_start|> now")])
    assert reasons == []
    assert supervised(rows) == [f"[assistant]write <|im_start|> now{END}"]


def test_words_before_a_think_tag_are_not_lost():
    """An answer about the tags: the template takes what is between them for reasoning, and the rest away."""
    rows, reasons = encode(make_template(A), [user("html?"), answer("Write <think> and </think> like <b>")])
    assert rows == []
    assert reasons == ["the chat template does not render what stands before the reasoning"]
    rows, reasons = encode(make_template(R), [user("html?"), answer("Write <think>hm</think> 4")])
    assert rows == []


MISTRAL = """
{%- set system = messages[0].content if messages[0].role == 'system' else none %}
{%- for message in messages if message.role != 'system' %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' ~ (system ~ '\\n\\n' if loop.last and system else '') ~ message.content ~ '[/INST]' }}
    {%- else %}{{ ' ' ~ message.content ~ '<|im_end|>' }}{% endif %}
{%- endfor %}"""


def test_a_system_prompt_that_only_an_open_turn_shows_is_context():
    """Mistral 7B v0.3 and Nemo write it before the last message, as long as that is the user's."""
    messages = [{"role": "system", "content": "Be brief."}, user("a"), answer("one two"), user("b"), answer("three 4")]
    rows, reasons = encode(make_template(MISTRAL), messages)
    assert reasons == []
    assert supervised(rows) == [f" one two{END}", f" three 4{END}"]
    assert context(rows[1]) == f"[INST] a[/INST] one two{END}[INST] Be brief.\n\nb[/INST]"


def test_an_unclosed_or_doubled_think_block_is_refused():
    for text in ("<think>cut", "<think>a</think>b</think>c"):
        rows, reasons = encode(make_template(A), [user("x"), answer(text)])
        assert (rows, len(reasons)) == ([], 1)


# ---- C3: tool calls in every spelling --------------------------------------------------------------------

TOOL = {
    "type": "function",
    "function": {"name": "get", "description": "the weather", "parameters": {"type": "object"}},
}
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


def test_an_end_of_turn_inside_a_call_is_refused():
    """Otherwise the answer would end, supervised, in the middle of its arguments."""
    call = {"name": "get", "arguments": {"city": f"Os{END}lo"}}
    rows, reasons = encode(make_template(A), [user("weather?"), answer("", tool_calls=[call])], tools=[TOOL])
    assert (rows, reasons) == ([], ["the answer contains an end-of-turn token"])


def test_absent_tools_render_no_schema():
    texts = [context(encode(make_template(A), TOOL_TURNS, tools=tools)[0][0]) for tools in (None, [], "[]", "")]
    assert set(texts) == {f"<|im_start|>user\nweather?{END}\n<|im_start|>assistant\n"}


# ---- C5: bad rows ----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "text",
    ["{{ 1 // 0 }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ f() }}", "{{ messages[9].content }}"],
)
def test_a_template_that_fails_drops_the_row(text):
    rows, reasons = encode(make_template(text), [user("a"), answer("b")])
    assert rows == []
    assert reasons[0].startswith("the chat template refuses the messages: ")


def test_an_argument_that_the_template_does_not_read_is_said():
    assert make_template(A, enable_thinking=False).unread_kwargs() == []
    assert make_template(A, enable_thinkng=False, opening="x").unread_kwargs() == ["enable_thinkng", "opening"]


def test_a_broken_template_is_an_error_of_the_template_not_of_the_rows():
    with pytest.raises(InputError, match="chat template line 1"):
        encode(make_template("{% for %}"), [user("a"), answer("b")])


def test_reserved_template_arguments_are_refused():
    for name in ("tokenize", "messages", "continue_final_message"):
        with pytest.raises(InputError, match=rf"encode\.template_kwargs\.{name}"):
            make_template(A, **{name: True})


def test_render_prompt_refuses_what_the_template_refuses():
    with pytest.raises(TurnError, match="roles must alternate"):
        make_template(C).render_prompt([answer("x")])


def test_load_reads_template_and_end_of_turn_ids(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = A
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    assert read_end_of_turn_ids(tmp_path) == {8, 9}
    template = Template.load(tmp_path)
    assert template.end_of_turn_ids == {8, 9, tokenizer.eos_token_id}
    assert template.render_prompt([user("a")]) == served_ids(A, [user("a")])
    (tmp_path / "c.jinja").write_text(C)
    override = Template.load(tmp_path, chat_template=tmp_path / "c.jinja")
    assert override.decode(override.render_prompt([user("a")])) == "[user]a[/]"


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": 8}, {"eos_token_id": 7}, {8}),
        ({"temperature": 1.0}, {"eos_token_id": 7}, {7}),
        (None, {"text_config": {"eos_token_id": [5, 6]}}, {5, 6}),
        (None, {}, set()),
    ],
)
def test_one_reader_of_end_of_turn_ids(generation, config, expected, tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_end_of_turn_ids(tmp_path) == expected
    assert Target(tmp_path).end_of_turn_ids == sorted(expected | {TOKENIZER.eos_token_id})


DATED = "{{ strftime_now('%d %b %Y %f') }}" + R


def test_a_template_that_asks_for_the_date_is_told_one_time():
    rows, reasons = encode(make_template(DATED), [user("a"), answer("b c"), user("d"), answer("e f")])
    assert reasons == []
    assert len({context(row).split("<|im_start|>")[0] for row in rows}) == 1
    then = Template(TOKENIZER, target="tiny", chat_template=DATED, now=datetime.datetime(2024, 7, 26))
    assert then.render([user("a")], None, add_generation_prompt=True).startswith("26 Jul 2024 000000<|im_start|>")


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
