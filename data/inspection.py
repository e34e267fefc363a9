"""What of conversations is supervised, row by row: the object and the text of `drafthead inspect`.

drafthead inspect --target DIR --conversations FILE
drafthead inspect runs/eagle3
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from drafthead.data.conversations import Conversation, parse_file
from drafthead.data.encoding import EncodeReport, Row, Turns, encode_turns, read_rows
from drafthead.data.errors import InputError
from drafthead.data.template import Template

DIM, BRIGHT, RED, PLAIN = "\033[2m", "\033[1;32m", "\033[31m", "\033[0m"
MAX_SHOWN = 300
"""Characters shown of an answer that was dropped."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One assistant turn, or a row that has none."""

    source: int
    """The number of its row in the file, from 0."""
    turn: int | None
    made: Row | str
    """The encoded row, or the reason why there is none."""
    given: str
    """What the data holds as the answer."""


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """All turns of a file, in its order."""

    path: Path
    seen: list[Seen]
    report: EncodeReport
    """Of what is seen; of a run also what its stage `encode` dropped, of which only the counts are known."""

    @classmethod
    def of(
        cls, template: Template, path: Path, *, max_length: int, turns: Turns = "all", only: int | None = None
    ) -> "Inspection":
        """Encode a file of conversations, or row `only` of it.

        Raises:
            InputError: The file cannot be read, or has no row of that number.
        """
        numbered, unread = parse_file(path, str(path))
        seen = [Seen(source=one.source, turn=None, made=one.reason, given="") for one in unread]
        for number, conversation in numbered:
            if only in (None, number):
                seen += _turns_of(template, number, conversation, max_length, turns)
        seen = _only(seen, only, path)
        seen.sort(key=lambda one: one.source)
        return cls(path=path, seen=seen, report=_report(seen))

    @classmethod
    def of_rows(cls, path: Path, *, dropped: Mapping[str, int], only: int | None = None) -> "Inspection":
        """The encoded rows of a run, or row `only` of them; `dropped` are its counts of those that are not there.

        Raises:
            InputError: The file is not there, or has no row of that number.
        """
        rows = enumerate(read_rows(path))
        seen = _only([Seen(source=number, turn=row.turn, made=row, given="") for number, row in rows], only, path)
        report = _report(seen)
        report.dropped.update({} if only is not None else dropped)
        return cls(path=path, seen=seen, report=report)

    def as_json(self, template: Template) -> dict[str, Any]:
        """The object of `drafthead inspect --json`."""
        return {
            "rows": [_row_json(template, one.source, one.made) for one in self.seen if isinstance(one.made, Row)],
            "dropped": [
                {"source": one.source, **({} if one.turn is None else {"turn": one.turn}), "reason": one.made}
                for one in self.seen
                if isinstance(one.made, str)
            ],
            "kept": self.report.kept,
            "clipped": self.report.clipped,
        }

    def require_samples(self) -> None:
        """Raises `InputError` with the reasons when nothing was kept."""
        self.report.require_samples(str(self.path))


def _only(seen: list[Seen], only: int | None, path: Path) -> list[Seen]:
    found = seen if only is None else [one for one in seen if one.source == only]
    if only is not None and not found:
        raise InputError(f"{path}: no row {only}; rows are counted from 0")
    return found


def _report(seen: list[Seen]) -> EncodeReport:
    report = EncodeReport(dropped=Counter(one.made for one in seen if isinstance(one.made, str)))
    report.add((one.made for one in seen if isinstance(one.made, Row)), [])
    return report


def _turns_of(
    template: Template, number: int, conversation: Conversation, max_length: int, turns: Turns
) -> Iterator[Seen]:
    answers = [message["content"] for message in conversation.messages if message["role"] == "assistant"]
    for turn, made in encode_turns(template, conversation, max_length=max_length, turns=turns):
        yield Seen(source=number, turn=turn, made=made, given="" if turn is None else answers[turn])


def _row_json(template: Template, number: int, row: Row) -> dict[str, Any]:
    return {
        "source": number,
        "turn": row.turn,
        "input_ids": row.input_ids,
        "loss_mask": row.loss_mask,
        "supervised_text": template.decode(row.input_ids[row.context_length :]),
    }


# ---- for a person ----------------------------------------------------------------------------------------


def print_inspection(
    template: Template, inspection: Inspection, stream: TextIO, environment: Mapping[str, str]
) -> None:
    """Print every turn: context dim, supervised text bright, dropped answers red with their reason."""
    coloured = wants_colour(stream, environment)
    for one in inspection.seen:
        if isinstance(one.made, Row):
            print(_row_text(template, one.source, one.made, coloured), end="\n\n", file=stream)
        else:
            print(_dropped_text(one, coloured), end="\n\n", file=stream)
    report = inspection.report
    print(f"kept {report.kept} (clipped {report.clipped}), dropped {report.dropped.total()}", file=stream)
    for reason, count in report.dropped.most_common():
        print(f"  {count} x {_paint(reason, '', False)}", file=stream)


def wants_colour(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Colours on a terminal that knows them, unless NO_COLOR is set (no-color.org)."""
    return stream.isatty() and not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"


def _row_text(template: Template, number: int, row: Row, coloured: bool) -> str:
    context_ids, answer_ids = row.input_ids[: row.context_length], row.input_ids[row.context_length :]
    clipped = ", clipped" if row.clipped else ""
    title = f"row {number}, turn {row.turn}: {len(context_ids)} context + {len(answer_ids)} supervised{clipped}"
    context = _paint(template.decode(context_ids), DIM, coloured)
    supervised = _paint(template.decode(answer_ids), BRIGHT, coloured)
    # without colours the boundary has to show otherwise
    return f"{title}\n{context}" + ("" if coloured else "\n>>> supervised:\n") + supervised


def _dropped_text(one: Seen, coloured: bool) -> str:
    where = f"row {one.source}" + ("" if one.turn is None else f", turn {one.turn}")
    line = _paint(f"{where}: dropped: {one.made}", RED, coloured)
    shown = one.given[:MAX_SHOWN] + (" ..." if len(one.given) > MAX_SHOWN else "")
    return line + ("\n" + _paint(shown, RED, coloured) if shown.strip() else "")


def _paint(text: str, colour: str, coloured: bool) -> str:
    text = text.translate(DEFUSED)
    return f"{colour}{text}{PLAIN}" if coloured else text


def _defused() -> dict[int, str]:
    """Pictures of control characters: escape codes in the data must not reach the terminal."""
    pictures = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
    return pictures | {0x7F: "\u2421"} | dict.fromkeys(range(0x80, 0xA0), "\ufffd")


DEFUSED = _defused()
