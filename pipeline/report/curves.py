"""Curves of a training, ready to be drawn: places in the picture of axes, lines and points."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

WIDTH, HEIGHT = 360, 200
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 10, 34
MOST_POINTS = 400
STEPS = (1, 2, 5, 10)


@dataclass(frozen=True, kw_only=True)
class Tick:
    """A marked value of an axis and where it lies."""

    place: float
    label: str


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve; `key` is what the log calls it."""

    key: str
    label: str
    points: list[tuple[float, float]]
    """Places in the picture."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One picture."""

    term: str
    lines: list[Line]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    dots: bool
    """Whether every point is marked: where there are few."""
    marked: float | None
    """Place of the step whose head was taken."""
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    top: int = TOP
    bottom: int = HEIGHT - BOTTOM


def training_charts(log: list[dict[str, Any]], report: dict[str, Any] | None) -> list[Chart]:
    """Loss, held-out walks and learning rate over the steps; a picture without points is left out.

    The walk behind the last step stands in the report alone, as `walk`, or as `last_walk` where an earlier step's head
    was taken.
    """
    rows = [*log, *([_last_walk(report)] if report else [])]
    positions = (
        [f"walk_position_{i + 1}" for i in range(sum("walk_position_" in key for key in rows[-1]))] if rows else []
    )
    marked = report["taken_step"] if report else None
    wanted = [
        ("loss", ["loss"], None),
        ("walk_length", ["walk_accept_length"], marked),
        ("walk_position", positions, marked),
        ("learning_rate", ["learning_rate"], None),
    ]
    charts = (draw(term, rows, keys, mark) for term, keys, mark in wanted)
    return [chart for chart in charts if chart is not None]


def _last_walk(report: dict[str, Any]) -> dict[str, Any]:
    walk = report.get("last_walk") or report["walk"]
    rates = {f"walk_position_{i + 1}": rate for i, rate in enumerate(walk["per_position"])}
    return {"step": report["steps"], "walk_accept_length": walk["mean_acceptance_length"], **rates}


def draw(term: str, rows: list[dict[str, Any]], keys: Sequence[str], marked: int | None) -> Chart | None:
    """The values under some keys over the step."""
    series = {key: _thinned([(row["step"], row[key]) for row in rows if _is_number(row.get(key))]) for key in keys}
    series = {key: points for key, points in series.items() if points}
    if not series:
        return None
    values = [value for points in series.values() for _, value in points]
    x_values, y_values = (
        ticks(0, max(step for points in series.values() for step, _ in points)),
        ticks(min(values), max(values)),
    )
    x_range, y_range = (x_values[0], x_values[-1]), (y_values[0], y_values[-1])

    def x(step: float) -> float:
        return LEFT + (step - x_range[0]) / (x_range[1] - x_range[0]) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - y_range[0]) / (y_range[1] - y_range[0]) * (HEIGHT - TOP - BOTTOM)

    return Chart(
        term=term,
        lines=[
            Line(
                key=key,
                label=key.removeprefix("walk_position_") if len(series) > 1 else "",
                points=[(round(x(step), 2), round(y(value), 2)) for step, value in points],
            )
            for key, points in series.items()
        ],
        x_ticks=[Tick(place=round(x(value), 2), label=f"{value:,.6g}") for value in x_values],
        y_ticks=[Tick(place=round(y(value), 2), label=f"{value:.6g}") for value in y_values],
        dots=max(len(points) for points in series.values()) <= 40,
        marked=None if marked is None else round(x(marked), 2),
    )


def ticks(low: float, high: float) -> list[float]:
    """Three to seven round values, of which the outer ones enclose `low` and `high`."""
    if high <= low:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    rough = (high - low) / 4
    scale = 10 ** math.floor(math.log10(rough))
    step = next(scale * size for size in STEPS if scale * size >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Every n-th point and the last, so that a long training draws no more than the eye can see."""
    stride = math.ceil(len(points) / MOST_POINTS)
    return points if stride <= 1 else [*points[:-1:stride], points[-1]]


def last_row(log: Iterable[dict[str, Any]], key: str) -> int | None:
    """Number of the last line that has a value."""
    return next((place for place, row in reversed(list(enumerate(log))) if key in row), None)
