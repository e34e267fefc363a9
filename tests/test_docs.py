"""A command that a document shows must exist: make targets, sub-commands, flags and recipe keys."""

import re
import shlex
from pathlib import Path

import pytest
from drafthead.pipeline.arguments import parse
from drafthead.pipeline.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[1]
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:drafthead|make) [^`|]+)`")
TARGETS = set(re.findall(r"^([a-z-]+):.*?##", (ROOT / "Makefile").read_text(), re.MULTILINE))


def commands(program: str) -> list[str]:
    found = []
    for path in DOCS:
        text = path.read_text(encoding="utf-8")
        lines = [line for block in BLOCK.findall(text) for line in block.splitlines()] + INLINE.findall(text)
        found += [line.split("  #")[0].strip() for line in lines if line.startswith(f"{program} ")]
    return sorted(set(found))


@pytest.mark.parametrize("command", commands("make"))
def test_make_targets_exist(command: str) -> None:
    words = [word for word in shlex.split(command)[1:] if "=" not in word]
    assert words
    assert set(words) <= TARGETS


@pytest.mark.parametrize("command", commands("drafthead"))
def test_drafthead_commands_are_understood(command: str) -> None:
    words = shlex.split(command)[1:]
    placeholders = {"RECIPE": "eagle3", "N": "3"}
    arguments = parse([placeholders.get(word, word) for word in words if word not in ("...", "[key=value", "...]")])
    if words[0] == "run":
        load_recipe(arguments.recipe, arguments.overrides)


def test_the_readme_shows_both_commands_first() -> None:
    shown = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))[0].splitlines()
    assert shown == ["make train RECIPE=eagle3", "make test"]


def test_every_file_that_a_document_links_to_exists() -> None:
    for path in DOCS:
        for link in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
            assert (path.parent / link).exists(), f"{path.name}: {link}"
