"""Upload an export to the Hugging Face hub, with a card and a speculative config that hold there.

    drafthead export push runs/eagle3 --repo my-name/my-head --dry-run
    drafthead export push runs/eagle3 --repo my-name/my-head --private

What stands on this machine's paths is written anew: the serve command names the repository, sources only their files.
"""

import json
import os
import shlex
from pathlib import Path
from typing import Any

import httpx2
from drafthead.data.errors import GateError, InputError
from drafthead.data.files import read_json
from drafthead.pipeline.export.card import card_metadata, model_card
from drafthead.pipeline.export.card_facts import card_facts
from drafthead.pipeline.export.folder import named_method
from drafthead.pipeline.export.layouts import LAYOUTS
from drafthead.pipeline.export.preflight import preflight
from drafthead.pipeline.export.stage import CARD
from drafthead.pipeline.recipe import lora_of
from drafthead.pipeline.run_dir import INGREDIENTS, MANIFEST, Run
from huggingface_hub import CommitOperationAdd, HfApi, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

CONFIG = "speculative_config.json"
OURS = (MANIFEST, INGREDIENTS)
"""What only the run reads."""


class Upload:
    """Everything that would go to the hub, checked; nothing is sent before `send`.

    Args:
        run: Its export must be finished.
        repo: `owner/name`.
        private: Whether a new repository is private; None leaves it to the owner's settings.

    Raises:
        GateError: Preflight refuses the export, or vLLM would take the repository's name for another kind of head.
        InputError: The name is none, or the run is not exported.
    """

    def __init__(self, run: Run, repo: str, private: bool | None):
        check_repo(repo, run.recipe.head.type)
        folder = run.input("export")
        report = preflight(folder, run.served_target.path)
        if not report.ok:
            first = report.failures[0]
            raise GateError(first["gate"], first["field"], first["message"])
        self.repo = repo
        self.private = private
        self.facts = hub_facts(run, repo)
        self.files: dict[str, Path | bytes] = {path.name: path.resolve() for path in exported_files(folder)}
        self.files[CARD] = model_card(self.facts).encode()
        self.files[CONFIG] = (json.dumps(hub_config(folder, repo), indent=2) + "\n").encode()
        changed = lora_of(run.recipe.head) is not None
        self.warning = (
            "the heads belong to the target that was trained with them, which is not uploaded: "
            f"{run.served_target.path}; without it they are of no use"
            if changed
            else None
        )

    def describe(self) -> dict[str, Any]:
        """The object of `drafthead export push --json`, before anything was sent."""
        sizes = {name: _size(content) for name, content in sorted(self.files.items())}
        return {
            "repo": self.repo,
            "private": self.private,
            "bytes": sum(sizes.values()),
            "files": [{"path": name, "bytes": size} for name, size in sizes.items()],
            "metadata": card_metadata(self.facts).to_dict(),
            "warning": self.warning,
            "url": None,
        }

    def send(self) -> str:
        """Make the repository if it is not there and commit all files at once; returns the commit's address.

        Raises:
            InputError: There is no token, or the hub refuses or does not answer.
        """
        if get_token() is None:
            raise InputError(
                "export push: no Hugging Face token; run `hf auth login` or set HF_TOKEN to one that may write, "
                "or look at it with --dry-run"
            )
        api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), library_name="drafthead")
        operations = [
            CommitOperationAdd(
                path_in_repo=name, path_or_fileobj=str(content) if isinstance(content, Path) else content
            )
            for name, content in sorted(self.files.items())
        ]
        try:
            api.create_repo(self.repo, private=self.private, exist_ok=True)
            commit = api.create_commit(self.repo, operations, commit_message=f"{self.facts['name']}, by drafthead")
        except (httpx2.HTTPError, OSError, ValueError) as error:
            said = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
            raise InputError(
                f"export push: {self.repo}: the hub did not take it ({said}); may this token write there? "
                f"The same command tries again"
            ) from None
        return str(commit.commit_url)


def check_repo(repo: str, head: str) -> None:
    """Refuse what is no repository's name, or one that vLLM would misread.

    Raises:
        InputError: It is no `owner/name`.
        GateError: It names another kind of head.
    """
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise InputError(f"--repo {repo}: {str(error).splitlines()[0]}") from None
    if repo.count("/") != 1:
        raise InputError(f"--repo {repo}: give OWNER/NAME")
    if not LAYOUTS[head].any_path and (found := named_method(repo)):
        raise GateError(
            "ExportGate",
            f"--repo {repo}",
            f"vLLM would take the {head} head for another kind, because {found!r} stands in its name; choose another",
        )


def exported_files(folder: Path) -> list[Path]:
    """The files of an export that a server or a reader needs, links to the target's among them."""
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name not in OURS and not path.name.startswith(".")
    ]


def hub_config(folder: Path, repo: str) -> dict[str, Any]:
    """`speculative_config.json` with the repository in the place of the folder."""
    config: dict[str, Any] = read_json(folder / CONFIG)
    return {**config, **({"model": repo} if "model" in config else {})}


def hub_facts(run: Run, repo: str) -> dict[str, Any]:
    """What the card says, told to somebody who has the repository and not this machine."""
    facts = card_facts(run)
    name = facts["base"].hub_id or Path(facts["target"]).name
    config = hub_config(run.folder("export"), repo)
    if lora_of(run.recipe.head) is not None:
        served = f"CHANGED-{name.rpartition('/')[2]}"
    else:
        served = name if "model" in config else repo
    command = ["vllm", "serve", served, "--speculative-config", json.dumps(config, separators=(",", ":"))]
    return {**facts, "target": name, "serve_command": shlex.join(command)}


def _size(content: Path | bytes) -> int:
    return content.stat().st_size if isinstance(content, Path) else len(content)


# ---- text ------------------------------------------------------------------------------------------------


def render_upload(described: dict[str, Any]) -> str:
    lines = [f"{described['repo']}: {len(described['files'])} files, {_readable(described['bytes'])}"]
    lines += [f"  {_readable(one['bytes']):>10}  {one['path']}" for one in described["files"]]
    lines += [f"  {key}: {value}" for key, value in described["metadata"].items()]
    lines += [f"WARNING: {described['warning']}"] if described["warning"] else []
    return "\n".join(lines)


def _readable(size: int) -> str:
    value, units = float(size), iter(("B", "KB", "MB"))
    for unit in units:
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"
