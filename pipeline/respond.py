"""Respond: the target writes every assistant turn, and the engine's own token ids are kept.

    drafthead respond runs/eagle3

Notable: a conversation's next turn is asked as soon as the one before is answered, so all turns share one engine. What
is written beside an answer decides the last bits of its logits, and so now and then a token: conversations are answered
in blocks, in lockstep, and a killed stage goes on behind its last whole block. At temperature 0 it ends with what it
would have written anyway. Answers that come with the built-in prompts (`shipped.py`) are not written again.
"""

import datetime
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

import torch
from drafthead.data.conversations import Conversation, parse_conversation
from drafthead.data.errors import InputError
from drafthead.data.files import append_jsonl, read_json, read_jsonl, read_partial_jsonl, write_json, write_jsonl
from drafthead.data.template import Template, TurnError
from drafthead.eval.engine import Engine, EngineConfig, Request
from drafthead.eval.hf_engine import TransformersEngine
from drafthead.pipeline.cores import fastest_dtype
from drafthead.pipeline.progress import progress
from drafthead.pipeline.recipe import RespondConfig
from drafthead.pipeline.run_dir import Run
from drafthead.pipeline.shipped import ShippedAnswers

SPLITS = ("train", "heldout")
BLOCK_BATCHES = 4
"""Conversations of a block, in units of `respond.max_num_seqs`: at the end of a block the engine is less than full."""
RENDERED = "rendered.json"
"""When the prompts were rendered, for templates that ask for the date."""


def respond(run: Run) -> dict[str, Any]:
    """Write `answers.jsonl`, one line per assistant turn that the target wrote."""
    settings = run.recipe.respond
    folder = run.folder("respond")
    if settings.engine == "off":
        report = {"engine": "off", "answers": 0}
        write_json(folder / "report.json", report)
        return report
    part = folder / "answers.part.jsonl"
    if not (folder / RENDERED).is_file():
        write_json(folder / RENDERED, {"now": datetime.datetime.now().isoformat(timespec="seconds")})
    template = load_template(run)
    dialogues = [Dialogue(one, split, template) for split in SPLITS for one in read_prompts(run, split)]
    by_id = {(one.split, one.conversation.id): one for one in dialogues}
    whole = folder / "answers.jsonl"
    shipped = ShippedAnswers.of(run)
    came_along = sum(one.take_shipped(shipped) for one in dialogues)
    blocks = blocks_of(dialogues, BLOCK_BATCHES * settings.max_num_seqs)
    for row in read_partial_jsonl(whole if whole.exists() else part):
        by_id[row["split"], row["id"]].take_written(row)
    left = [block for block in blocks if any(isinstance(one.next_question(settings), list) for one in block)]
    for one in (one for block in left for one in block):
        one.forget_written()
    total = sum(one.num_turns for one in dialogues)
    done = sum(len(one.answers) for one in dialogues)
    if came_along:
        print(
            f"respond: {came_along:,} of {total:,} answers came with the built-in prompts, written by this target with "
            f"these settings (respond.shipped_answers=false writes them again)",
            file=sys.stderr,
        )
    if left:
        write_jsonl(part, (row for one in dialogues for row in one.answers[one.num_shipped :]))
        with progress(total, "respond", "answer", done) as bar, append_jsonl(part) as append:
            for row in _generate(run, left):
                append(row)
                bar.update()
    skipped = Counter(reason for one in dialogues if isinstance(reason := one.next_question(settings), str))
    answers = [row for one in dialogues for row in one.answers]
    if not answers:
        raise InputError(f"respond: no prompt could be answered ({_reasons(skipped)})")
    write_jsonl(whole, answers)
    part.unlink(missing_ok=True)
    report = {
        "engine": settings.engine,
        "dtype": engine_dtype(settings),
        "answers": len(answers),
        "shipped": came_along,
        "tokens": sum(len(row["completion_ids"]) for row in answers),
        "finish_reasons": dict(Counter(row["finish_reason"] for row in answers)),
        "skipped": dict(skipped),
    }
    write_json(folder / "report.json", report)
    return report


def load_template(run: Run) -> Template:
    """The run's template, which is told the time at which respond began, whenever it is asked to render."""
    path = run.folder("respond") / RENDERED
    now = datetime.datetime.fromisoformat(read_json(path)["now"]) if path.is_file() else None
    return Template.load(run.target.path, template_kwargs=run.recipe.encode.template_kwargs, now=now)


def read_prompts(run: Run, split: str) -> list[Conversation]:
    rows = read_jsonl(run.input("prompts") / f"{split}.jsonl")
    return [parse_conversation(row, number=number, source=row["source"]) for number, row in enumerate(rows)]


def open_engine(run: Run, seed: int) -> Engine | TransformersEngine:
    """The engine that the recipe asks for."""
    settings = run.recipe.respond
    dtype = engine_dtype(settings)
    if settings.engine == "vllm":
        config = EngineConfig(
            model=str(run.target.path),
            dtype=dtype,
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            kv_cache_gib=settings.kv_cache_gib,
            seed=seed,
            lockstep=True,
        )
        return Engine(config, run.path / "logs" / "respond.log")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    load = lambda: run.target.load(getattr(torch, dtype), device)  # noqa: E731
    return TransformersEngine(load, run.target.end_of_turn_ids, min(32, settings.max_num_seqs), seed)


def engine_dtype(settings: RespondConfig) -> Literal["bfloat16", "float16", "float32"]:
    return fastest_dtype() if settings.dtype == "auto" else settings.dtype


class Dialogue:
    """A conversation whose assistant turns are written one after another."""

    def __init__(self, conversation: Conversation, split: str, template: Template):
        self.conversation = conversation
        self.split = split
        self.template = template
        self.answers: list[dict[str, Any]] = []
        self.num_shipped = 0
        """Answers that came along; those behind them the engine has written."""
        self.turns = turn_contexts(conversation.messages)

    @property
    def num_turns(self) -> int:
        return len(self.turns)

    def next_context(self) -> list[int]:
        """Ids that a server renders before the next answer, earlier answers as the target wrote them.

        Raises:
            TurnError: The template refuses the messages.
        """
        messages: list[dict[str, Any]] = []
        for answer, given in zip(self.answers, self.turns, strict=False):
            messages += [*given, {"role": "assistant", "content": self._text(answer["completion_ids"])}]
        return self.template.render_prompt([*messages, *self.turns[len(self.answers)]], self.conversation.tools)

    def next_question(self, settings: RespondConfig) -> list[int] | str | None:
        """What the engine is asked next, or why it cannot be; None once every turn is answered."""
        if len(self.answers) == self.num_turns:
            return None
        try:
            context = self.next_context()
        except TurnError as error:
            return str(error)
        return context if len(context) + 2 <= settings.max_model_len else "prompt longer than respond.max_model_len"

    def take_written(self, row: dict[str, Any]) -> None:
        """Take the line of an earlier try, if it is the next turn's."""
        if row["turn"] == len(self.answers):
            self.answers.append(row)

    def forget_written(self) -> None:
        del self.answers[self.num_shipped :]

    def take_shipped(self, shipped: ShippedAnswers) -> int:
        """Answer open turns from what is known already, as far as it goes; returns how many were answered."""
        while shipped.completions and len(self.answers) < self.num_turns:
            try:
                context = self.next_context()
            except TurnError:
                break  # counted where the engine would be asked
            ids = shipped.find(context)
            if ids is None:
                break
            self.answers.append(self.line(context, ids))
        self.num_shipped = len(self.answers)
        return self.num_shipped

    def line(self, context_ids: list[int], completion_ids: list[int]) -> dict[str, Any]:
        """The line of answers.jsonl for the next turn; whether it was cut its ids say, whatever a server calls it."""
        ended = bool(completion_ids) and completion_ids[-1] in self.template.end_of_turn_ids
        return {
            "id": self.conversation.id,
            "split": self.split,
            "turn": len(self.answers),
            "context_ids": context_ids,
            "completion_ids": completion_ids,
            "finish_reason": "stop" if ended else "length",
        }

    def _text(self, ids: list[int]) -> str:
        kept = [token for token in ids if token not in self.template.end_of_turn_ids]
        return self.template.decode(kept)


def turn_contexts(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Split what is given into the part before each assistant turn that the target is to write.

    Every user message is answered, and assistant messages of the data are left out: the target writes its own. A
    conversation with tool results keeps its messages, since new calls would not fit them; only its last answer is
    written.
    """
    if any(message["role"] == "tool" for message in messages):
        given = messages[:-1] if messages[-1]["role"] == "assistant" else messages
        return [given]
    turns: list[list[dict[str, Any]]] = []
    pending: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "assistant":
            continue
        pending.append(message)
        if message["role"] == "user":
            turns.append(pending)
            pending = []
    return turns


def blocks_of(dialogues: list[Dialogue], size: int) -> list[list[Dialogue]]:
    """Dialogues with unanswered turns, so many at a time."""
    unanswered = [one for one in dialogues if len(one.answers) < one.num_turns]
    return [unanswered[first : first + size] for first in range(0, len(unanswered), size)]


def _generate(run: Run, blocks: list[list[Dialogue]]) -> Iterator[dict[str, Any]]:
    """Ask for all open turns, block by block; yield each answer's line and ask for the turn after it."""
    settings = run.recipe.respond
    waiting: dict[str, tuple[Dialogue, list[int]]] = {}

    def ask(engine: Engine | TransformersEngine, number: int, dialogue: Dialogue) -> None:
        context = dialogue.next_question(settings)
        if not isinstance(context, list):
            return
        key = f"{number}-{len(dialogue.answers)}"
        waiting[key] = (dialogue, context)
        engine.submit(
            Request(
                key=key,
                prompt_ids=context,
                max_new_tokens=min(settings.max_new_tokens, settings.max_model_len - len(context)),
                temperature=settings.temperature,
            )
        )

    with open_engine(run, seed=run.recipe.run.seed) as engine:
        for block in blocks:
            for number, dialogue in enumerate(block):
                ask(engine, number, dialogue)
            for result in engine.results():
                dialogue, context = waiting.pop(result.key)
                row = dialogue.line(context, result.token_ids)
                dialogue.answers.append(row)
                yield row
                ask(engine, int(result.key.split("-")[0]), dialogue)


def _reasons(counts: Counter[str]) -> str:
    return "; ".join(f"{reason} ({number})" for reason, number in counts.most_common(3)) or "there were none"
