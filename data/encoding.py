"""Which tokens are context and which are supervised (`MaskGate`): one row per assistant turn.

The context of a row is the prompt that a server renders for that turn, id by id. Supervised is what the
target writes after it, end of turn included. Prompt and answer are not tokenised as one text when that would
change the prompt's ids, for a server generates after them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from drafthead.data.conversations import Conversation, Message
from drafthead.data.errors import GateError, InputError
from drafthead.data.files import write_atomically
from drafthead.data.template import (
    Template as Template,
)
from drafthead.data.template import (
    Tools,
    TurnError,
    answer_of,
    ending_of,
    served_turn,
)

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("domain", pa.string()),
        ("turn", pa.int32()),
        ("input_ids", pa.list_(pa.int32())),
        ("context_length", pa.int32()),
        ("clipped", pa.bool_()),
    ]
)
Turns = Literal["all", "last"]
"""Which assistant turns of a conversation are trained on."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One assistant turn: context ids, then the supervised ids."""

    id: str
    source: str
    domain: str
    turn: int
    """Index among the assistant turns of its conversation."""
    input_ids: list[int]
    context_length: int
    clipped: bool
    """The answer was cut, by `max_length` or when it was written; its end of turn is missing."""

    @property
    def key(self) -> str:
        """Name of the row, unique in its split."""
        return f"{self.id}/{self.turn}"

    @property
    def loss_mask(self) -> list[int]:
        return [0] * self.context_length + [1] * (len(self.input_ids) - self.context_length)


@dataclass
class EncodeReport:
    """How many rows were kept, how many of those are clipped, and why the others were dropped."""

    kept: int = 0
    clipped: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def add(self, rows: Iterable[Row], reasons: Iterable[str]) -> None:
        for row in rows:
            self.kept += 1
            self.clipped += row.clipped
        self.dropped.update(reasons)

    @property
    def total(self) -> int:
        return self.kept + self.dropped.total()

    def as_json(self) -> dict[str, Any]:
        return {
            "kept": self.kept,
            "clipped": self.clipped,
            "dropped": dict(self.dropped),
            "total": self.total,
        }

    def require_samples(self, where: str) -> None:
        """Raises `InputError` with the reasons when nothing was kept."""
        if self.kept:
            return
        reasons = "; ".join(f"{reason} ({number})" for reason, number in self.dropped.most_common(5))
        raise InputError(f"{where}: no samples remain of {self.total}: {reasons or 'there are none'}")


# ---- rows ------------------------------------------------------------------------------------------------


def encode_conversation(
    template: Template, conversation: Conversation, *, max_length: int, turns: Turns = "all"
) -> tuple[list[Row], list[str]]:
    """Encode each assistant turn, or the last alone; return the rows, and a reason for every turn that gave none."""
    made = [one for _, one in encode_turns(template, conversation, max_length=max_length, turns=turns)]
    return [one for one in made if isinstance(one, Row)], [one for one in made if isinstance(one, str)]


def encode_turns(
    template: Template, conversation: Conversation, *, max_length: int, turns: Turns = "all"
) -> Iterator[tuple[int | None, Row | str]]:
    """Yield the number of each assistant turn with its row, or with the reason why there is none.

    A conversation without assistant turns yields one reason without a number.
    """
    places = [place for place, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    if not places:
        yield None, "no assistant turn"
    for turn in range(len(places))[slice(None) if turns == "all" else slice(-1, None)]:
        try:
            yield turn, _encode_turn(template, conversation, turn, places[turn], max_length)
        except TurnError as error:
            yield turn, str(error)


def encode_answer(
    *,
    id: str,
    source: str,
    domain: str,
    turn: int,
    context_ids: list[int],
    completion_ids: list[int],
    finish_reason: str,
    max_length: int,
) -> Row | str:
    """Encode an answer from the ids that the engine produced; return the row, or why there is none."""
    if not completion_ids or (len(completion_ids) == 1 and finish_reason == "stop"):
        return "empty answer"
    conversation = Conversation(id=id, source=source, domain=domain, messages=[], tools=None)
    try:
        return _fit(conversation, turn, context_ids, completion_ids, finish_reason == "length", max_length)
    except TurnError as error:
        return str(error)


def _encode_turn(template: Template, conversation: Conversation, turn: int, index: int, max_length: int) -> Row:
    messages, tools = conversation.messages, conversation.tools
    message = messages[index]
    if not any(earlier["role"] == "user" for earlier in messages[:index]):
        raise TurnError("starts with an assistant turn")
    if message.get("weight") == 0:
        raise TurnError("weight 0 in the data")
    if not answer_of(message) and not message.get("tool_calls"):
        raise TurnError("empty answer")
    prompt, answer = served_turn(template, messages, index, tools)
    context_ids = template.tokenize(prompt)
    _check_own_words(template, message, context_ids)
    answer_ids, is_ended = _answer_ids(template, messages, index, tools, prompt, answer, context_ids)
    cut = message.get("finish_reason") == "length"
    if cut and is_ended:
        answer_ids = answer_ids[:-1]
    return _fit(conversation, turn, context_ids, answer_ids, cut, max_length)


def _check_own_words(template: Template, message: Message, context_ids: list[int]) -> None:
    """Refuse an answer whose text holds tokens that end turns or build them.

    A server does not write special tokens into an answer's text: the target has spelt them in ordinary ones, and which
    cannot be told from the text.
    """
    building = [template.special_texts[token] for token in template.special_texts.keys() & set(context_ids)]
    for text in (message["content"], message.get("reasoning_content", "")):
        if template.end_of_turn_ids.intersection(template.tokenize(text)):
            raise TurnError("the answer contains an end-of-turn token")
        if any(special in text for special in building):
            raise TurnError("the answer contains the text of a special token that builds turns")


def _answer_ids(
    template: Template,
    messages: list[Message],
    index: int,
    tools: Tools,
    prompt: str,
    answer: str,
    context_ids: list[int],
) -> tuple[list[int], bool]:
    """Return the ids up to the end of the turn, and whether their last one is the end-of-turn token."""
    ids = _tokenize_after(template, prompt, context_ids, answer)
    end = next((place for place, token in enumerate(ids) if token in template.end_of_turn_ids), None)
    if end is not None:
        _check_one_end(template, messages, index, tools, ids)
        return ids[: end + 1], True
    # this template ends turns with text that no server stops at; of that only the white space is scaffold
    ending = ending_of(template, messages, index, tools)
    kept_ending = "" if messages[index].get("finish_reason") == "length" else ending.rstrip()
    text = answer.removesuffix(ending) + kept_ending if answer.endswith(ending) else answer
    return _tokenize_after(template, prompt, context_ids, text), False


def _check_one_end(template: Template, messages: list[Message], index: int, tools: Tools, ids: list[int]) -> None:
    """Refuse an answer with an end-of-turn token that is not of its ending, as in the arguments of a call."""

    def count(tokens: list[int]) -> int:
        return sum(token in template.end_of_turn_ids for token in tokens)

    if count(ids) > 1 and count(ids) > count(template.tokenize(ending_of(template, messages, index, tools))):
        raise TurnError("the answer contains an end-of-turn token")


def _tokenize_after(template: Template, prompt: str, context_ids: list[int], text: str) -> list[int]:
    """Tokenise what follows the prompt; the prompt's ids stay as they are served.

    SentencePiece tokenizers put a space before the first word of a text, which an answer is not: the ids of
    the joined text are taken where they continue the prompt's.
    """
    joined = template.tokenize(prompt + text)
    if joined[: len(context_ids)] == context_ids:
        return joined[len(context_ids) :]
    return template.tokenize(text)


def _fit(
    conversation: Conversation,
    turn: int,
    context_ids: list[int],
    answer_ids: list[int],
    cut: bool,
    max_length: int,
) -> Row:
    if len(context_ids) >= max_length:
        raise TurnError("prompt longer than max_length")
    input_ids = (context_ids + answer_ids)[:max_length]
    # the first answer token comes from the target; the head drafts from the second on
    if len(input_ids) - len(context_ids) < 2:
        raise TurnError("nothing supervised: the answer has less than two tokens within max_length")
    return Row(
        id=conversation.id,
        source=conversation.source,
        domain=conversation.domain,
        turn=turn,
        input_ids=input_ids,
        context_length=len(context_ids),
        clipped=cut or len(input_ids) < len(context_ids) + len(answer_ids),
    )


def check_row(row: Row, served_prompt_ids: list[int]) -> None:
    """Hold a row against the prompt that the server renders for it.

    The first draft slot of an answer is the last position of the context: it pairs the state there with the
    answer's first token and drafts the second.

    Raises:
        GateError: `MaskGate`: the context is not the served prompt, nothing is supervised, or the first draft
            slot has no supervised token to draft.
    """
    where = f"row {row.id} turn {row.turn}"
    context_ids = row.input_ids[: row.context_length]
    if context_ids != served_prompt_ids:
        pairs = zip(context_ids, served_prompt_ids, strict=False)
        place = next((i for i, (ours, served) in enumerate(pairs) if ours != served), None)
        detail = f"lengths {len(context_ids)} and {len(served_prompt_ids)}" if place is None else f"id {place}"
        raise GateError("MaskGate", where, f"the context differs from the served prompt ({detail})")
    if not any(row.loss_mask):
        raise GateError("MaskGate", where, "nothing is supervised")
    if row.context_length < 1 or len(row.input_ids) < row.context_length + 2:
        raise GateError("MaskGate", where, "the first draft slot of the answer is not supervised")


# ---- files -----------------------------------------------------------------------------------------------


def write_rows(path: Path, rows: list[Row]) -> None:
    columns = {name: [getattr(row, name) for row in rows] for name in SCHEMA.names}
    table = pa.table(columns, schema=SCHEMA)
    write_atomically(path, lambda temporary: pq.write_table(table, temporary))


def read_rows(path: Path) -> list[Row]:
    """Read what `write_rows` wrote.

    Raises:
        InputError: No such file, or not one of ours.
    """
    try:
        table = pq.read_table(path)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; run the encode stage first") from None
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(f"{path}: not a parquet file that can be read ({error})") from None
    if table.schema.names != SCHEMA.names:
        raise InputError(f"{path}: columns {table.schema.names}, expected {SCHEMA.names}; encode again")
    return [Row(**values) for values in table.to_pylist()]


def common_opening(rows: list[Row]) -> int:
    """How many context tokens all rows share at their beginning."""
    shortest = min(row.context_length for row in rows)
    first = rows[0].input_ids
    agree = (all(row.input_ids[place] == first[place] for row in rows) for place in range(shortest))
    return next((place for place, same in enumerate(agree) if not same), shortest)
