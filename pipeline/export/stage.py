"""Export: what vLLM loads, the speculative config, and the card; refused unless preflight passes.

drafthead export runs/eagle3
drafthead export preflight runs/eagle3/export --target DIR
"""

from typing import Any

from drafthead.data.draft_vocab import DraftVocab
from drafthead.data.errors import GateError
from drafthead.data.files import read_json, write_json, write_text
from drafthead.pipeline.export.card import model_card
from drafthead.pipeline.export.card_facts import card_facts
from drafthead.pipeline.export.folder import TrainedHead
from drafthead.pipeline.export.layouts import LAYOUTS
from drafthead.pipeline.export.preflight import preflight
from drafthead.pipeline.run_dir import MANIFEST, Run
from safetensors.torch import load_file

CARD = "README.md"


def export(run: Run) -> dict[str, Any]:
    """Write the export folder and check it as a stranger would, from its files alone.

    Raises:
        GateError: Preflight found a fault.
    """
    folder = run.folder("export")
    trained = run.input("train")
    description = read_json(trained / "head.json")
    vocab = DraftVocab.load(run.input("draft-vocab") / "draft_vocab.safetensors")
    head = TrainedHead(
        state=load_file(trained / "head.safetensors"),
        description=description,
        target=run.served_target,
        vocab=vocab,
        k=run.recipe.export.k,
        dtype=run.recipe.export.dtype,
    )
    LAYOUTS[description["type"]].write(folder, head)
    report = preflight(folder, run.served_target.path)
    if not report.ok:
        first = report.failures[0]
        raise GateError(first["gate"], first["field"], first["message"])
    write_card(run)
    run.record["export_path"] = str(folder.resolve())
    run.save()
    return {"export_path": str(folder.resolve()), "serve_command": report.serve_command}


def write_card(run: Run) -> bool:
    """Write README.md of the export from what the run knows by now; returns whether it said something else before.

    What is measured after the export belongs on the card too, so the card changes when the folder is long finished, and
    the manifest, by which a changed file would be refused, does not hold it.
    """
    folder, text = run.folder("export"), model_card(card_facts(run))
    path = folder / CARD
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return False
    if run.has("export"):
        manifest = read_json(folder / MANIFEST)
        if CARD in manifest["files"]:
            manifest = {**manifest, **{part: _without(manifest[part], CARD) for part in ("files", "sha256")}}
            write_json(folder / MANIFEST, manifest)
    write_text(path, text)
    return True


def _without(values: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}
