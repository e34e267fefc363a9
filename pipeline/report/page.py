"""`runs/<name>/report.html`: what a run found, on one page that needs nothing but itself.

    drafthead report runs/eagle3

Written at the end of a run, and at any time for what there is by then. Every number is looked up by its address
(`sources.py`) while the page is written, so that what is shown cannot be another number than the file's.
"""

import base64
import datetime
import hashlib
import importlib.metadata
import json
from pathlib import Path
from typing import Any

from drafthead.data.files import write_text
from drafthead.pipeline.export.base_model import describe_base
from drafthead.pipeline.export.card import HEADS
from drafthead.pipeline.export.folder import serve_command, typed_here
from drafthead.pipeline.report.curves import last_row, training_charts
from drafthead.pipeline.report.numbers import Numbers
from drafthead.pipeline.report.sources import PLAN, Sources, fingerprint, read_sources
from drafthead.pipeline.run_dir import Run
from jinja2 import ChainableUndefined, Environment, FileSystemLoader
from markupsafe import Markup

NAME = "report.html"
TEMPLATE = Path(__file__).with_name("template")
TREES = {"tree": "static tree", "dynamic_tree": "dynamic tree"}
BRANCHED = (*([name] for name in TREES), ["typical", "chain"], *(["typical", name] for name in TREES))
"""Where in eval's report the numbers stand that no server would count."""
GATES = (
    ("MaskGate", "encode", "contexts equal served prompts; every answer's first draft slot is supervised"),
    ("VocabGate", "draft-vocab", "sizes, offsets, special tokens and coverage of the draft vocabulary"),
    ("FeatureGate", "capture", "stored last states give the target's logits; no zero, NaN, constant or short rows"),
    ("LoopGate", "eval", "the evaluation loop's logits behind a prompt are the model's own"),
    ("RopeGate", "export", "rotary frequencies and position limit are those trained with"),
    ("ExportGate", "export", "tensors, names, shapes, dtypes, config and draft map are what vLLM expects"),
    ("ServedGate", "serve-check", "served text equals plain text; acceptance within the tolerance of the predicted"),
)


def write_report(run: Run) -> Path:
    """Write the page of a run; returns its path.

    Raises:
        InputError: A file of the run is damaged.
    """
    path = run.path / NAME
    write_text(path, render_page(run))
    return path


def render_page(run: Run) -> str:
    sources = read_sources(run)
    script = (TEMPLATE / "script.js").read_text(encoding="utf-8")
    environment = Environment(
        loader=FileSystemLoader(TEMPLATE),
        autoescape=True,
        undefined=ChainableUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["compact_json"] = lambda value: json.dumps(value, separators=(",", ":"))
    page = environment.get_template("page.html.jinja").render(
        name=run.recipe.run.name,
        title=f"{HEADS[run.recipe.head.type]} for {run.recipe.target}",
        run_path=str(run.path),
        sources=sources,
        numbers=Numbers(sources),
        style=Markup((TEMPLATE / "style.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        written=datetime.datetime.now(datetime.UTC).isoformat(sep=" ", timespec="seconds"),
        version=importlib.metadata.version("drafthead"),
        **describe_run(run, sources),
        **describe_results(sources),
    )
    return page


def describe_run(run: Run, sources: Sources) -> dict[str, Any]:
    """What the run is, which stages and gates it has behind it."""
    known = run.record.get("stages", {})
    stages = [
        {"name": name, "seconds": known.get(name, {}).get("seconds"), "state": state_of(name, known, sources)}
        for name in run.stages
    ]
    timed = [stage for stage in stages if stage["seconds"] is not None]
    served_from = run.record.get("target_path") if "export" in sources.finished else None
    return {
        "unfinished": [name for name in run.stages if name not in sources.finished],
        "gates": [
            {"name": name, "stage": stage, "checks": checks, "verdict": verdict_of(name, stage, sources)}
            for name, stage, checks in GATES
        ],
        "stages": stages,
        "timed_stages": [("run.json", "stages", stage["name"], "seconds") for stage in timed],
        "longest_stage": max((stage["seconds"] for stage in timed), default=0) or 1,
        "serve_command": typed_here(serve_command(Path(served_from), run.path / "export")) if served_from else None,
        "facts": list_facts(run, sources),
        "recipe_text": (run.path / "recipe.yaml").read_text(encoding="utf-8"),
    }


def describe_results(sources: Sources) -> dict[str, Any]:
    """What the template would otherwise have to compute."""
    plan, served = sources.section(PLAN), sources.section("serve-check/report.json")
    evaluated = sources.section("eval/report.json")
    log = sources.section("train/log.jsonl") or []

    def known(stage: str, key: str) -> dict[str, Any]:
        return sources.section(f"{stage}/report.json", key) or {}

    last = {key: last_row(log, key) for key in ("loss", "learning_rate")}
    return {
        "plan": plan,
        "most_served": max((one["speedup"] for batch in served_rounds(sources) for one in batch["rounds"]), default=1),
        "best_speedup": max((row["speedup"] for row in every_speedup(plan)), default=1),
        "verdicts": {k: position_verdicts(one) for k, one in served["by_k"].items()} if served else {},
        "branched": list_branched(evaluated) if evaluated else [],
        "charts": training_charts(log, sources.section("train/report.json")),
        "last_rows": {key: row for key, row in last.items() if row is not None},
        "domains": sorted({*known("prompts", "domains"), *known("draft-vocab", "coverage_by_domain")}),
        "capture": sources.section("capture/manifest.json", "counts"),
    }


def state_of(name: str, known: dict[str, Any], sources: Sources) -> str:
    if name in sources.finished:
        return "finished"
    return "begun, not finished" if known.get(name, {}).get("state") == "running" else "not run"


def verdict_of(gate: str, stage: str, sources: Sources) -> str:
    """A stage that has finished has passed its gates; the last gate is the one that a stage outlives."""
    if stage not in sources.finished:
        return "not run"
    if gate == "ServedGate" and not sources.section("serve-check/report.json", "ok"):
        return "FAILED"
    if gate == "FeatureGate" and sources.section("capture/manifest.json", "counts", "mode") == "online":
        return "passed" if "train" in sources.finished else "not run"
    return "passed"


def position_verdicts(one: dict[str, Any]) -> list[str]:
    """What the served check said of each position of one k."""
    failed = {failure["field"] for failure in one["failures"]}
    return ["OUTSIDE" if f"per_position[{position}]" in failed else "within" for position in range(one["k"])]


def every_speedup(plan: dict[str, Any] | None) -> list[dict[str, Any]]:
    """All rows with a speed-up, which share one scale."""
    if plan is None:
        return []
    return [*plan["table"], *plan.get("by_batch", []), *plan["by_domain"].values()]


def served_rounds(sources: Sources) -> list[dict[str, Any]]:
    """vLLM's rounds by batch size, where `drafthead cost` timed them."""
    served = sources.section("cost.json", "served") or {}
    return list(served.get("by_batch", []))


def list_branched(evaluated: dict[str, Any]) -> list[dict[str, Any]]:
    """Trees and typical acceptance, with where they stand in the report and what they are called."""
    found = []
    for keys in BRANCHED:
        one: Any = evaluated
        for key in keys:
            one = (one or {}).get(key)
        if one is None:
            continue
        is_tree, typical = keys[-1] in TREES, keys[0] == "typical"
        found.append(
            {
                "place": keys,
                "name": TREES[keys[-1]] if is_tree else f"chain, k = {one['k']}",
                "rule": "typical, NOT lossless" if typical else "lossless",
                "is_tree": is_tree,
                "rounds": "rounds" if is_tree else "drafts",
                "expected": "expected_acceptance_length" in one,
                "compared": one.get("identical_to_plain") is not None,
            }
        )
    return found


def list_facts(run: Run, sources: Sources) -> list[tuple[str, str]]:
    """What the run is, as names and texts."""
    recipe, record = run.recipe, run.record
    head = sources.section("train/head.json") or {}
    options = {**recipe.head.model_dump(exclude={"type"}), **head.get("options", {})}
    served_from = record.get("target_path", "")
    base = describe_base(recipe.target, Path(served_from))
    layers = head.get("aux_layer_ids")
    heldout = recipe.prompts.heldout
    shares = heldout if isinstance(heldout, float) else ", ".join(source.source for source in heldout)
    facts = {
        "target": recipe.target,
        "on the hub": base.hub_id if base.hub_id != recipe.target else None,
        "revision": base.revision,
        "its weights": base.note,
        "licence": base.license_name or base.license,
        "fingerprint": fingerprint(run.path, [name for name in run.stages if name in sources.finished]),
        "served from": served_from,
        "head": ", ".join(
            [recipe.head.type, *(f"{name} {value}" for name, value in options.items() if value is not None)]
        ),
        "layer ids": ", ".join(map(str, layers)) if layers else None,
        "begun as": recipe.train.init_from,
        "prompts": ", ".join(source.source for source in recipe.prompts.sources),
        "held out": f"{shares:g} of them" if isinstance(shares, float) else shares,
        "command begun": record.get("written"),
        "commit": record.get("commit"),
        "versions": ", ".join(f"{name} {version}" for name, version in record.get("versions", {}).items()),
    }
    return [(label, str(text)) for label, text in facts.items() if text]
