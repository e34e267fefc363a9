"""Answers that come with the built-in prompts: what a built-in target wrote, once, to the prompts it wrote itself.

They save a CPU the minutes of writing them again, and are used only where they are what `respond` would ask for: the
same target (by fingerprint), the same context token for token, the same temperature and length. How they were made:
data/prompts/README.md.

    python -m drafthead.pipeline.shipped runs/NAME SOURCE     # write them again, from a finished respond stage
"""

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
        path = _fitting_file(run)
        return cls({row["context"]: row["completion_ids"] for row in read_jsonl(path)} if path else {})

    def find(self, context_ids: list[int]) -> list[int] | None:
        return self.completions.get(digest(context_ids))


def shipped_hash(run: Run) -> str | None:
    """Contents of the answers that fit the run: others are another output of the stage."""
    path = _fitting_file(run)
    return sha256_of(path) if path else None


def _fitting_file(run: Run) -> Path | None:
    """What this target wrote with these settings, if it is shipped and wanted."""
    settings = run.recipe.respond
    described = sorted(FOLDER.glob("*.json")) if settings.shipped_answers else []
    made = {"fingerprint": run.target.fingerprint, "settings": _settings(settings)} if described else None
    return next((path.with_suffix(".jsonl") for path in described if read_json(path) == made), None)


def _settings(settings: RespondConfig) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in SAME}


def write_shipped(run: Run, source: str, folder: Path = FOLDER) -> int:
    """Keep the run's answers to the training prompts of a built-in source; returns how many."""
    sources = {row["id"]: row["source"] for row in read_jsonl(run.input("prompts") / "train.jsonl")}
    answers = [
        row
        for row in read_jsonl(run.input("respond") / "answers.jsonl")
        if row["split"] == "train" and sources[row["id"]] == source
    ]
    rows = [
        {"id": row["id"], "context": digest(row["context_ids"]), "completion_ids": row["completion_ids"]}
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
