"""The page of a run: every number is the file's, every one is defined, and what is not there is said so."""

import json
import re
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from drafthead.eval.cost_fit import POOR_FIT
from drafthead.pipeline.arguments import parse
from drafthead.pipeline.cli import report_errors
from drafthead.pipeline.export.folder import serve_command, typed_here
from drafthead.pipeline.report.curves import draw, ticks
from drafthead.pipeline.report.page import TEMPLATE
from drafthead.pipeline.report.terms import TERMS
from drafthead.pipeline.run_dir import Run
from drafthead.pipeline.serve_check import WALK_TOLERANCE
from drafthead.pipeline.summary import render_summary, summarize_run

from tests.pipeline.report.conftest import ATTACK, reported
from tests.pipeline.report.shown import Shown, curve_faults, faults, resolve

Captured = pytest.CaptureFixture[str]


def page_of(run: Path) -> Shown:
    return Shown((run / "report.html").read_text(encoding="utf-8"))


def command(*words: object) -> int:
    """Run the command line in this process; returns its exit code."""
    arguments = parse(list(map(str, words)))
    try:
        with report_errors():
            return int(arguments.command(arguments))
    except SystemExit as stop:
        return int(stop.code or 0)


def plan_of(run: Path, capsys: Captured) -> Any:
    """What `drafthead plan RUN_DIR --json` says."""
    capsys.readouterr()
    assert command("plan", run, "--json") == 0
    return json.loads(capsys.readouterr().out)


def addresses(page: Shown) -> set[str]:
    return {number["path"] for number in page.numbers}


def test_every_number_is_that_of_its_file(finished_run: Path, capsys: Captured) -> None:
    page = page_of(finished_run)
    assert len(page.numbers) > 150
    assert faults(finished_run, page.numbers, plan_of(finished_run, capsys)) == []


def test_a_number_that_is_not_the_files_is_found(finished_run: Path, tmp_path: Path, capsys: Captured) -> None:
    """The comparison itself: with one rate changed behind the page's back it names that rate and what follows."""
    plan = plan_of(finished_run, capsys)
    run = Path(shutil.copytree(finished_run, tmp_path / "tiny"))
    report = json.loads((run / "serve-check" / "report.json").read_text())
    report["by_k"]["3"]["served"]["per_position"][1] += 0.0006
    (run / "serve-check" / "report.json").write_text(json.dumps(report))
    found = faults(run, page_of(run).numbers, plan)
    assert {line.split(":")[0].split()[0] for line in found} == {
        "serve-check/report.json#/by_k/3/served/per_position/1"
    }
    assert len(found) == 2  # the rate and the difference


@pytest.mark.parametrize("run_name", ["finished_run", "hostile_run"])
def test_every_number_and_term_is_defined(run_name: str, request: pytest.FixtureRequest) -> None:
    page = page_of(request.getfixturevalue(run_name))
    assert {number["term"] for number in page.numbers} <= TERMS.keys()
    for name in {number["term"] for number in page.numbers} | page.terms:
        assert f"term-{name}" in page.ids
    assert all(number["title"] == TERMS[number["term"]].definition for number in page.numbers)


@pytest.mark.parametrize("run_name", ["finished_run", "hostile_run"])
def test_a_term_names_the_key_that_its_numbers_come_from(run_name: str, request: pytest.FixtureRequest) -> None:
    page = page_of(request.getfixturevalue(run_name))
    stored = [number for number in page.numbers if "operation" not in number]
    assert [f"{one['term']}: {one['path']}" for one in stored if not is_named(one["term"], one["path"])] == []


def is_named(term: str, path: str) -> bool:
    """Whether the keys of one of a term's metrics all stand in an address, in their order."""
    parts = path.partition("#")[2].split("/")
    if term == "interval":
        return any(part.endswith("_interval") for part in parts)
    rest = [iter(parts) for _ in TERMS[term].metric.split(", ")]
    found = zip(TERMS[term].metric.split(", "), rest, strict=True)
    return any(all(key in left for key in metric.split(".")) for metric, left in found)


def test_the_numbers_that_matter_are_there(finished_run: Path) -> None:
    found = addresses(page_of(finished_run))
    evaluated = json.loads((finished_run / "eval" / "report.json").read_text())
    wanted = {f"eval/report.json#/{kind}/{i}" for kind in ("per_position", "conditional") for i in range(3)}
    wanted |= {f"eval/report.json#/by_domain/{domain}/mean_acceptance_length" for domain in evaluated["by_domain"]}
    wanted |= {
        f"serve-check/report.json#/by_k/{k}/{side}/per_position/{i}"
        for k in (3, 2)
        for side in ("predicted", "walk", "served")
        for i in range(k)
    }
    wanted |= {f"serve-check/report.json#/{name}" for name in ("speedup_batch_1", "identical_to_plain")}
    wanted |= {f"encode/report.json#/{split}/{name}" for split in ("train", "heldout") for name in ("kept", "clipped")}
    wanted |= {"capture/manifest.json#/counts/on_policy/sources/builtin/gap", "train/report.json#/taken_step"}
    wanted |= {f"run.json#/stages/{name}/seconds" for name in ("capture", "train", "serve-check")}
    wanted |= {
        f"eval/report.json#/by_context_length/{row}/{name}" for row in (0, 1) for name in ("from", "to", "drafts")
    }
    wanted |= {"eval/report.json#/by_context_length/1/per_position/2", "eval/report.json#/by_temperature/1/drafts"}
    wanted |= {f"eval/report.json#/{name}/mean_acceptance_length" for name in ("tree", "dynamic_tree", "typical/chain")}
    wanted |= {"eval/report.json#/mean_acceptance_length_interval/1", "eval/report.json#/typical/tree/depth"}
    wanted |= {"cost.json#/served/by_batch/1/rounds/0/speedup", "cost.json#/loop/by_batch/1/rounds/1/fitted_cost"}
    wanted |= {"cost.json#/served/by_batch/0/plain_ms", "plan#/by_batch/1/table/2/speedup"}
    wanted |= {"plan#/k", "plan#/speedup", "run.json#/recipe/serve_check/tolerance"}
    assert wanted - found == set()


def test_what_is_not_served_is_labelled(finished_run: Path) -> None:
    text = " ".join(" ".join(page_of(finished_run).texts).split())
    assert "Not served : vLLM drafts chains" in text
    assert text.count("typical, NOT lossless") == 2
    assert text.count("static tree") == 2
    assert text.count("dynamic tree") == 1


def test_a_position_outside_the_tolerance_is_said(finished_run: Path) -> None:
    text = " ".join(page_of(finished_run).texts)
    assert "NOT served as predicted" in text
    said = re.findall(r"\b(?:within|OUTSIDE)\b(?! the)", text)
    by_k = json.loads((finished_run / "serve-check" / "report.json").read_text())["by_k"].values()
    pairs = [zip(one["predicted"]["per_position"], one["served"]["per_position"], strict=True) for one in by_k]
    assert said == ["within" if abs(a - b) <= 0.02 else "OUTSIDE" for pair in pairs for a, b in pair]
    assert set(said) == {"within", "OUTSIDE"}


def test_the_summary_of_a_run_names_the_page(served_run: Run, cache: Path) -> None:
    summary = summarize_run(served_run) | {"report_path": "runs/tiny/report.html"}
    assert "report: runs/tiny/report.html" in render_summary(summary).splitlines()


def test_the_curves_are_those_of_the_log(finished_run: Path) -> None:
    log = [json.loads(line) for line in (finished_run / "train" / "log.jsonl").read_text().splitlines()]
    report = json.loads((finished_run / "train" / "report.json").read_text())
    last = report.get("last_walk") or report["walk"]
    ends = {"walk_accept_length": last["mean_acceptance_length"]}
    ends |= {f"walk_position_{i + 1}": rate for i, rate in enumerate(last["per_position"])}
    keys = ["loss", "learning_rate", *ends]
    series = {key: [(row["step"], row[key]) for row in log if key in row] for key in keys}
    for key, value in ends.items():
        series[key].append((report["steps"], value))
    page = page_of(finished_run)
    drawn = {attributes["key"]: attributes["points"].split() for tag, attributes in page.tags if tag == "polyline"}
    assert {key: len(points) for key, points in drawn.items()} == {key: len(points) for key, points in series.items()}
    assert curve_faults(page, series) == []
    moved = {**series, "loss": [(step, value * 1.01) for step, value in series["loss"]]}
    assert len(curve_faults(page, moved)) == len(series["loss"])


def test_data_cannot_become_markup(hostile_run: Path, capsys: Captured) -> None:
    page = page_of(hostile_run)
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert any(ATTACK in text for text in page.texts)
    assert faults(hostile_run, page.numbers, plan_of(hostile_run, capsys)) == []


def test_the_page_loads_nothing(finished_run: Path) -> None:
    page = page_of(finished_run)
    links = [attributes.get(name, "#") for _, attributes in page.tags for name in ("src", "href")]
    assert {link[:5] for link in links if not link.startswith("#")} == {"data:"}
    text = (finished_run / "report.html").read_text(encoding="utf-8")
    assert "url(" not in text
    assert "@import" not in text


def test_the_serve_command_is_as_one_types_it_here(served_run: Run, finished_run: Path) -> None:
    """Without its cache's size vLLM's CPU build wants 92 % of the memory, and often does not start."""
    shown = [text for text in page_of(finished_run).texts if "vllm serve" in text]
    assert shown == [typed_here(serve_command(served_run.served_target.path, finished_run / "export"))]


def test_the_revision_of_a_target_from_the_hub_is_said(finished_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished_run, tmp_path / "tiny"))
    recipe = (run / "recipe.yaml").read_text().replace("builtin:tiny-random", "them/model")
    (run / "recipe.yaml").write_text(recipe)
    record = json.loads((run / "run.json").read_text())
    commit = "0123456789abcdef0123456789abcdef01234567"
    record["target_path"] = f"/home/me/hub/models--them--model/snapshots/{commit}"
    (run / "run.json").write_text(json.dumps(record))
    texts = page_of(reported(run)).texts
    assert texts[texts.index("revision") + 1] == commit
    assert any("draft head for them/model" in text for text in texts)


# ---- unfinished runs


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        (["serve-check"], "serve-check"),
        (["serve-check", "export", "eval"], "eval"),
        (["serve-check", "export", "eval", "train"], "train"),
        (
            ["serve-check", "export", "eval", "train", "capture", "draft-vocab", "encode", "respond", "prompts"],
            "encode",
        ),
    ],
    ids=["not-served", "trained", "captured", "nothing"],
)
def test_what_is_not_there_is_said(gone: list[str], said: str, finished_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished_run, tmp_path / "tiny"))
    for name in gone:
        (run / name / "manifest.json").unlink()
    page = page_of(reported(run))
    text = " ".join(page.texts)
    assert f"stage {said} has not finished" in text
    assert "Unfinished:" in text
    files = {address.split("#")[0] for address in addresses(page)} - {"run.json", "plan", "train/log.jsonl"}
    assert not {file for file in files if file.split("/")[0] in gone and file != "train/head.json"}


def test_the_log_of_a_training_that_goes_on_is_drawn(finished_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished_run, tmp_path / "tiny"))
    (run / "train" / "manifest.json").unlink()
    log = (run / "train" / "log.jsonl").read_text().splitlines(keepends=True)
    (run / "train" / "log.jsonl").write_text("".join(log[:2]) + '{"step": 75, "lo')
    drawn = {
        attributes["key"]: attributes["points"].split()
        for tag, attributes in page_of(reported(run)).tags
        if tag == "polyline"
    }
    assert len(drawn["loss"]) == sum("loss" in json.loads(line) for line in log[:2])


def test_costs_of_another_head_are_left_aside(finished_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished_run, tmp_path / "tiny"))
    cost = json.loads((run / "cost.json").read_text())
    (run / "cost.json").write_text(json.dumps({**cost, "head_key": "another"}))
    page = page_of(reported(run))
    assert not {path for path in addresses(page) if path.startswith("cost.json")}
    assert "cost.json is of another head" in " ".join(page.texts)


def test_a_run_before_its_first_stage(finished_run: Path, tmp_path: Path, capsys: Captured) -> None:
    run = tmp_path / "tiny"
    run.mkdir()
    shutil.copy(finished_run / "recipe.yaml", run)
    assert command("report", run, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"report_path": str(run / "report.html")}
    assert "not measured yet" in " ".join(page_of(run).texts)


def test_what_cannot_be_reported_is_one_line(finished_run: Path, tmp_path: Path, capsys: Captured) -> None:
    run = Path(shutil.copytree(finished_run, tmp_path / "tiny"))
    (run / "eval" / "report.json").write_text('{"k": 3}')
    assert command("report", run) == 2
    assert "eval/report.json: lacks drafts; remove eval and make it again" in capsys.readouterr().err
    (run / "eval" / "report.json").write_text('{"k": ')
    assert command("report", run) == 2
    assert "eval/report.json: not valid JSON" in capsys.readouterr().err
    assert command("report", tmp_path / "nowhere") == 2
    assert "not a run directory" in capsys.readouterr().err


def test_no_term_is_left_over(finished_run: Path) -> None:
    """Of those that this run has no number for, each stands in a template."""
    templates = "".join(path.read_text(encoding="utf-8") for path in TEMPLATE.glob("*.jinja"))
    used = {number["term"] for number in page_of(finished_run).numbers} | page_of(finished_run).terms
    assert [name for name in TERMS if name not in used and f"'{name}'" not in templates] == []


def test_definitions_say_the_bounds_that_are_applied() -> None:
    assert f"(against the walk: {WALK_TOLERANCE:g})" in TERMS["tolerance"].definition
    assert f"more than {100 * POOR_FIT:g} %" in TERMS["poor_fit"].definition


# ---- axes


@pytest.mark.parametrize(
    ("low", "high"), [(0, 2841), (1.62, 1.71), (3.1, 3.1), (0, 0), (-4.2e-7, 9e-4), (1e6, 1e6 + 3)]
)
def test_axes_enclose_their_values(low: float, high: float) -> None:
    found = ticks(low, high)
    assert found[0] <= low <= high <= found[-1]
    assert 3 <= len(found) <= 7
    assert found == sorted(found)


def test_long_logs_are_thinned_but_keep_both_ends() -> None:
    rows = [{"step": step, "loss": 1 / step} for step in range(1, 5000)]
    chart = draw("loss", rows, ["loss"], None)
    assert chart is not None
    assert len(chart.lines[0].points) <= 401
    assert chart.lines[0].points[-1][0] > chart.lines[0].points[-2][0]


def test_values_that_are_no_numbers_are_not_drawn() -> None:
    rows = [{"step": 1, "loss": float("nan")}, {"step": 2, "loss": None}, {"step": 3}]
    assert draw("loss", rows, ["loss"], None) is None


def test_an_address_leads_to_names_with_slashes(hostile_run: Path) -> None:
    """The resolver of these tests is the standard's: escapes of the pointer inside those of the fragment."""
    report = json.loads((hostile_run / "eval" / "report.json").read_text())
    domain = next(iter(report["by_domain"]))
    assert "/" in domain
    pointer = f"/by_domain/{domain.replace('~', '~0').replace('/', '~1')}/drafts"
    (path,) = [one for one in addresses(page_of(hostile_run)) if unquote(one) == f"eval/report.json#{pointer}"]
    assert resolve(hostile_run, path, None) == report["by_domain"][domain]["drafts"]
