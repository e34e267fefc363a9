"""Recorded rounds, for replaying other ways of choosing k: `eval/rounds.jsonl` of a run, or a file of the user's.

One line an answer: `{"domain": "code", "k": 3, "accepted": [3, 0, 1]}`. `k` draft tokens were proposed in every round,
`accepted` of them were kept, round by round, before the answer was trimmed at its end; `domain` may be left out.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drafthead.data.errors import InputError
from drafthead.data.files import write_jsonl
from drafthead.eval.acceptance import RequestRounds

ROUNDS_FILE = "rounds.jsonl"


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Recorded rounds: how many of `k` draft tokens each kept."""

    path: Path
    k: int
    answers: list[list[int]]
    """Of each answer, round by round."""

    @property
    def kept(self) -> list[int]:
        """Of all rounds, one answer after the other."""
        return [count for answer in self.answers for count in answer]


def write_rounds(path: Path, requests: Sequence[RequestRounds], k: int) -> None:
    write_jsonl(path, ({"domain": one.domain, "k": k, "accepted": one.accepted} for one in requests))


def read_trace(path: Path) -> Trace:
    """All rounds of a file, in its order.

    Raises:
        InputError: Naming the line that is something else.
    """
    ks: set[int] = set()
    answers: list[list[int]] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, IsADirectoryError, UnicodeDecodeError):
        raise InputError(f"trace: {path}: no such text file") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            k, accepted = value["k"], value["accepted"]
            if not (type(k) is int and k >= 1 and all(type(one) is int and 0 <= one <= k for one in accepted)):
                raise ValueError
        except (ValueError, TypeError, KeyError):
            shown = '{"k": 5, "accepted": [3, 0, 1]} with every number from 0 to k'
            raise InputError(f"trace: {path} line {number}: not a line like {shown}") from None
        ks.add(k)
        answers.append(list(accepted))
    if len(ks) != 1 or not any(answers):
        found = f"k={', '.join(map(str, sorted(ks)))}" if any(answers) else "no rounds"
        raise InputError(f"trace: {path}: {found}; record rounds with one k")
    return Trace(path=path, k=ks.pop(), answers=answers)
