"""How a server renders a conversation, and which text the target writes after that prompt.

The prompt of a turn is rendered as vLLM does it (vllm/renderers/hf.py; what its API makes of messages first is in
`served_form.py`): the messages before the turn, with the generation prompt, to text, then to ids without special
tokens added. The answer of the turn is what the render of the messages up to and with the turn has after that prompt.
Some templates make the two disagree (they rewrite turns, pre-fill a think block, or leave the scaffold of the prompt
out of finished turns); then the message itself decides, and a turn that stays in doubt is refused with a reason.
"""

import datetime
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jinja2
from drafthead.data.conversations import Message
from drafthead.data.errors import InputError
from drafthead.data.files import read_json
from drafthead.data.served_form import served_messages, served_tools, variables_read
from transformers import AutoTokenizer, PreTrainedTokenizerBase

THINK, END_THINK = "<think>", "</think>"
CLOSED_SCAFFOLD = re.compile(r"\s*(<think>\s*</think>\s*)?")
PROGRAM_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
PROBE = "drafthead-probe-of-an-answer"
RESERVED_KWARGS = {
    "chat_template",
    "tokenize",
    "tools",
    "messages",
    "strftime_now",
    "conversation",
    "add_generation_prompt",
    "continue_final_message",
    "return_dict",
    "return_tensors",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "padding",
    "truncation",
    "max_length",
}
Tools = list[dict[str, Any]] | None


class TurnError(Exception):
    """An assistant turn that cannot be trained on; the text is the reason."""


class Template:
    """A target's tokenizer and chat template, used exactly as its server uses them.

    Raises:
        InputError: The target has no chat template, or the template's arguments cannot be used.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        target: str,
        chat_template: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
        end_of_turn_ids: Iterable[int] = (),
        now: datetime.datetime | None = None,
    ):
        """`now`: what a template that asks for the date is told; the time of this call unless given."""
        if chat_template is None and not tokenizer.chat_template:
            raise InputError(
                f"{target}: its tokenizer has no chat template; add chat_template.jinja to that folder "
                "or give one with --chat-template"
            )
        self.tokenizer = tokenizer
        self.target = target
        self.chat_template = chat_template
        self.template_kwargs = dict(template_kwargs or {})
        # one time for all prompts: renderings are compared, and a run goes on after midnight
        self.now = now or datetime.datetime.now()
        if reserved := RESERVED_KWARGS & self.template_kwargs.keys():
            raise InputError(f"encode.template_kwargs.{min(reserved)}: set by the server, not by a request")
        eos = tokenizer.eos_token_id
        added = {token: text for token, text in tokenizer.added_tokens_decoder.items() if text.special}
        self.special_texts = {token: str(text) for token, text in added.items() if str(text) not in (THINK, END_THINK)}
        self.end_of_turn_ids = frozenset(end_of_turn_ids) | ({eos} if isinstance(eos, int) else set())

    @classmethod
    def load(
        cls,
        target: Path,
        *,
        chat_template: Path | None = None,
        template_kwargs: dict[str, Any] | None = None,
        now: datetime.datetime | None = None,
    ) -> "Template":
        """Read tokenizer, template and end-of-turn ids from the target's folder.

        Raises:
            InputError: The tokenizer or the template file cannot be read.
        """
        try:
            tokenizer = AutoTokenizer.from_pretrained(target)
        except (OSError, ValueError, KeyError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise InputError(f"{target}: no tokenizer that can be loaded ({reason[:200]})") from None
        template = cls(
            tokenizer,
            target=str(target),
            chat_template=None if chat_template is None else _read_template(chat_template),
            template_kwargs=template_kwargs,
            end_of_turn_ids=read_end_of_turn_ids(target),
            now=now,
        )
        if unread := template.unread_kwargs():
            print(
                f"WARNING: encode.template_kwargs.{', '.join(unread)}: the chat template of {target} does not read it; "
                f"a server ignores it too",
                file=sys.stderr,
            )
        return template

    def unread_kwargs(self) -> list[str]:
        """Template arguments that change nothing, for the template has no variable of that name."""
        texts = [self.chat_template or self.tokenizer.chat_template]
        texts = list(texts[0].values()) if isinstance(texts[0], dict) else texts
        try:
            read = {name for text in texts for name in variables_read(text)}
        except jinja2.TemplateSyntaxError:  # named with its line where the template is used
            return []
        return sorted(self.template_kwargs.keys() - read)

    def render(self, messages: list[Message], tools: Tools, *, add_generation_prompt: bool) -> str:
        """Render to text.

        Raises:
            TurnError: The template refuses these messages.
            InputError: The template itself is not valid.
        """
        try:
            served = served_tools(tools)
            chosen = self.tokenizer.get_chat_template(self.chat_template, served)
            text = self.tokenizer.apply_chat_template(
                served_messages(messages, chosen),
                tools=served,
                chat_template=chosen,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                # under the name of the function that transformers gives to templates
                strftime_now=self.now.strftime,
                **self.template_kwargs,
            )
        except jinja2.TemplateSyntaxError as error:
            raise InputError(f"{self.target}: chat template line {error.lineno}: {error.message}") from None
        # a template is a program: on messages that it was not written for it fails in any of these ways
        except (jinja2.TemplateError, *PROGRAM_ERRORS) as error:
            raise TurnError(f"the chat template refuses the messages: {error}") from None
        assert isinstance(text, str)
        return text

    def tokenize(self, text: str) -> list[int]:
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        # transformers 5 returns dicts and batches where earlier versions returned lists
        assert isinstance(ids, list), type(ids)
        assert all(isinstance(token, int) for token in ids), ids[:3]
        return ids

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def render_prompt(self, messages: list[Message], tools: Tools = None) -> list[int]:
        """Return the ids that a server makes of these messages before it answers.

        Raises:
            TurnError: The template refuses these messages.
        """
        return self.tokenize(self.render(messages, tools, add_generation_prompt=True))


def read_end_of_turn_ids(target: Path) -> set[int]:
    """Ids at which a server stops, beside the tokenizer's own: generation_config.json's, else config.json's."""
    for name in ("generation_config.json", "config.json"):
        path = target / name
        config = read_json(path) if path.is_file() else {}
        ids = config.get("eos_token_id", (config.get("text_config") or {}).get("eos_token_id"))
        if ids is not None:
            return {ids} if isinstance(ids, int) else set(ids)
    return set()


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not a chat template that can be read ({error})") from None


# ---- the answer of a turn --------------------------------------------------------------------------------


def served_turn(template: Template, messages: list[Message], index: int, tools: Tools) -> tuple[str, str]:
    """Return (prompt, answer) of assistant turn `index` as text; the answer ends with all the template adds.

    Raises:
        TurnError: The template refuses the messages, or what the target writes here is in doubt.
    """
    message = messages[index]
    prompt = template.render(messages[:index], tools, add_generation_prompt=True)
    full = template.render(messages[: index + 1], tools, add_generation_prompt=False)
    if (raw := _text_after_open_think(prompt, full, message)) is not None:
        answer = raw + ending_of(template, messages, index, tools)
    elif full.startswith(prompt):
        answer = full[len(prompt) :]
    else:
        answer = _text_after_scaffold(template, messages, index, tools, prompt, full)
    _check_round_trip(answer, message)
    return prompt, answer


def ending_of(template: Template, messages: list[Message], index: int, tools: Tools) -> str:
    """What the template writes after the text of an answer: end of turn and trailing scaffold."""
    return _probe(template, messages, index, tools)[1]


def _probe(template: Template, messages: list[Message], index: int, tools: Tools) -> tuple[str, str]:
    """Render the turn with a known answer; return the text before and after it."""
    probe = {"role": "assistant", "content": PROBE}
    text = template.render([*messages[:index], probe], tools, add_generation_prompt=False)
    before, found, after = text.rpartition(PROBE)
    if not found:
        raise TurnError("the chat template does not render the answer")
    return before, after


def _text_after_open_think(prompt: str, full: str, message: Message) -> str | None:
    """The message's own text, where it is what the target wrote after a pre-filled `<think>`.

    An answer with only the closing tag is raw output, for the opening tag came from the prompt; so is one without
    tags that was cut, for it never came to its closing tag. With both tags, or with the reasoning apart, the
    template's render is used, unless it left the reasoning out.
    """
    content = str(message["content"])
    thought = message.get("reasoning_content")
    if not prompt.rstrip().endswith(THINK) or message.get("tool_calls"):
        return None
    if thought:
        # as these targets write it, and as their reasoning parsers split it
        is_lost = END_THINK not in content and not full.startswith(prompt)
        return f"{thought.strip()}\n{END_THINK}\n\n{content.lstrip()}" if is_lost else None
    if END_THINK not in content:
        return content if message.get("finish_reason") == "length" and THINK not in content else None
    if THINK not in content:
        return content
    opener = prompt[prompt.rindex(THINK) :]
    if full.startswith(prompt) or not content.startswith(THINK):
        return None
    return content.removeprefix(opener if content.startswith(opener) else THINK)


def _text_after_scaffold(
    template: Template, messages: list[Message], index: int, tools: Tools, prompt: str, full: str
) -> str:
    """The answer where the finished turn does not begin with the served prompt.

    Either the prompt ends in scaffold that finished turns do not show (an empty think block), or what comes before the
    last message is written otherwise once that is answered (Mistral: the system prompt, the tools). The context is the
    served prompt either way; what stands between the last message and the answer must be the same.
    """
    if _reasoning_of(messages[index]):
        raise TurnError("the answer holds reasoning that does not follow the served prompt")
    before, _ = _probe(template, messages, index, tools)
    if not full.startswith(before):
        raise TurnError("the chat template rewrites the history when the answer is added")
    given, shown = prompt.removeprefix(before), ""
    if not prompt.startswith(before):
        given, shown = (
            _after_last_message(prompt, messages[index - 1]),
            _after_last_message(before, messages[index - 1]),
        )
    if shown.startswith(given) and not shown[len(given) :].strip():
        return full[len(before) - len(shown) + len(given) :]  # white space that the target writes itself
    if not given.startswith(shown) or not CLOSED_SCAFFOLD.fullmatch(given[len(shown) :]):
        raise TurnError("the served prompt ends in text that the finished turn does not show")
    return full[len(before) :]


def _after_last_message(text: str, message: Message) -> str:
    """What a rendered text ends in, behind the message."""
    said = message["content"].strip()
    if not said or said not in text:
        raise TurnError("the chat template rewrites the history when the answer is added")
    return text[text.rindex(said) + len(said) :]


def _reasoning_of(message: Message) -> str:
    thought = message["content"].rpartition(END_THINK)[0].split(THINK)[-1]
    return str(message.get("reasoning_content") or thought).strip()


def _before_reasoning(message: Message) -> str:
    """What an answer says before it opens a think block, as texts about such tags do."""
    before, tag, _ = message["content"].partition(THINK)
    return str(before).strip() if tag else ""


def answer_of(message: Message) -> str:
    """The text that a user sees: the content after its reasoning."""
    return str(message["content"].rpartition(END_THINK)[2]).strip()


def _check_round_trip(answer: str, message: Message) -> None:
    """Refuse an answer in which the template lost or doubled part of the message."""
    if answer_of(message) not in answer:
        raise TurnError("the chat template does not render the answer")
    if _reasoning_of(message) not in answer:
        raise TurnError("the chat template does not render the reasoning")
    if _before_reasoning(message) not in answer:
        raise TurnError("the chat template does not render what stands before the reasoning")
    if not _shows_calls(answer, message):
        raise TurnError("the chat template does not render the tool calls")
    closed = message["content"].count(END_THINK)
    # without a closing tag of its own an answer may get one block from the template
    allowed = (closed,) if closed or THINK in message["content"] else (0, 1)
    if answer.count(END_THINK) not in allowed:
        raise TurnError("the chat template does not keep the think tags of the answer")


def _shows_calls(answer: str, message: Message) -> bool:
    """Whether each call's name is there beyond what is said in words, and with it the text of its arguments."""
    said = f"{message['content']}{message.get('reasoning_content', '')}"
    calls = [call["function"] for call in message.get("tool_calls", [])]
    names = [call["name"] for call in calls]
    texts = [text for call in calls for text in _texts_in(call["arguments"])]
    return all(answer.count(name) >= said.count(name) + names.count(name) for name in names) and all(
        any(spelt in answer for spelt in _spellings(text)) for text in texts
    )


def _texts_in(value: Any) -> Iterator[str]:
    """Keys, texts and whole numbers in arguments; other values have too many spellings."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _texts_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts_in(inner)
    elif isinstance(value, str) or type(value) is int:
        yield str(value).strip()


def _spellings(text: str) -> set[str]:
    """As it is, inside JSON, and inside JSON that is text in JSON."""
    found = {text}
    for is_ascii in (False, True):
        once = json.dumps(text, ensure_ascii=is_ascii)[1:-1]
        found |= {once, json.dumps(once, ensure_ascii=is_ascii)[1:-1]}
    return found
