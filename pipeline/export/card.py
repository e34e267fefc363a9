"""The model card (README.md of an export): what was measured, how, and the command that serves it."""

from typing import Any

from drafthead.pipeline.merged_target import quality_lines

MEASURES = (
    ("mean_acceptance_length", "mean acceptance length (1 + accepted / rounds, pooled)"),
    ("mean_of_requests_acceptance_length", "mean of the requests' own acceptance lengths"),
    ("draft_acceptance_rate", "draft acceptance rate (accepted / drafted)"),
)

HEADS = {"eagle3": "An EAGLE-3 draft head", "medusa": "A Medusa draft head", "mtp": "A multi-token-prediction layer"}


def model_card(results: dict[str, Any]) -> str:
    """Write the card's text.

    Args:
        results: `name`, `head` (its type), `target` and `fingerprint`; `eval`, the object of `drafthead eval --json`;
            `serve_check`, that of `drafthead serve-check --json`, where there is one; `target_quality`, that of
            `compare_quality`, where the target was trained too; `temperature`; `data` and `versions`, a name and a
            value each; `trained_length`; `serve_command`; `license`, the target's, where known.
    """
    sections = [
        _front(results),
        _serving(results),
        _changed_target(results),
        _acceptance(results["eval"]),
        _branched(results["eval"]),
        _served(results.get("serve_check")),
        _how_measured(results),
        _table("Training data", results["data"]),
        _table("Versions", results["versions"]),
        _license(results),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _front(results: dict[str, Any]) -> str:
    license_name = results.get("license") or "other"
    which = "a changed form of " if results.get("target_quality") else ""
    return (
        f"---\nbase_model: {results['target']}\nlicense: {license_name}\nlibrary_name: vllm\n"
        f"tags: [speculative-decoding, {results['head']}, draft-head]\n---\n\n"
        f"# {results['name']}\n\n"
        f"{HEADS[results['head']]} for {which}`{results['target']}` (fingerprint `{results['fingerprint']}`). It makes "
        "that model faster and leaves its text as it is. It fits this target alone: another fine-tune needs "
        "its own head."
    )


def _serving(results: dict[str, Any]) -> str:
    return (
        f"## Serve\n\n```\n{results['serve_command']}\n```\n\n"
        f"Trained on rows of up to {results['trained_length']} tokens; expect fewer accepted drafts on "
        "longer ones."
    )


def _changed_target(results: dict[str, Any]) -> str:
    """What joint training did to the target, where there was any."""
    if not results.get("target_quality"):
        return ""
    lines = "\n".join(quality_lines(results["target_quality"]))
    return (
        f"## The target was trained too\n\nThe heads belong to the changed target in the command above (Medusa-2: "
        f"low-rank adapters, merged), not to `{results['target']}` itself, and what it writes may differ from that "
        f"one's.\n\n```\n{lines}\n```"
    )


def _acceptance(report: dict[str, Any]) -> str:
    lines = ["## Acceptance", "", "| measure | value |", "|---|---|"]
    lines += [f"| {text} | {_number(report[name])} |" for name, text in MEASURES]
    lines += [
        f"| answers equal to plain decoding | {report.get('identical_to_plain', 'not checked')} |",
        "",
        "| draft position | accepted (of all rounds) | accepted given the earlier ones |",
        "|---|---|---|",
    ]
    pairs = zip(report["per_position"], report["conditional"], strict=True)
    lines += [f"| {index} | {_number(all_)} | {_number(given)} |" for index, (all_, given) in enumerate(pairs)]
    if report["by_domain"]:
        lines += ["", "| domain | rounds | mean acceptance length |", "|---|---|---|"]
        for domain, part in report["by_domain"].items():
            lines.append(f"| {domain} | {part['drafts']} | {_number(part['mean_acceptance_length'])} |")
    return "\n".join(lines)


def _branched(report: dict[str, Any]) -> str:
    """A tree's numbers and those of typical acceptance, each under its label."""
    rows = []
    if tree := report.get("tree"):
        what = f"tree of {tree['nodes']} nodes, depth {tree['depth']}"
        rows.append((what, "lossless", tree["rounds"], tree["mean_acceptance_length"]))
    if typical := report.get("typical"):
        rule = f"NOT lossless (typical, epsilon {typical['epsilon']:g}, delta {typical['delta']:g})"
        chain = typical["chain"]
        rows.append((f"chain of {chain['k']}", rule, chain["drafts"], chain["mean_acceptance_length"]))
        if tree := typical.get("tree"):
            what = f"tree of {tree['nodes']} nodes, depth {tree['depth']}"
            rows.append((what, rule, tree["rounds"], tree["mean_acceptance_length"]))
    if not rows:
        return ""
    lines = [
        "## Other drafts and rules",
        "",
        "Measured on the same prompts, not served by vLLM, and not comparable with the numbers above.",
        "",
        "| drafts | acceptance | rounds | mean acceptance length |",
        "|---|---|---|---|",
    ]
    lines += [f"| {what} | {rule} | {rounds} | {_number(length)} |" for what, rule, rounds, length in rows]
    return "\n".join(lines)


def _served(check: dict[str, Any] | None) -> str:
    """Predicted beside served, where a real server was asked."""
    if check is None:
        return ""
    verdict = "as predicted" if check["ok"] else "NOT as predicted"
    lines = [
        "## Served by vLLM",
        "",
        f"vLLM served the head {verdict}.",
        "",
        "| draft position | predicted | served |",
        "|---|---|---|",
    ]
    pairs = zip(check["predicted"]["per_position"], check["served"]["per_position"], strict=True)
    lines += [f"| {index} | {_number(here)} | {_number(there)} |" for index, (here, there) in enumerate(pairs)]
    lengths = [_number(check[side]["mean_acceptance_length"]) for side in ("predicted", "served")]
    lines.append(f"| mean acceptance length | {lengths[0]} | {lengths[1]} |")
    return "\n".join(lines)


def _how_measured(results: dict[str, Any]) -> str:
    report = results["eval"]
    return (
        "## How measured\n\n"
        f"A chain (no tree) of k = {report['k']} draft tokens, temperature {results['temperature']:g}, over "
        f"{report['drafts']} rounds on held-out prompts. A token outside the draft vocabulary counts as a "
        "miss: rates are over the target's full vocabulary. Numbers of trees, of another k or of another "
        "temperature cannot be compared with these."
    )


def _table(title: str, values: dict[str, Any]) -> str:
    rows = [f"| {name} | {value} |" for name, value in values.items()]
    return "\n".join([f"## {title}", "", "| | |", "|---|---|", *rows])


def _license(results: dict[str, Any]) -> str:
    known = results.get("license")
    terms = f"the target's licence ({known})" if known else "the target's licence"
    return (
        "## Licence\n\nThe folder holds copies of tensors of the target and was trained on text that the "
        f"target wrote: {terms} and that of the training prompts apply."
    )


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"
