"""Whether the installed vLLM lets a target have an EAGLE-3 head, read from its source before any work.

vLLM asks the target's class for the interface that hands captured states out, and refuses the head when it starts:
after it was trained. Importing vLLM takes half a minute; its registry and its classes are read as text instead.
"""

import ast
import functools
import importlib.metadata
import importlib.util
from pathlib import Path

from drafthead.data.errors import InputError
from drafthead.pipeline.target import Target

INTERFACE = "SupportsEagle3"
MODELS = "model_executor/models"


def check_served(kind: str, target: Target) -> None:
    """Refuse a head that vLLM would refuse; says nothing where vLLM is not installed or does not know the target.

    What it does not know it serves through transformers, and then with the interface.

    Raises:
        InputError: Naming the class, and what would be served.
    """
    folder = _vllm_folder()
    architectures = target.whole_config.architectures or []
    if kind != "eagle3" or folder is None:
        return
    found = (_registry(folder).get(name) for name in architectures)
    # what is served through transformers is a package, and has the interface
    known = [place for place in found if place and (folder / MODELS / f"{place[0]}.py").is_file()]
    if known and not any(_has_interface(folder / MODELS, *place) for place in known):
        version = importlib.metadata.version(_distribution())
        raise InputError(
            f"{target.path}/config.json: architectures={architectures}: vLLM {version} serves no EAGLE-3 head with it "
            f"(its {known[0][1]} lacks {INTERFACE}); train another head (head.type=medusa)"
        )


def _vllm_folder() -> Path | None:
    found = importlib.util.find_spec("vllm")
    return Path(found.submodule_search_locations[0]) if found and found.submodule_search_locations else None


def _distribution() -> str:
    """The CPU build has a name of its own."""
    return importlib.metadata.packages_distributions()["vllm"][0]


@functools.cache
def _registry(folder: Path) -> dict[str, tuple[str, str]]:
    """Module and class of each architecture."""
    found: dict[str, tuple[str, str]] = {}
    for node in ast.walk(_parsed(folder / MODELS / "registry.py")):
        for key, value in zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ():
            names = [one.value for one in ast.walk(value) if isinstance(one, ast.Constant)]
            if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple) and len(names) == 2:
                found.setdefault(str(key.value), (str(names[0]), str(names[1])))
    return found


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def _has_interface(models: Path, module: str, name: str) -> bool:
    """Whether a class of a module, or one that it derives from, has the interface."""
    path = models / f"{module.replace('.', '/')}.py"
    if not path.is_file():
        return False  # from elsewhere: Protocol, Module
    body = _parsed(path).body
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
            return INTERFACE in bases or any(_has_interface(models, _home(body, base, module), base) for base in bases)
    return False


def _home(body: list[ast.stmt], name: str, module: str) -> str:
    """The module that a name of this one is from."""
    for node in body:
        if isinstance(node, ast.ImportFrom) and any((one.asname or one.name) == name for one in node.names):
            return (node.module or "").removeprefix("vllm.model_executor.models.")
    return module
