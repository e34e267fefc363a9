"""Numbers as a page shows them, held against the files: by their addresses, with nothing of the page's code."""

import json
import math
from decimal import Decimal
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote


class Shown(HTMLParser):
    """The elements of a page that hold a number, those of its pictures, and all ids.

    A number is `{"text": ..., "path": ..., "value": ..., "term": ..., "title": ..., ...}`.
    """

    def __init__(self, page: str):
        super().__init__()
        self.numbers: list[dict[str, str]] = []
        self.ids: set[str] = set()
        self.terms: set[str] = set()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name.removeprefix("data-"): value or "" for name, value in attrs}
        self.tags.append((tag, attributes))
        self.ids |= {attributes["id"]} if "id" in attributes else set()
        names = attributes.get("class", "").split()
        if "n" in names:
            self.numbers.append({**attributes, "text": ""})
        if "term" in names:
            self.terms.add(attributes["term"])

    def handle_data(self, data: str) -> None:
        tag, attributes = self.tags[-1] if self.tags else ("", {})
        if "n" in attributes.get("class", "").split() and not self.numbers[-1]["text"]:
            self.numbers[-1]["text"] = data
        if tag == "text":
            attributes.setdefault("text", data)
        self.texts.append(data)


def resolve(run: Path, address: str, plan: Any) -> Any:
    """The value at an address (RFC 6901, as a URI fragment)."""
    file, _, pointer = address.partition("#")
    if file == "plan":
        value = plan
    elif file.endswith(".jsonl"):
        value = [json.loads(line) for line in (run / file).read_text().splitlines()]
    else:
        value = json.loads((run / file).read_text())
    for part in pointer.split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        value = value[int(key)] if isinstance(value, list) else value[key]
    return value


def expected(run: Path, number: dict[str, str], plan: Any) -> Any:
    """What a number has to be by the files."""
    values = [resolve(run, address, plan) for address in number["path"].split()]
    if "operation" not in number:
        (value,) = values
        return value
    if None in values:
        return None
    return values[0] - values[1] if number["operation"] == "difference" else sum(values)


def faults(run: Path, numbers: list[dict[str, str]], plan: Any) -> list[str]:
    """Every number that is not what the files say, rounded to the digits that are shown."""
    found = []
    for number in numbers:
        try:
            value = expected(run, number, plan)
        except (KeyError, IndexError, ValueError, OSError) as error:
            found.append(f"{number['path']}: {error!r}")
            continue
        if not _is_shown(value, number):
            found.append(f"{number['path']}: {value!r}, shown {number['text']!r} of {number['value']!r}")
    return found


def _is_shown(value: Any, number: dict[str, str]) -> bool:
    text = number["text"]
    if value is None:
        return text == "–" and number["value"] == "null"
    if isinstance(value, str):
        return text == value == number["value"]
    exact = Decimal(text.replace(",", ""))
    unit = 10.0 ** int(exact.as_tuple().exponent)
    scaled = value * float(number.get("scale", 1))
    return float(number["value"]) == value and abs(float(exact) - scaled) <= unit / 2 * (1 + 1e-9) + 1e-12 * abs(scaled)


def curve_faults(page: Shown, series: dict[str, list[tuple[float, float]]]) -> list[str]:
    """Every drawn point that no value of `series` explains, by the ticks of its picture's axes."""
    found = []
    axes: dict[str, list[tuple[float, float]]] = {}
    for tag, attributes in page.tags:
        if tag == "svg":
            axes = {"tick-x": [], "tick-y": []}
        elif tag == "text" and (name := attributes.get("class")) in axes:
            axes[name].append((float(attributes["place"]), float(attributes["text"].replace(",", ""))))
        elif tag == "polyline":
            key, known = attributes["key"], series[attributes["key"]]
            for point in attributes["points"].split():
                place = [
                    _read(axes[name], float(part))
                    for name, part in zip(("tick-x", "tick-y"), point.split(","), strict=True)
                ]
                if not any(_is_near(place, axes, known_point) for known_point in known):
                    found.append(f"{key}: a point at {place}")
    return found


def _read(ticks: list[tuple[float, float]], place: float) -> float:
    (first, low), (last, high) = ticks[0], ticks[-1]
    return low + (place - first) / (last - first) * (high - low)


def _is_near(place: list[float], axes: dict[str, list[tuple[float, float]]], known: tuple[float, float]) -> bool:
    """Within a hundredth of the picture's width and height, twice the rounding of the places."""
    spans = [abs(axes[name][-1][1] - axes[name][0][1]) for name in ("tick-x", "tick-y")]
    return all(math.isclose(a, b, abs_tol=span * 2e-4) for a, b, span in zip(place, known, spans, strict=True))
