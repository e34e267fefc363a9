"""What a run's files say, and where: the way from a number on the page back to the file that holds it.

An address is a file's path below the run and a JSON pointer as a URI fragment (RFC 6901, section 6):
`eval/report.json#/by_domain/code/drafts`; lines of a JSONL file are counted from 0. `plan` stands for the object of
`drafthead plan RUN_DIR --json`, which is computed and not stored.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from drafthead.data.errors import InputError
from drafthead.data.files import read_json, read_partial_jsonl
from drafthead.pipeline.advise import AdviceOptions, advise
from drafthead.pipeline.run_dir import MANIFEST, Run

REPORTS = ("prompts", "respond", "encode", "draft-vocab", "train", "eval", "serve-check")
"""Stages with a report.json; what capture counted stands in its manifest."""
REQUIRED = {
    "eval/report.json": ("k", "drafts", "temperature", "per_position", "conditional", "by_domain"),
    "serve-check/report.json": ("ok", "failures", "k", "predicted", "served", "by_k", "plain_ms_per_token"),
    "cost.json": ("head_key", "loop", "served"),
    "train/report.json": ("steps", "taken_step", "walk"),
}
"""What a page cannot be written without; other numbers that are missing are said to be."""
OTHERS = ("run.json", "cost.json", "train/head.json", "export/speculative_config.json")
MANIFESTS = ("capture", "train", "export")
PLAN = "plan"


class Missing:
    """What is not in the file; apart from null, which says that nothing was counted."""

    def __bool__(self) -> bool:
        return False


MISSING = Missing()


@dataclass(frozen=True, kw_only=True)
class Sources:
    """The files of a run that are there, by their paths below it."""

    files: dict[str, Any]
    finished: frozenset[str]
    """Stages whose output is whole."""
    no_plan: str
    """Why there is no plan; empty where there is one."""

    def find(self, file: str, *keys: str | int) -> Any:
        """The value at an address, or `MISSING`."""
        value = self.files.get(file, MISSING)
        for key in keys:
            known = range(len(value)) if isinstance(value, list) else value if isinstance(value, dict) else ()
            if key not in known:
                return MISSING
            value = value[key]
        return value

    def section(self, file: str, *keys: str | int) -> Any:
        """The same, but None for what is missing, so that a template can ask for it."""
        value = self.find(file, *keys)
        return None if value is MISSING else value


def address(file: str, keys: Iterable[str | int]) -> str:
    parts = [quote(str(key).replace("~", "~0").replace("/", "~1"), safe="~") for key in keys]
    return f"{file}#{''.join('/' + part for part in parts)}"


def read_sources(run: Run) -> Sources:
    """Read what there is; a stage's report counts once the stage has finished, its training log from the first line."""
    finished = frozenset(name for name in run.stages if (run.path / name / MANIFEST).is_file())
    wanted = [f"{name}/report.json" for name in REPORTS if name in finished]
    wanted += [f"{name}/{MANIFEST}" for name in MANIFESTS if name in finished]
    files = {name: read_json(run.path / name) for name in (*wanted, *OTHERS) if (run.path / name).is_file()}
    for name, keys in REQUIRED.items():
        lacking = [key for key in keys if name in files and key not in files[name]]
        if lacking:
            raise InputError(f"{run.path / name}: lacks {lacking[0]}; remove {name.split('/')[0]} and make it again")
    if (log := list(read_partial_jsonl(run.path / "train" / "log.jsonl"))) != []:
        files["train/log.jsonl"] = log
    no_plan = ""
    try:
        files[PLAN] = advise(AdviceOptions(), run)
    except InputError as error:
        no_plan = str(error)
    return Sources(files=files, finished=finished, no_plan=no_plan)


def fingerprint(run_path: Path, finished: Iterable[str]) -> str | None:
    """The target's, as the manifests of finished stages have it."""
    for name in finished:
        value = read_json(run_path / name / MANIFEST).get("ingredients", {}).get("target")
        if value is not None:
            return str(value)
    return None
