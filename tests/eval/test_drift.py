"""Drift: the intervals, and when a difference counts."""

import random

import pytest
from drafthead.eval.drift import Expected, find_drift, judge, newcombe, wilson
from drafthead.eval.vllm_metrics import Count, DraftCounts

Z = 1.959964


def counts(drafts: int, per_position: list[int]) -> DraftCounts:
    return DraftCounts(
        drafts=Count.exact(drafts),
        per_position=tuple(map(Count.exact, per_position)),
        draft_tokens=drafts * len(per_position),
        accepted_tokens=sum(per_position),
    )


def expected(drafts: int, rates: list[float]) -> Expected:
    return Expected(source="runs/x", drafts=drafts, per_position=rates)


def test_intervals_are_those_of_newcombes_paper() -> None:
    """Newcombe 1998, Statistics in Medicine 17: 81/263 by the score method (857-872), 56/70 - 48/80 by method 10."""
    assert wilson(81 / 263, 263, Z) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    sides = [(share, *wilson(share, rounds, Z)) for share, rounds in ((56 / 70, 70), (48 / 80, 80))]
    assert newcombe(sides[0], sides[1]) == pytest.approx((0.0524, 0.3339), abs=5e-5)


def test_the_position_that_fell_is_named_with_its_size() -> None:
    report = find_drift(expected(5000, [0.7, 0.5, 0.3]), counts(5000, [3500, 2500, 900]), tolerance=0.05)
    assert not report["ok"]
    assert [one["verdict"] for one in report["positions"]] == ["as expected", "as expected", "drift"]
    fell = report["positions"][2]
    assert fell["difference"] == pytest.approx(-0.12)
    assert fell["interval"][0] < -0.12 < fell["interval"][1] < -0.05


@pytest.mark.parametrize(
    ("difference", "interval", "verdict"),
    [
        (-0.1, (-0.15, -0.05), "drift"),
        (0.1, (0.05, 0.15), "drift"),
        (-0.04, (-0.045, -0.03), "as expected"),
        (-0.1, (-0.25, 0.05), "too few rounds to tell"),
        (-0.04, (-0.07, -0.01), "too few rounds to tell"),
    ],
    ids=["fell", "rose", "different but small", "large but uncertain", "small but uncertain"],
)
def test_what_counts(difference: float, interval: tuple[float, float], verdict: str) -> None:
    assert judge(difference, interval, 0.05) == verdict


def test_rounding_of_the_log_widens_the_interval() -> None:
    sharp = counts(1000, [450])
    vague = DraftCounts(
        drafts=Count(value=1000, low=950, high=1050),
        per_position=(Count(value=450, low=420, high=480),),
        draft_tokens=1000,
        accepted_tokens=450,
    )
    one, other = (find_drift(expected(10_000, [0.5]), each, tolerance=0.01)["positions"][0] for each in (sharp, vague))
    assert one["verdict"] == "drift"
    assert other["verdict"] == "too few rounds to tell"


def test_false_alarms_stay_below_alpha_over_all_positions() -> None:
    """Same rates on both sides, no tolerance: at most 5 % of 400 tries may alarm, 8 % with luck against us."""
    draw, rates, k = random.Random(0), [0.7, 0.45, 0.3, 0.15], 4
    alarms = 0
    for _ in range(400):
        seen = [[sum(draw.random() < rate for _ in range(150)) for rate in rates] for _ in range(2)]
        before = expected(150, [count / 150 for count in seen[0]])
        alarms += not find_drift(before, counts(150, seen[1]), tolerance=0.0)["ok"]
    assert k == len(rates)
    assert alarms / 400 < 0.08


def test_nothing_accepted_at_all_is_drift_in_few_rounds() -> None:
    report = find_drift(expected(800, [0.5, 0.2]), counts(60, [0, 0]), tolerance=0.05)
    assert [one["verdict"] for one in report["positions"]] == ["drift", "drift"]
