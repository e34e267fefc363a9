"""Numbers as the page shows them: rounded text, with the exact value, its address and its definition."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from drafthead.pipeline.report.sources import MISSING, Sources, address
from drafthead.pipeline.report.terms import TERMS, Term
from markupsafe import Markup, escape

Place = Sequence[str | int]
"""A file and the keys below it."""
NONE = "–"
"""Shown where nothing was counted."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How a kind of number is written."""

    form: str
    scale: float = 1
    unit: str = ""
    """Stands behind the number, not in it."""


KINDS = {
    "rate": Kind(form=".3f"),
    "length": Kind(form=".3f"),
    "ratio": Kind(form=".2f", unit="×"),
    "percent": Kind(form=".1f", scale=100, unit=" %"),
    "share": Kind(form="+.1f", scale=100, unit=" %"),
    "ms": Kind(form=".2f", unit=" ms"),
    "seconds": Kind(form=",.1f"),
    "count": Kind(form=","),
    "decimal": Kind(form=",.3f"),
    "short": Kind(form=".3g"),
    "signed": Kind(form="+.4f"),
    "text": Kind(form=""),
}


@dataclass
class Numbers:
    """What the template calls to show values of a run; remembers which terms it defined."""

    sources: Sources
    used: dict[str, None] = field(default_factory=dict)

    def show(self, kind: str, term: str, *place: str | int) -> Markup:
        """The number at an address."""
        file, *keys = place
        value = self.sources.find(str(file), *keys)
        return self._span(kind, term, value, address(str(file), keys), "")

    def difference(self, kind: str, term: str, minuend: Place, subtrahend: Place) -> Markup:
        values = [self._value(minuend), self._value(subtrahend)]
        value = None if None in values else values[0] - values[1]
        return self._span(kind, term, value, _addresses(minuend, subtrahend), "difference")

    def total(self, kind: str, term: str, places: Sequence[Place]) -> Markup:
        known = [place for place in places if self._value(place) is not None]
        return self._span(kind, term, sum(map(self._value, known)), _addresses(*known), "sum")

    def interval(self, *place: str | int) -> Markup:
        """Both ends of the interval of the number at an address; nothing where none was computed."""
        file, *keys = place
        where = (str(file), *keys[:-1], f"{keys[-1]}_interval")
        if self._value(where) is None:
            return Markup("")
        low, high = (self.show("length", "interval", *where, end) for end in (0, 1))
        return Markup("{} to {}").format(low, high)

    def term(self, name: str, label: str = "") -> Markup:
        """A term's name, leading to its definition."""
        term = TERMS[name]
        self.used[name] = None
        return Markup('<a class="term" href="#term-{}" data-term="{}" title="{}">{}</a>').format(
            name, name, term.definition, label or term.label
        )

    def defined(self) -> list[tuple[str, Term]]:
        """Every term that was used so far, in the order of `TERMS`."""
        return [(name, term) for name, term in TERMS.items() if name in self.used]

    def bar(self, *place: str | int, least: float = 0, most: float = 1) -> Markup:
        """An attribute that draws the value behind the number of a cell, as a bar on a scale from `least` to `most`."""
        value = self._value(place)
        if value is None:
            return Markup("")
        return Markup(' class="bar" style="--part:{:.4f}"').format((value - least) / (most - least))

    def _value(self, place: Place) -> Any:
        file, *keys = place
        value = self.sources.find(str(file), *keys)
        return None if value is MISSING else value

    def _span(self, kind: str, term: str, value: Any, where: str, operation: str) -> Markup:
        self.used[term] = None
        shape = KINDS[kind]
        absent = value is MISSING
        shown = None if absent else value
        text = NONE if shown is None else write(shape, shown)
        attributes = Markup(' data-path="{}" data-value="{}" data-term="{}"').format(where, _exact(shown), term)
        if operation:
            attributes += Markup(' data-operation="{}"').format(operation)
        if shape.scale != 1:
            attributes += Markup(' data-scale="{}"').format(f"{shape.scale:g}")
        hint = TERMS[term].definition if not absent else f"Not in the file. {TERMS[term].definition}"
        name = "n absent" if absent else "n"
        unit = escape(shape.unit) if shown is not None else ""
        return Markup('<span class="{}"{} title="{}">{}</span>{}').format(name, attributes, hint, text, unit)


def write(kind: Kind, value: Any) -> str:
    return format(value * kind.scale, kind.form) if isinstance(value, int | float) and kind.form else str(value)


def _exact(value: Any) -> str:
    return "null" if value is None else repr(value) if isinstance(value, float) else str(value)


def _addresses(*places: Place) -> str:
    """Several addresses; none holds a blank."""
    return " ".join(address(str(file), keys) for file, *keys in places)
