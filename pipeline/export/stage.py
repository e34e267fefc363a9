"""Export: what vLLM loads, the speculative config, and the card; refused unless preflight passes.

drafthead export runs/eagle3
drafthead export preflight runs/eagle3/export --target DIR
"""

from typing import Any

from drafthead.data.draft_vocab import DraftVocab
from drafthead.data.errors import GateError
from drafthead.data.files import read_json, sha256_of, write_json, write_text
from drafthead.pipeline.export.card import model_card
from drafthead.pipeline.export.folder import TrainedHead, serve_command
from drafthead.pipeline.export.layouts import LAYOUTS
from drafthead.pipeline.export.preflight import preflight
from drafthead.pipeline.run_dir import MANIFEST, Run, provenance
from safetensors.torch import load_file


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
    write_card(run, served=None)
    run.record["export_path"] = str(folder.resolve())
    run.save()
    return {"export_path": str(folder.resolve()), "serve_command": report.serve_command}


def write_card(run: Run, served: dict[str, Any] | None) -> None:
    """Write README.md of the export, again when the served check has numbers for it."""
    folder = run.folder("export")
    encoded, vocab = run.report("encode")["train"], run.report("draft-vocab")
    results = {
        "name": run.recipe.run.name,
        "head": run.recipe.head.type,
        "target": run.recipe.target,
        "fingerprint": run.served_target.fingerprint,
        "eval": run.report("eval"),
        "target_quality": run.report("train").get("target_quality"),
        "temperature": run.recipe.eval.temperature,
        "serve_check": served,
        "data": {
            "training rows": encoded["kept"],
            "training tokens": encoded["tokens"],
            "supervised tokens": encoded["supervised_tokens"],
            "tokens trained on, epochs included": run.report("train")["tokens"],
            "draft vocabulary": f"{vocab['size']} of {vocab['target_vocab']}",
            "its coverage of held-out answers": vocab["coverage_heldout"],
        },
        "versions": {**provenance()["versions"], "commit": provenance()["commit"]},
        "trained_length": read_json(run.input("train") / "head.json")["trained_length"],
        "serve_command": serve_command(run.served_target.path, folder),
    }
    write_text(folder / "README.md", model_card(results))
    if (folder / MANIFEST).is_file():
        manifest = read_json(folder / MANIFEST)
        manifest["files"]["README.md"] = (folder / "README.md").stat().st_size
        manifest["sha256"]["README.md"] = sha256_of(folder / "README.md")
        write_json(folder / MANIFEST, manifest)
