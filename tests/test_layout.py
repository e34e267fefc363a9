"""Who may import whom (docs/architecture.md), and other promises about where things lie."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from drafthead.pipeline.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT = {
    "data": {"data"},
    "kernels": {"kernels"},
    "eval": {"eval", "data", "kernels"},
    "pipeline": {"pipeline", "eval", "data", "kernels"},
}
FOLDERS = (*MAY_IMPORT, "recipes")
SOURCES = sorted(path.relative_to(ROOT) for folder in MAY_IMPORT for path in (ROOT / folder).rglob("*.py"))
SAYS_NOTHING = {"utils", "util", "common", "helpers", "misc"}
RECIPES = sorted(
    path.relative_to(ROOT / "recipes").with_suffix("").as_posix()
    for path in (ROOT / "recipes").rglob("*.yaml")
    if path.parent.name != "launch"
)


def imported_modules(code: str, package: str) -> Iterator[str]:
    """Yield every module that `code`, of `package`, imports anywhere, with relative names made absolute."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def forbidden_imports(code: str, package: str) -> list[str]:
    folder = package.split(".")[1]
    ours = [name for name in imported_modules(code, package) if name.split(".")[0] == "drafthead"]
    return [name for name in ours if name.split(".")[1] not in MAY_IMPORT[folder]]


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_imports_point_one_way(path: Path) -> None:
    package = ".".join(["drafthead", *path.parent.parts])
    assert forbidden_imports((ROOT / path).read_text(encoding="utf-8"), package) == []


@pytest.mark.parametrize(
    ("code", "package", "found"),
    [
        ("import drafthead.pipeline.recipe", "drafthead.eval", ["drafthead.pipeline.recipe"]),
        ("from drafthead import pipeline", "drafthead.eval", ["drafthead.pipeline"]),
        ("def f():\n    from drafthead.data import files", "drafthead.kernels.op", ["drafthead.data.files"]),
        ("from ..eval import engine", "drafthead.data", ["drafthead.eval.engine"]),
        ("from . import files", "drafthead.data", []),
        ("from drafthead.data.files import digest", "drafthead.eval", []),
        ("import data.files, kernels", "drafthead.data", []),
    ],
)
def test_the_import_rule_sees_every_form(code: str, package: str, found: list[str]) -> None:
    assert forbidden_imports(code, package) == found


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_shadow_no_package(folder: str) -> None:
    assert (ROOT / folder).is_dir()
    assert not (ROOT / folder / "__init__.py").exists()


def test_no_file_is_named_after_nothing() -> None:
    assert [path for path in SOURCES if path.stem in SAYS_NOTHING] == []


def test_every_source_says_what_it_is() -> None:
    texts = {path: (ROOT / path).read_text(encoding="utf-8") for path in SOURCES}
    assert [path for path, text in texts.items() if text and not ast.get_docstring(ast.parse(text))] == []


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_load_and_say_how_to_run_them(name: str) -> None:
    text = (ROOT / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")
    assert text.splitlines()[0] == f"# make train RECIPE={name}"
    recipe = load_recipe(name)
    assert recipe.run.name == name.replace("/", "-")
    assert (ROOT / "recipes" / "launch" / f"{recipe.run.launch}.yaml").is_file()


def test_the_recipes_are_found() -> None:
    assert {"eagle3", "smoke/eagle3", "llama3.1_8b/eagle3", "qwen3_8b/eagle3"} <= set(RECIPES)
