"""The dashboard and the alert rules in docs/monitoring: every metric in them is one that the installed vLLM exports."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.eval.vllm_source import vllm_folder

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "monitoring"
METRIC = re.compile(r"vllm:\w+")
RECORDED = re.compile(r"\bmodel(?:_\w+)?:\w+:\w+")
EXPORTED_AS = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
}
LABELS = {"model_name", "position", "le"}


def exported_names() -> set[str]:
    """What `/metrics` of the installed vLLM may hold, by the calls in its source that make counters and the like."""
    names: set[str] = set()
    for path in (vllm_folder() / "v1").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if '"vllm:' not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call):
                kind = ast.unparse(node.func).rpartition(".")[2].lower().strip("_").removesuffix("_cls")
                given = [word.value for word in node.keywords if word.arg == "name"]
                names.update(_named(kind, given))
            elif isinstance(node, ast.Tuple) and node.elts:  # pairs of a counter's name and its text
                names.update(_named("counter", node.elts[:1]))
    return names


def _named(kind: str, nodes: list[ast.expr]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("vllm:"):
            yield from (node.value + suffix for suffix in EXPORTED_AS.get(kind, ()))


def dashboard() -> dict[str, Any]:
    value = json.loads((FOLDER / "grafana-dashboard.json").read_text(encoding="utf-8"))
    assert isinstance(value, dict)
    return value


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "prometheus-alerts.yaml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> list[str]:
    shown = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    chosen = [one["query"]["query"] for one in dashboard()["templating"]["list"] if one["type"] == "query"]
    return [*shown, *chosen, *(rule["expr"] for rule in rules())]


def test_every_metric_is_exported_by_vllm() -> None:
    exported = exported_names()
    assert {"vllm:spec_decode_num_drafts_total", "vllm:num_requests_running"} <= exported
    assert "vllm:spec_decode_num_drafts" not in exported
    used = {name for expression in expressions() for name in METRIC.findall(expression)}
    assert used - exported == set()
    counters = {name for name in exported if name.startswith("vllm:spec_decode_num_")}
    assert counters <= used


def test_recorded_names_are_made_by_a_rule() -> None:
    made = {rule["record"] for rule in rules() if "record" in rule}
    used = {name for rule in rules() for name in RECORDED.findall(METRIC.sub("", rule["expr"]))}
    assert used == made


@pytest.mark.parametrize("expression", expressions())
def test_expressions_are_closed_and_ask_for_labels_that_exist(expression: str) -> None:
    bare = re.sub(r'"[^"]*"', '""', expression)
    for opening, closing in ("()", "[]", "{}"):
        assert bare.count(opening) == bare.count(closing)
    grouped = re.findall(r"(?:by|on|ignoring) \(([^)]*)\)", bare)
    assert {label.strip() for group in grouped for label in group.split(",")} <= LABELS
    assert set(re.findall(r"(\w+)\s*=~?\s*\"\"", bare)) <= LABELS


def test_alerts_say_what_to_do() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len({rule["alert"] for rule in alerts}) == len(alerts) >= 4
    for rule in alerts:
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule["labels"]["severity"] in ("critical", "warning", "info")


def test_panels_have_places_and_numbers_of_their_own() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)
    assert all(panel["description"] for panel in panels)
