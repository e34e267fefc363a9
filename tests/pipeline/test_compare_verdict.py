"""A winner is named only where the prompts tell it from every other contestant."""

from typing import Any

from drafthead.eval.bootstrap import Quotient
from drafthead.pipeline.compare_verdict import find_winner


def lengths(*values: float) -> Quotient:
    return Quotient.of([(value, 1) for value in values])


BASE = (1.2, 1.9, 2.8, 1.5, 2.2, 1.7, 2.5, 1.4)
WEAK = lengths(*BASE)
STRONG = lengths(*(value + 0.1 + 0.01 * (place % 3) for place, value in enumerate(BASE)))
NEAR = lengths(*(value + (0.12 if place % 2 else -0.02) for place, value in enumerate(BASE)))


def verdict(**numbers: Quotient) -> Any:
    return find_winner(numbers, more_wins=True, what="tokens per pass")


def test_a_small_difference_on_every_prompt_wins() -> None:
    found = verdict(weak=WEAK, strong=STRONG)
    assert (found["winner"], found["best"], found["prompts"]) == ("strong", "strong", 8)
    (against,) = found["against"]
    assert against["name"] == "weak"
    low, high = against["interval"]
    assert 0 < low < against["difference"] < high < 0.2
    assert found["text"] == (f"strong wins by tokens per pass, on 8 prompts (+0.109 [{low:+.3f}, {high:+.3f}] to weak)")


def test_less_is_better_for_times() -> None:
    found = find_winner({"weak": WEAK, "strong": STRONG}, more_wins=False, what="decode time")
    assert found["winner"] == "weak"
    assert found["against"][0]["interval"][1] < 0


def test_no_winner_where_the_interval_holds_zero() -> None:
    found = verdict(weak=WEAK, near=NEAR)
    assert (found["winner"], found["best"]) == (None, "near")
    assert found["text"].startswith(
        "no winner by tokens per pass: near and weak cannot be told apart on 8 prompts (+0.050 [-"
    )


def test_the_best_must_be_told_from_all_others() -> None:
    """The second may be told apart, and a third that varies more may not."""
    wild = lengths(*(value + 0.05 + (0.6 if place % 2 else -0.6) for place, value in enumerate(BASE)))
    found = verdict(weak=WEAK, wild=wild, strong=STRONG)
    assert [one["name"] for one in found["against"]] == ["wild", "weak"]
    assert found["winner"] is None
    assert "strong and wild cannot be told apart" in found["text"]
    assert "weak" not in found["text"]


def test_one_prompt_or_none_names_no_winner() -> None:
    one = verdict(a=lengths(1.5), b=lengths(2.5))
    assert (one["winner"], one["best"], one["against"][0]["interval"]) == (None, "b", None)
    assert one["text"] == ("no winner by tokens per pass: b and a cannot be told apart on 1 prompt; give two or more")
    none = verdict(a=lengths(1.5, 2), b=lengths())
    assert none == {
        "winner": None,
        "best": None,
        "prompts": 0,
        "against": [],
        "text": "no winner by tokens per pass: not measured",
    }
