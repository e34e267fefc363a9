"""Drift: the intervals, and when a difference counts."""

import random
from dataclasses import replace

import pytest
from drafthead.eval.drift import Expected, design_effects, drafts_at, find_drift, judge, newcombe, wilson
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


def answers_at_random(count: int, seed: int) -> list[list[int]]:
    """Rounds of answers of which each has a rate of its own, as texts have."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        rate = draw.betavariate(4, 6)
        rounds = [draw.random() for _ in range(draw.randint(20, 80))]
        found.append([2 if one < rate**2 else 1 if one < rate else 0 for one in rounds])
    return found


def counts_of(answers: list[list[int]], k: int = 2) -> DraftCounts:
    accepted = [count for one in answers for count in one]
    return counts(len(accepted), [sum(one > place for one in accepted) for place in range(k)])


def test_the_design_effect_is_the_variance_over_answers_by_that_of_rounds() -> None:
    """Two answers of 10 rounds, 8 and 2 kept: (3^2 + 3^2) 2 / (20 x 1/4) = 7.2. Equal answers have none."""
    effects = design_effects([[1] * 8 + [0] * 2, [1] * 2 + [0] * 8], 2)
    assert effects == [pytest.approx(7.2), 1.0]
    assert design_effects([[1, 0], [0, 1]], 1) == [1.0]
    assert Expected(source="x", drafts=9, per_position=[0.5] * 3, design_effects=effects[:1]).effect(2) == effects[0]
    assert Expected(source="x", drafts=9, per_position=[0.5]).effect(0) == 1.0


def test_prompts_of_the_same_kind_are_no_drift() -> None:
    """Rates that were measured over 24 answers, servers with other 200 of the same kind: with rounds taken for
    independent one in five is called drifted beyond the tolerance, although nothing did."""
    alarms = dict.fromkeys(("as if independent", "by answers"), 0)
    tries = 150
    for number in range(tries):
        measured, served = answers_at_random(24, number), answers_at_random(200, 10_000 + number)
        before = counts_of(measured)
        rates = [count.value / before.drafts.value for count in before.per_position]
        blind = expected(before.drafts.value, rates)
        seeing = replace(blind, answers=24, design_effects=design_effects(measured, 2))
        alarms["as if independent"] += not find_drift(blind, counts_of(served), tolerance=0.05)["ok"]
        alarms["by answers"] += not find_drift(seeing, counts_of(served), tolerance=0.05)["ok"]
    assert alarms["as if independent"] > 0.15 * tries
    assert alarms["by answers"] < 0.07 * tries


def test_what_really_fell_is_still_found() -> None:
    measured = answers_at_random(60, 1)
    before = counts_of(measured)
    rates = [count.value / before.drafts.value for count in before.per_position]
    known = replace(expected(before.drafts.value, rates), answers=60, design_effects=design_effects(measured, 2))
    fell = counts(9000, [round(9000 * 0.6 * rates[0]), round(9000 * 0.5 * rates[1])])
    assert [one["verdict"] for one in find_drift(known, fell, tolerance=0.05)["positions"]] == ["drift", "drift"]


# ---- drafts of less than k tokens


def scheduled(lengths: list[int], rates: list[float], seed: int = 0) -> DraftCounts:
    """What a server counts that drafts so many tokens, one number a round."""
    draw, k = random.Random(seed), len(rates)
    kept = []
    for length in lengths:
        count = 0
        while count < length and draw.random() < rates[count]:
            count += 1
        kept.append(count)
    return replace(
        counts(len(kept), [sum(one > place for one in kept) for place in range(k)]), draft_tokens=sum(lengths)
    )


def test_how_many_drafts_came_to_a_position_lies_between_the_bounds() -> None:
    draw = random.Random(5)
    for _ in range(200):
        k = draw.randint(2, 6)
        lengths = [draw.randint(1, k) for _ in range(draw.randint(1, 40))]
        found = scheduled(lengths, [0.7] * k)
        for position in range(k):
            came = drafts_at(found, position)
            assert came.low <= sum(length > position for length in lengths) <= came.high
    full = scheduled([3] * 50, [0.7] * 3)
    assert [drafts_at(full, position) for position in range(3)] == [full.drafts] * 3


def test_a_schedule_by_batch_size_is_no_drift() -> None:
    """k = 3 while quiet and 1 while busy, as `drafthead plan` advises: accepted as ever of what is drafted."""
    conditional, joint = [0.7, 0.6, 0.5], [0.7, 0.42, 0.21]
    served = scheduled([3, 1] * 5000, conditional)
    assert served.per_position[1].value / served.drafts.value < joint[1] - 0.15
    report = find_drift(expected(5000, joint), served, tolerance=0.05)
    assert (report["ok"], report["short_drafts"]) == (True, True)
    assert report["positions"][0]["verdict"] == "as expected"
    fell = find_drift(expected(5000, joint), scheduled([3, 1] * 5000, [0.5, 0.6, 0.5]), tolerance=0.05)
    assert fell["positions"][0]["verdict"] == "drift"
    never = find_drift(expected(5000, joint), scheduled([3, 1] * 5000, [0.7, 0.0, 0.0]), tolerance=0.05)
    assert [one["verdict"] for one in never["positions"]][:2] == ["as expected", "drift"]


def test_nothing_accepted_at_all_is_drift_in_few_rounds() -> None:
    report = find_drift(expected(800, [0.5, 0.2]), counts(60, [0, 0]), tolerance=0.05)
    assert [one["verdict"] for one in report["positions"]] == ["drift", "drift"]
