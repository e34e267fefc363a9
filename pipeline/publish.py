"""What a run tells others once its numbers are known: the card of its export, and the end of its W&B run.

After the curves of the training the W&B run carries, as numbers of its last step: the evaluation, the served check
(each k, each domain), what drafting costs and gains; as tables the same rates; as an artifact the export with its card.
All names are made here, so that a workspace (`workspace.py`) shows the names that were logged.
"""

import re
from typing import Any

from drafthead.data.files import digest, read_json
from drafthead.pipeline.export.card_facts import find_advice
from drafthead.pipeline.export.stage import CARD, write_card
from drafthead.pipeline.run_dir import Run
from drafthead.pipeline.tracking import Tracker

ACCEPTANCE_COLUMNS = ("k", "position", "predicted", "walk on served texts", "served by vLLM")
DOMAIN_COLUMNS = ("domain", "drafts", "accept length")
KINDS = ("predicted", "walk", "served")


def publish(run: Run) -> None:
    """Bring the card up to date and, once the head was served, log what W&B does not have yet."""
    if not run.has("export"):
        return
    write_card(run)
    if not run.has("serve-check"):
        return
    metrics = result_metrics(run)
    told = digest([metrics, (run.folder("export") / CARD).read_text(encoding="utf-8")])
    if run.record.get("published") != told and log_results(run, metrics):
        run.record["published"] = told
        run.save()


def log_results(run: Run, metrics: dict[str, float]) -> bool:
    """Log numbers, tables and the export; returns False where W&B is switched off."""
    recipe, served, evaluated = run.recipe, run.report("serve-check"), run.report("eval")
    with Tracker(recipe.tracking.project, str(recipe.run.name), recipe.model_dump(mode="json"), run.path) as tracker:
        tracker.log(metrics, run.report("train")["steps"])
        tracker.table("acceptance", ACCEPTANCE_COLUMNS, acceptance_rows(served))
        domains = [(name, one["drafts"], one["mean_acceptance_length"]) for name, one in evaluated["by_domain"].items()]
        tracker.table("accept length by domain", DOMAIN_COLUMNS, domains)
        metadata = {
            "head": recipe.head.type,
            "mean_acceptance_length": served["served"]["mean_acceptance_length"],
            "speculative_config": read_json(run.folder("export") / "speculative_config.json"),
        }
        tracker.artifact(run.folder("export"), f"{recipe.run.name}-head", "model", metadata)
        return tracker.mode != "disabled"


def acceptance_rows(served: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [
        (one["k"], position + 1, *(one[kind]["per_position"][position] for kind in KINDS))
        for one in served["by_k"].values()
        for position in range(one["k"])
    ]


# ---- numbers by name -------------------------------------------------------------------------------------


def result_metrics(run: Run) -> dict[str, float]:
    """Numbers of the evaluation and, where the head was served, of that; a rate that nothing was counted for is absent.

    `eval/...`, `predicted/k3/...`, `walk/k3/...` and `served/k3/...` each hold `position_1` (share of all rounds),
    `conditional_1` (given the earlier ones), `accept_length`, and the same below `<domain>/`; `economics/...` says what
    was timed and what `drafthead plan` makes of it.
    """
    values = acceptance_metrics("eval", run.report("eval"))
    if run.has("serve-check"):
        served = run.report("serve-check")
        for one in served["by_k"].values():
            for kind in KINDS:
                values |= acceptance_metrics(f"{kind}/k{one['k']}", one[kind])
        values |= economic_metrics(served, find_advice(run))
    return {name: value for name, value in values.items() if value is not None}


def acceptance_metrics(prefix: str, report: dict[str, Any]) -> dict[str, Any]:
    values = {
        f"{prefix}/accept_length": report["mean_acceptance_length"],
        f"{prefix}/mean_of_requests_accept_length": report["mean_of_requests_acceptance_length"],
        f"{prefix}/draft_acceptance_rate": report["draft_acceptance_rate"],
        f"{prefix}/rounds": report["drafts"],
    }
    for name, key in (("position", "per_position"), ("conditional", "conditional")):
        values |= {f"{prefix}/{name}_{place}": rate for place, rate in enumerate(report[key], 1)}
    for domain, part in report.get("by_domain", {}).items():
        values |= acceptance_metrics(f"{prefix}/{metric_name(domain)}", part)
    return values


def economic_metrics(served: dict[str, Any], advice: dict[str, Any] | str) -> dict[str, Any]:
    values = {"economics/plain/ms_per_token": served["plain_ms_per_token"]}
    for one in served["by_k"].values():
        values |= {f"economics/k{one['k']}/{name}": one[name] for name in ("ms_per_token", "speedup_batch_1")}
    if isinstance(advice, str):
        return values
    values |= {"economics/plan_k": advice["k"], "economics/plan_speedup": advice["speedup"]}
    values |= {f"economics/k{row['k']}/plan_speedup": row["speedup"] for row in advice["table"] if row["k"]}
    for one in advice.get("by_batch", ()):
        values |= {f"economics/batch{one['batch']}/plan_{name}": one[name] for name in ("k", "speedup")}
    return values


def metric_name(text: str) -> str:
    """W&B sorts and filters by names of letters, digits and underscores alone."""
    return re.sub(r"\W", "_", text, flags=re.ASCII)
