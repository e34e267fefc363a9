"""Answers that come with the built-in prompts: what a built-in target wrote, once, to the prompts it wrote itself.

They save a CPU the minutes of writing them again, and are used only where they are what `respond` would ask for: the
same target (by fingerprint), the same context token for token, the same temperature and length. How they were made:
data/prompts/README.md.

    python -m drafthead.pipeline.shipped runs/NAME SOURCE     # write them again, from a finished respond stage
"""

import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafthead.data.files import digest, read_json, read_jsonl, sha256_of, write_json, write_jsonl
from drafthead.data.sources import PROMPTS
from drafthead.pipeline.recipe import RespondConfig
from drafthead.pipeline.run_dir import Run

FOLDER = PROMPTS / "answers"
SAME = ("temperature", "max_new_tokens")


@dataclass(frozen=True)
class ShippedAnswers:
    """Completions by the digest of their context ids."""

    completions: dict[str, list[int]]

    @classmethod
    def of(cls, run: Run) -> "ShippedAnswers":
        """Those that fit the run's target and settings; none is no error."""
        if not run.recipe.respond.shipped_answers:
            return cls({})
        for path in sorted(FOLDER.glob("*.json")):
            made = read_json(path)
            if made["fingerprint"] == run.target.fingerprint and made["settings"] == _settings(run.recipe.respond):
                rows = read_jsonl(path.with_suffix(".jsonl"))
                return cls({row["context"]: row["completion_ids"] for row in rows})
        return cls({})

    def find(self, context_ids: list[int]) -> list[int] | None:
        return self.completions.get(context_digest(context_ids))


def context_digest(context_ids: list[int]) -> str:
    return digest(context_ids)


def _settings(settings: RespondConfig) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in SAME}


@functools.cache
def _hashes() -> dict[str, str]:
    return {path.name: sha256_of(path) for path in sorted(FOLDER.glob("*.json*"))}


def shipped_hashes(run: Run) -> dict[str, str]:
    """Contents of the shipped answers: others are another output of the stage."""
    return _hashes() if run.recipe.respond.shipped_answers else {}


def write_shipped(run: Run, source: str, folder: Path = FOLDER) -> int:
    """Keep the run's answers to the training prompts of a built-in source; returns how many."""
    sources = {row["id"]: row["source"] for row in read_jsonl(run.input("prompts") / "train.jsonl")}
    answers = [
        row
        for row in read_jsonl(run.input("respond") / "answers.jsonl")
        if row["split"] == "train" and sources[row["id"]] == source
    ]
    rows = [
        {"id": row["id"], "context": context_digest(row["context_ids"]), "completion_ids": row["completion_ids"]}
        for row in sorted(answers, key=lambda row: (row["id"], row["turn"]))
    ]
    name = run.recipe.target.removeprefix("builtin:")
    write_jsonl(folder / f"{name}.jsonl", rows)
    made = {"fingerprint": run.target.fingerprint, "settings": _settings(run.recipe.respond)}
    write_json(folder / f"{name}.json", made)
    return len(rows)


def main() -> None:
    from drafthead.pipeline.run_dir import open_run
    from drafthead.pipeline.stages import STAGES

    run = open_run(Path(sys.argv[1]), STAGES, ["respond.shipped_answers=false"])
    print(f"{write_shipped(run, sys.argv[2]):,} answers in {FOLDER}")


if __name__ == "__main__":
    main()
