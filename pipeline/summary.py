"""What a finished run has to say: predicted and served acceptance, times, and how to serve the head."""

from typing import Any

from drafthead.pipeline.export.card import HEADS
from drafthead.pipeline.export.folder import serve_command, typed_here
from drafthead.pipeline.merged_target import quality_lines
from drafthead.pipeline.run_dir import Run
from drafthead.pipeline.tracking import sync_command


def summarize_run(run: Run) -> dict[str, Any]:
    """Collect the numbers of a finished run."""
    served, evaluated = run.report("serve-check"), run.report("eval")
    export = run.folder("export")
    return {
        "ok": served["ok"],
        "run_dir": str(run.path),
        "head": run.recipe.head.type,
        "target": run.recipe.target,
        "target_quality": run.report("train").get("target_quality"),
        "eval": evaluated,
        "serve_check": served,
        "export_path": str(export.resolve()),
        "serve_command": serve_command(run.served_target.path, export),
        "wandb_sync": sync_command(run.path),
        "seconds": {name: stage["seconds"] for name, stage in run.record["stages"].items()},
    }


def render_summary(summary: dict[str, Any]) -> str:
    served, evaluated = summary["serve_check"], summary["eval"]
    lines = [
        "",
        f"{HEADS[summary['head']]} for {summary['target']}",
        "",
        *([*quality_lines(summary["target_quality"]), ""] if summary["target_quality"] else []),
        f"held-out evaluation: {evaluated['prompts']} prompts, {evaluated['drafts']} rounds, k={evaluated['k']}, "
        f"temperature {evaluated['temperature']:g}; text equal to plain decoding {evaluated['identical_to_plain']}",
        f"  {'domain':<16} {'rounds':>6}  accept length (1 + accepted / rounds)",
    ]
    for name, one in evaluated["by_domain"].items():
        lines.append(f"  {name:<16} {one['drafts']:>6}  {number(one['mean_acceptance_length'], 2)}")
    lines.append(
        f"  {'all':<16} {evaluated['drafts']:>6}  {number(evaluated['mean_acceptance_length'], 2)}  "
        f"(mean of requests {number(evaluated['mean_of_requests_acceptance_length'], 2)})"
    )
    lines += branched_lines(evaluated)
    lines += [
        "",
        f"served by vLLM: {served['prompts']} prompts, {served['dtype']}, greedy; "
        f"text equal to plain vLLM {served['identical_to_plain']}",
    ]
    for one in served["by_k"].values():
        lines += acceptance_lines(one)
    lines += [
        "",
        f"batch-1 decode in vLLM: plain {number(served['plain_ms_per_token'], 2)} ms/token, "
        f"speculative {number(served['speculative_ms_per_token'], 2)} ms/token, "
        f"{number(served['speedup_batch_1'], 2)}x (k={served['k']})",
        f"served as predicted: {'yes' if served['ok'] else 'NO'}",
        *[f"  {one['gate']}: {one['field']}: {one['message']}" for one in served["failures"]],
        "",
        f"export: {summary['export_path']}",
        f"report: {summary['report_path']}",
        "serve it with:",
        f"  {typed_here(summary['serve_command'])}",
    ]
    if summary["wandb_sync"]:
        lines += ["W&B files lie here alone; upload them with:", f"  {summary['wandb_sync']}"]
    return "\n".join(lines)


def branched_lines(evaluated: dict[str, Any]) -> list[str]:
    """What a tree and typical acceptance gave, where they were asked for, apart from the chain's numbers."""
    lines = []
    for kind in ("tree", "dynamic tree"):
        if not (tree := evaluated.get(kind.replace(" ", "_"))):
            continue
        same = f"; text equal to plain decoding {tree['identical_to_plain']}" if tree["identical_to_plain"] else ""
        lines += [
            f"  {kind} of {tree['nodes']} nodes, depth {tree['depth']} (vLLM serves chains: not comparable): "
            f"{tree['rounds']} rounds, accept length {number(tree['mean_acceptance_length'], 2)}{same}",
        ]
    if typical := evaluated.get("typical"):
        lengths = [
            f"{kind} {number(typical[kind]['mean_acceptance_length'], 2)}"
            for kind in ("chain", "tree")
            if kind in typical
        ]
        lines.append(f"  typical acceptance (not lossless): accept length {', '.join(lengths)}")
    return lines


def acceptance_lines(one: dict[str, Any]) -> list[str]:
    """Predicted and served acceptance of one k, side by side."""
    header = " ".join(f"pos {position + 1:<3}" for position in range(one["k"]))
    lines = [f"  k={one['k']}  {'accepted per position':<30} {header} accept length"]
    for kind, text in (
        ("predicted", "predicted (our loop)"),
        ("walk", "predicted (walk on its texts)"),
        ("served", "served (vLLM's counters)"),
    ):
        rates = " ".join(f"{number(rate, 3):<7}" for rate in one[kind]["per_position"])
        lines.append(f"       {text:<31}{rates} {number(one[kind]['mean_acceptance_length'], 2)}")
    return lines


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
