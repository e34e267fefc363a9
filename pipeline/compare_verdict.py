"""Who wins a comparison, if anyone: named only where the paired interval of each difference to another leaves out 0."""

from collections.abc import Mapping
from typing import Any

from drafthead.eval.bootstrap import Quotient, difference_interval, excludes_zero, listed


def find_winner(numbers: Mapping[str, Quotient], *, more_wins: bool, what: str) -> dict[str, Any]:
    """Compare the best with each other contestant, on the same prompts.

    Args:
        numbers: Of each contestant by name, its prompts in the same order.
        more_wins: Whether the largest number is the best, or the smallest.
        what: The number, for the sentence.

    Returns:
        `winner`, a name or None; `best`, whose number is the best; `prompts` that have a say in it; `against`, for
        each other from the second on `name`, `difference` (best - other) and its `interval`; `text`, all of it said.
    """
    known = {name: number for name, number in numbers.items() if number.value is not None}
    ranked = sorted(known, key=lambda name: known[name].value or 0.0, reverse=more_wins)
    if len(ranked) < 2:
        return {"winner": None, "best": None, "prompts": 0, "against": [], "text": f"no winner by {what}: not measured"}
    best, *others = ranked
    against = [_held_against(known[best], known[name], name) for name in others]
    untold = [one["name"] for one in against if not excludes_zero(one["interval"])]
    prompts = known[best].count
    return {
        "winner": None if untold else best,
        "best": best,
        "prompts": prompts,
        "against": against,
        "text": _sentence(best, against, untold, prompts, what),
    }


def _held_against(best: Quotient, other: Quotient, name: str) -> dict[str, Any]:
    assert best.value is not None
    assert other.value is not None
    found = listed(difference_interval(best, other))
    return {"name": name, "difference": best.value - other.value, "interval": found}


def _sentence(best: str, against: list[dict[str, Any]], untold: list[str], prompts: int, what: str) -> str:
    on = f"on {prompts} prompt{'s' if prompts > 1 else ''}"
    if against[0]["interval"] is None:
        return f"no winner by {what}: {best} and {against[0]['name']} cannot be told apart {on}; give two or more"
    if untold:
        doubtful = _against([one for one in against if one["name"] in untold])
        return f"no winner by {what}: {best} and {' and '.join(untold)} cannot be told apart {on} ({doubtful})"
    return f"{best} wins by {what}, {on} ({_against(against)})"


def _against(against: list[dict[str, Any]]) -> str:
    return "; ".join(f"{one['difference']:+.3f} {_ends(one['interval'])} to {one['name']}" for one in against)


def _ends(found: list[float] | None) -> str:
    return "[-]" if found is None else f"[{found[0]:+.3f}, {found[1]:+.3f}]"
