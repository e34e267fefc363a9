"""Intervals by bootstrap over prompts: they hold the truth as often as they say, also where prompts are few."""

import pytest
import torch
from drafthead.eval.bootstrap import (
    Quotient,
    difference_interval,
    excludes_zero,
    interval,
    ratio_interval,
    student_quantile,
)

K = 3


def measured(prompts: int, generator: torch.Generator) -> tuple[Quotient, Quotient]:
    """Pooled accept length of two contestants whose rates differ by 0.05, and rise and fall together by prompt."""
    rate_N = torch.rand(prompts, generator=generator, dtype=torch.float64) * 0.7 + 0.05
    quotients = []
    for shift in (0.0, 0.05):
        noise_N = 0.04 * torch.randn(prompts, generator=generator, dtype=torch.float64)
        length_N = 1 + K * (rate_N + shift + noise_N).clamp(0, 1)
        rounds_N = (96 / length_N).round()  # answers of one length: where more is accepted there are fewer rounds
        quotients.append(Quotient(top_N=length_N * rounds_N, bottom_N=rounds_N))
    return quotients[0], quotients[1]


TRUTH = measured(400_000, torch.Generator().manual_seed(7))


@pytest.mark.parametrize("prompts", [4, 24])
def test_of_a_hundred_intervals_about_95_hold_the_truth(prompts: int) -> None:
    generator = torch.Generator().manual_seed(prompts)
    truths = (TRUTH[0].value, TRUTH[1].value, TRUTH[1].value - TRUTH[0].value)  # type: ignore[operator]
    hits = torch.zeros(3)
    for _ in range(300):
        one, other = measured(prompts, generator)
        found = (interval(one), interval(other), difference_interval(other, one))
        hits += torch.tensor([low < truth < high for (low, high), truth in zip(found, truths, strict=True)])  # type: ignore[misc]
    assert (hits / 300).tolist() == pytest.approx([0.95] * 3, abs=0.035)


def test_of_a_hundred_intervals_of_a_ratio_about_95_hold_the_truth() -> None:
    generator = torch.Generator().manual_seed(3)
    truth = TRUTH[1].value / TRUTH[0].value  # type: ignore[operator]
    hits = 0
    for _ in range(300):
        one, other = measured(24, generator)
        found = ratio_interval(other, one)
        assert found is not None
        assert sum(found) / 2 == pytest.approx(other.value / one.value)  # type: ignore[operator]
        hits += found[0] < truth < found[1]
    assert hits / 300 == pytest.approx(0.95, abs=0.035)
    assert ratio_interval(one, one) == (1, 1)


def test_pairing_cancels_what_the_prompts_add_to_both() -> None:
    one, other = measured(24, torch.Generator().manual_seed(0))
    paired, unpaired = difference_interval(other, one), difference_interval(other, one, paired=False)
    assert paired is not None
    assert unpaired is not None
    assert paired[1] - paired[0] < (unpaired[1] - unpaired[0]) / 2
    assert excludes_zero(paired)
    assert not excludes_zero(unpaired)
    assert excludes_zero((-2, -1))
    assert not excludes_zero(None)


def test_the_difference_is_that_of_the_numbers_and_turns_with_their_order() -> None:
    one, other = measured(12, torch.Generator().manual_seed(1))
    there, back = difference_interval(one, other), difference_interval(other, one)
    assert there is not None
    assert back is not None
    assert there == pytest.approx((-back[1], -back[0]))
    assert sum(there) / 2 == pytest.approx(one.value - other.value)  # type: ignore[operator]
    assert difference_interval(one, one) == (0, 0)


def test_a_seed_gives_the_same_interval_and_a_level_its_width() -> None:
    one, _ = measured(10, torch.Generator().manual_seed(2))
    assert interval(one) == interval(one)
    assert interval(one) != interval(one, seed=1)
    assert interval(one) == pytest.approx(interval(one, seed=1), rel=0.02)
    narrow, wide = interval(one, level=0.5), interval(one, level=0.99)
    assert narrow is not None
    assert wide is not None
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


def test_a_mean_has_the_textbook_interval() -> None:
    values = [1.0, 2.0, 4.0, 9.0]
    spread = float(torch.tensor(values).std()) / 2  # of the mean of four
    found = interval(Quotient.of([(value, 1) for value in values]))
    assert found == pytest.approx((4 - 3.182 * spread, 4 + 3.182 * spread), rel=0.03)


@pytest.mark.parametrize(
    "parts", [[], [(3, 2)], [(3, 2), (0, 0)]], ids=["no prompt", "one prompt", "one prompt with rounds"]
)
def test_one_prompt_gives_no_interval(parts: list[tuple[float, float]]) -> None:
    one = Quotient.of(parts)
    assert ratio_interval(one, one) is None
    assert interval(one) is None
    assert difference_interval(one, one) is None
    assert one.value == (1.5 if parts else None)


def test_prompts_without_rounds_change_nothing() -> None:
    parts = [(3.0, 2.0), (8.0, 4.0), (5.0, 5.0)]
    alone, beside = Quotient.of(parts), Quotient.of([*parts, (0, 0), (0, 0)])
    assert beside.value == alone.value
    assert beside.count == 3
    found = interval(beside)
    assert found is not None
    assert found[0] < 16 / 11 < found[1]


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (10, 2.2281), (120, 1.9799)],
)
def test_quantiles_of_student(degrees: int, expected: float) -> None:
    assert student_quantile(0.95, degrees) == pytest.approx(expected, abs=1e-4)
    assert student_quantile(0.99, 9) == pytest.approx(3.2498, abs=1e-4)
