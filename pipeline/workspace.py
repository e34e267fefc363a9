"""A W&B workspace made by code: training, acceptance and economics of a project's runs, side by side.

    drafthead workspace runs/eagle3 --dry-run
    drafthead workspace runs/eagle3 --entity my-team

Which panels there are follows from the run: its k, its domains, what was served. They show every run of the project
that logged the same names.
"""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from drafthead.data.errors import InputError
from drafthead.pipeline.publish import result_metrics
from drafthead.pipeline.recipe import Recipe
from drafthead.pipeline.run_dir import Run
from drafthead.pipeline.throughput import PARTS
from drafthead.pipeline.tracking import is_logged_in

if TYPE_CHECKING:
    import wandb_workspaces.workspaces as ws

STEP = "step"
"""The axis that `Tracker.log` writes: W&B's own counter goes on after a resume."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One picture."""

    title: str
    kind: Literal["line", "bar", "number"]
    metrics: list[str]


@dataclass(frozen=True, kw_only=True)
class Section:
    """Panels under one name."""

    name: str
    panels: list[Panel]


def make_workspace(run: Run, entity: str | None, project: str | None, *, dry_run: bool) -> dict[str, Any]:
    """Save the workspace, or with `dry_run` only say what it would be.

    Returns:
        The object of `drafthead workspace --json`: `entity` (null: the login's own), `project`, `name`, `sections` and
        `url` (null in a dry run).

    Raises:
        InputError: There is no login, or W&B did not take it.
    """
    entity = entity or os.environ.get("WANDB_ENTITY") or None
    project = project or run.recipe.tracking.project
    name, sections = f"drafthead {run.recipe.run.name}", plan_sections(run)
    saved: dict[str, str | None] = {"entity": entity, "url": None}
    if dry_run:
        build(project, entity or "", name, sections)
    else:
        saved |= save(project, entity, name, sections)
    return {**saved, "project": project, "name": name, "sections": [asdict(section) for section in sections]}


def plan_sections(run: Run) -> list[Section]:
    """What the run logs by its recipe and, where it is evaluated, by its reports."""
    sections = [Section(name="training", panels=training_panels(run.recipe))]
    if run.has("eval"):
        names = list(result_metrics(run))
        sections.append(Section(name="acceptance", panels=acceptance_panels(names)))
        sections.append(Section(name="economics", panels=economics_panels(names)))
    return [Section(name=one.name, panels=[panel for panel in one.panels if panel.metrics]) for one in sections]


def training_panels(recipe: Recipe) -> list[Panel]:
    positions = range(1, recipe.eval.k + 1)
    joint = [f"heldout/walk_position_{place}" for place in positions]
    given = [f"heldout/walk_conditional_{place}" for place in positions]
    survival = [f"train/slot_survival_{step}" for step in range(1, recipe.train.depth + 1)]
    return [
        Panel(title="loss", kind="line", metrics=["train/loss"]),
        Panel(title="accept length on held-out answers (walk)", kind="line", metrics=["heldout/walk_accept_length"]),
        Panel(title="held-out: kept, of all rounds, by position", kind="line", metrics=joint),
        Panel(title="held-out: kept, if reached, by position", kind="line", metrics=given),
        Panel(title="training slots that survive step j (not acceptance)", kind="line", metrics=survival),
        Panel(title="learning rate", kind="line", metrics=["train/learning_rate"]),
        Panel(title="gradient norm", kind="line", metrics=["train/grad_norm"]),
        Panel(title="tokens/s", kind="line", metrics=["train/tokens_per_s"]),
        Panel(title="a step's time, ms", kind="line", metrics=["train/step_ms", *(f"train/{one}_ms" for one in PARTS)]),
    ]


def acceptance_panels(names: Sequence[str]) -> list[Panel]:
    """Of the evaluation, then of the server beside what was predicted for it, each by position and by domain."""
    panels = [
        Panel(
            title="evaluated: kept, of all rounds, by position", kind="bar", metrics=_find(names, r"eval/position_\d+")
        ),
        Panel(
            title="evaluated: kept, if reached, by position", kind="bar", metrics=_find(names, r"eval/conditional_\d+")
        ),
        Panel(
            title="accept length: evaluated, predicted, served",
            kind="bar",
            metrics=_find(names, r"(eval|predicted/k\d+|served/k\d+)/accept_length"),
        ),
    ]
    for k in _ks(names):
        for name, what in (("position", "of all rounds"), ("conditional", "if reached")):
            pairs = _find(names, rf"(predicted|served)/{k}/{name}_\d+")
            in_order = sorted(pairs, key=lambda one: (int(one.rpartition("_")[2]), one))
            panels.append(Panel(title=f"{k}: kept, {what}: predicted, served", kind="bar", metrics=in_order))
    for where in ("eval", *(f"served/{k}" for k in _ks(names))):
        panels += _by_domain(names, where)
    return panels


def _by_domain(names: Sequence[str], where: str) -> list[Panel]:
    found = {one.rpartition("/")[2] for one in names if re.fullmatch(rf"{where}/\w+/position_\d+", one)}
    places = sorted(found, key=lambda one: int(one.rpartition("_")[2]))
    return [
        Panel(
            title=f"{where}: {'accept length' if name == 'accept_length' else name.replace('_', ' ')} by domain",
            kind="bar",
            metrics=_find(names, rf"{where}/\w+/{name}"),
        )
        for name in ("accept_length", *places)
    ]


def economics_panels(names: Sequence[str]) -> list[Panel]:
    bars = (
        ("measured: speed-up in vLLM, one request at a time", r"economics/k\d+/speedup_batch_1"),
        ("measured: ms per token", r"economics/(plain|k\d+)/ms_per_token"),
        ("drafthead plan: speed-up by k", r"economics/k\d+/plan_speedup"),
        ("drafthead plan: best k by batch size", r"economics/batch\d+/plan_k"),
        ("drafthead plan: speed-up by batch size", r"economics/batch\d+/plan_speedup"),
    )
    numbers = (("drafthead plan: best k", "economics/plan_k"), ("drafthead plan: speed-up", "economics/plan_speedup"))
    return [
        *(Panel(title=title, kind="number", metrics=_find(names, name)) for title, name in numbers),
        *(Panel(title=title, kind="bar", metrics=_find(names, pattern)) for title, pattern in bars),
    ]


def _find(names: Iterable[str], pattern: str) -> list[str]:
    """Names in the order in which they are logged."""
    return [name for name in names if re.fullmatch(pattern, name)]


def _ks(names: Iterable[str]) -> list[str]:
    """`k3`, `k5` of those that were served."""
    return [name.split("/")[1] for name in _find(names, r"served/k\d+/accept_length")]


# ---- W&B -------------------------------------------------------------------------------------------------


def build(project: str, entity: str, name: str, sections: Sequence[Section]) -> "ws.Workspace":
    """The same with W&B's own classes, which check it."""
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

    def panel(one: Panel) -> Any:
        if one.kind == "line":
            return wr.LinePlot(title=one.title, x=STEP, y=list(one.metrics))
        if one.kind == "bar":
            return wr.BarPlot(title=one.title, metrics=list(one.metrics))
        return wr.ScalarChart(title=one.title, metric=one.metrics[0])

    shown = [ws.Section(name=one.name, panels=[panel(each) for each in one.panels], is_open=True) for one in sections]
    return ws.Workspace(entity=entity, project=project, name=name, sections=shown)


def save(project: str, entity: str | None, name: str, sections: Sequence[Section]) -> dict[str, str]:
    """Save it in W&B; returns its `url` and the `entity` that it belongs to.

    Raises:
        InputError: There is no login, or W&B did not take it.
    """
    if not is_logged_in():
        raise InputError(
            "workspace: W&B knows no key here; run `wandb login` or set WANDB_API_KEY, or look at it with --dry-run"
        )
    import wandb
    from wandb.sdk.lib.service.service_connection import WandbApiFailedError

    try:
        owner = entity or str(wandb.Api().default_entity)
        workspace = build(project, owner, name, sections)
        workspace.save()
        return {"url": str(workspace.url), "entity": owner}
    except (wandb.Error, WandbApiFailedError, OSError, ValueError) as error:
        raise InputError(
            f"workspace: W&B did not take it ({' '.join(str(error).split())[:300]}); does project {project!r} exist "
            f"there, and may you write to it? (--entity, --project; an offline run makes it by its first `wandb sync`)"
        ) from None


# ---- text ------------------------------------------------------------------------------------------------


def render_workspace(made: dict[str, Any]) -> str:
    lines = [f"workspace {made['name']!r} of project {made['entity'] or '(your own entity)'}/{made['project']}"]
    for section in made["sections"]:
        lines.append(f"  {section['name']}")
        lines += [f"    {one['title']} ({one['kind']}): {', '.join(one['metrics'])}" for one in section["panels"]]
    lines.append(made["url"] or "nothing was sent; without --dry-run it is saved, each time as a new view")
    return "\n".join(lines)
