"""What was measured for a head before: in its run (served, else evaluated), or in the card of its export."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from drafthead.data.errors import InputError
from drafthead.data.files import read_json
from drafthead.eval.drift import Expected, design_effects
from drafthead.pipeline.rounds import ROUNDS_FILE, read_trace

CARD_ROW = re.compile(r"^\| (\d+) \| (\d\.\d{3}) \|", re.MULTILINE)
CARD_ROUNDS = re.compile(r"over (\d+) rounds on held-out prompts")


def read_expected(path: Path, k: int) -> Expected:
    """Find the rates for drafts of k tokens.

    A run's served check is preferred to its evaluation, for it has one for every k of the recipe and was counted by
    vLLM; a folder that only holds an export has the evaluation in its card. How much the rounds of an answer depend on
    each other is known from those that the run's evaluation recorded.

    Raises:
        InputError: There is none, or none with this k.
    """
    found = [*_of_run(path), *_of_card(path / "README.md"), *_of_card(path / "export" / "README.md")]
    if not found:
        raise InputError(
            f"--expect {path}: neither a run with eval/report.json nor an export with its card (README.md)"
        )
    for one in found:
        if len(one.per_position) == k:
            return one
    measured = ", ".join(str(depth) for depth in sorted({len(one.per_position) for one in found}))
    raise InputError(
        f"--expect {path}: measured with k={measured}, the server drafts {k} tokens; rates of another k cannot be "
        f"compared: add {k} to serve_check.k of the recipe and run it again, or serve num_speculative_tokens={measured}"
    )


def _of_run(path: Path) -> list[Expected]:
    served, evaluated = path / "serve-check" / "report.json", path / "eval" / "report.json"
    found = []
    try:
        if served.is_file():
            found += [_of_report(one["served"], f"{served}, served") for one in read_json(served)["by_k"].values()]
        if evaluated.is_file():
            found.append(_of_report(read_json(evaluated), str(evaluated)))
    except (KeyError, TypeError, AttributeError):
        raise InputError(f"--expect {path}: its reports lack the rates; run `drafthead eval {path}` again") from None
    effects = _effects(path / "eval" / ROUNDS_FILE)
    return [replace(one, **effects) for one in found if one.drafts]


def _effects(rounds: Path) -> dict[str, Any]:
    """What `Expected` knows of answers, where an evaluation has recorded the rounds of two or more."""
    if not rounds.is_file():
        return {}
    recorded = read_trace(rounds)
    answers = [one for one in recorded.answers if one]
    if len(answers) < 2:
        return {}
    return {"answers": len(answers), "design_effects": design_effects(answers, recorded.k)}


def _of_report(report: dict[str, Any], source: str) -> Expected:
    return Expected(source=source, drafts=report["drafts"], per_position=report["per_position"])


def _of_card(path: Path) -> list[Expected]:
    """The evaluation in a model card (`export/card.py`), whose rates have three decimals."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    rounds = CARD_ROUNDS.search(text)
    section = text.partition("## Acceptance\n")[2].partition("\n## ")[0]
    rates = [float(rate) for _, rate in CARD_ROW.findall(section)]
    if rounds is None or not rates:
        return []
    return [Expected(source=str(path), drafts=int(rounds[1]), per_position=rates)]
