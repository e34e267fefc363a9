"""What a round yields and costs: published tables to every printed digit, and cases done by hand."""

import math

import pytest
from drafthead.data.errors import InputError
from drafthead.eval.economics import (
    LinearCost,
    Rates,
    choose_k,
    choose_k_geometric,
    geometric_tokens,
    k_table,
)

EXPECTED_TOKENS = """
  0.5   1.500   1.750   1.938   1.996   2.000   2.000
  0.6   1.600   1.960   2.306   2.475   2.500   2.500
  0.7   1.700   2.190   2.773   3.199   3.326   3.333
  0.8   1.800   2.440   3.362   4.329   4.887   5.000
  0.9   1.900   2.710   4.095   6.126   8.332  10.000
"""
SPEEDUP_WITH_COST = """
  k=1   tokens/pass 1.800  cost/round 1.1  speedup 1.636
  k=2   tokens/pass 2.440  cost/round 1.2  speedup 2.033
  k=3   tokens/pass 2.952  cost/round 1.3  speedup 2.271
  k=4   tokens/pass 3.362  cost/round 1.4  speedup 2.401
  k=6   tokens/pass 3.951  cost/round 1.6  speedup 2.470
  k=8   tokens/pass 4.329  cost/round 1.8  speedup 2.405
  k=12  tokens/pass 4.725  cost/round 2.2  speedup 2.148
"""
BEST_K = """
  0.02   k=6  2.17x   k=8  2.76x   k=11 3.82x   k=19 6.37x
  0.05   k=4  1.92x   k=6  2.35x   k=8  3.09x   k=13 4.67x
  0.10   k=3  1.67x   k=4  1.98x   k=6  2.47x   k=10 3.43x
  0.30   k=1  1.23x   k=2  1.37x   k=3  1.55x   k=5  1.87x
  1.00   k=0  1.00x   k=0  1.00x   k=0  1.00x   k=0  1.00x
"""


def lines(table: str) -> list[str]:
    return table.strip("\n").split("\n")


def same_rate(alpha: float) -> Rates:
    return Rates(conditional=(alpha,))


def test_the_table_of_expected_tokens() -> None:
    printed = [
        f"{alpha:5.1f}" + "".join(f"  {geometric_tokens(alpha, k):6.3f}" for k in (1, 2, 4, 8, 16, math.inf))
        for alpha in (0.5, 0.6, 0.7, 0.8, 0.9)
    ]
    assert printed == lines(EXPECTED_TOKENS)
    assert f"{geometric_tokens(0.8, 4):.4f}" == "3.3616"
    assert geometric_tokens(1, 4) == 5


@pytest.mark.parametrize(
    ("alpha", "k", "printed"), [(0.9, 6, "5.2"), (0.8, 4, "3.4"), (0.5, 4, "1.9"), (0.3, 4, "1.4")]
)
def test_other_printed_values(alpha: float, k: int, printed: str) -> None:
    assert f"{same_rate(alpha).tokens(k):.1f}" == printed


def test_the_product_of_equal_rates_is_the_geometric_formula() -> None:
    for alpha in (0.0, 0.3, 0.8, 1.0):
        for row in k_table(same_rate(alpha), LinearCost(draft=0, row=0), 16):
            assert row.expected_tokens == pytest.approx(geometric_tokens(alpha, row.k))
            assert row.geometric_tokens == pytest.approx(row.expected_tokens)


def test_the_table_of_speedup_with_cost() -> None:
    rows = k_table(same_rate(0.8), LinearCost(draft=0.1, row=0), 12)
    printed = [
        f"  k={row.k:<2}  tokens/pass {row.expected_tokens:.3f}  cost/round {row.cost:.1f}  speedup {row.speedup:.3f}"
        for row in rows
        if row.k in (1, 2, 3, 4, 6, 8, 12)
    ]
    assert printed == lines(SPEEDUP_WITH_COST)


def test_the_table_of_best_k() -> None:
    printed = []
    for cost in (0.02, 0.05, 0.1, 0.3, 1.0):
        best = [choose_k(same_rate(alpha), LinearCost(draft=cost, row=0), 32) for alpha in (0.6, 0.7, 0.8, 0.9)]
        printed.append(f"  {cost:4.2f}" + "".join(f"   k={one.k:<2} {one.speedup:.2f}x" for one in best))
    assert printed == lines(BEST_K)


@pytest.mark.parametrize(
    ("conditional", "draft", "survival", "tokens", "cost", "speedup"),
    [
        ((0.70, 0.70, 0.70, 0.70), 0.10, "0.700 0.490 0.343 0.240", "2.773", "1.40", "1.98"),
        ((0.80, 0.60, 0.45, 0.30), 0.01, "0.800 0.480 0.216 0.065", "2.561", "1.04", "2.46"),
        ((0.85, 0.78, 0.72, 0.66), 0.03, "0.850 0.663 0.477 0.315", "3.305", "1.12", "2.95"),
        ((0.85,), 0.0, "0.850", "1.850", "1.00", "1.85"),
        ((0.90,), 0.0, "0.900", "1.900", "1.00", "1.90"),
    ],
    ids=["draft model", "independent heads", "feature-level head", "MTP 85%", "MTP 90%"],
)
def test_rates_that_fall_with_the_position(
    conditional: tuple[float, ...], draft: float, survival: str, tokens: str, cost: str, speedup: str
) -> None:
    rates = Rates(conditional=conditional)
    last = k_table(rates, LinearCost(draft=draft, row=0), len(conditional))[-1]
    assert " ".join(f"{share:.3f}" for share in rates.survival(len(conditional))) == survival
    assert (f"{last.expected_tokens:.3f}", f"{last.cost:.2f}", f"{last.speedup:.2f}") == (tokens, cost, speedup)


@pytest.mark.parametrize(
    ("row", "alphas_best"),
    [(0.03, {0.4: 2, 0.6: 3, 0.8: 8, 0.9: 8}), (0.60, {0.4: 0, 0.6: 0, 0.8: 1, 0.9: 2})],
    ids=["low load", "high load"],
)
def test_load_takes_the_gain_away(row: float, alphas_best: dict[float, int]) -> None:
    """Of k = 1, 2, 3, 5, 8, with a head at 5% of a step: rows that cost 60% of one leave little to gain."""
    for alpha, best in alphas_best.items():
        table = k_table(same_rate(alpha), LinearCost(draft=0.05, row=row), 8)
        shown = [one for one in table if one.k in (0, 1, 2, 3, 5, 8)]
        assert max(shown, key=lambda one: one.speedup).k == best


def test_a_case_by_hand() -> None:
    """1 + .8 = 1.8 of 1.45; 1 + .8 + .48 = 2.28 of 1.9; 2.52 of 2.35."""
    choice = choose_k(Rates(conditional=(0.8, 0.6, 0.5)), LinearCost(draft=0.1, row=0.35), 3)
    assert (choice.k, choice.speedup) == (1, pytest.approx(1.8 / 1.45))
    assert [row.speedup for row in choice.table] == pytest.approx([1, 1.8 / 1.45, 2.28 / 1.9, 2.52 / 2.35])
    assert [row.survival for row in choice.table[1:]] == pytest.approx([0.8, 0.48, 0.24])


def test_the_position_decides_where_one_rate_would_mislead() -> None:
    """A head that knows the next token and no further: one rate spreads what it keeps over all positions."""
    rates, cost = Rates(conditional=(0.9, 0.1, 0.1)), LinearCost(draft=0.05, row=0.05)
    assert rates.alpha == pytest.approx((0.9 + 0.09 + 0.009) / (1 + 0.9 + 0.09))
    assert choose_k(rates, cost, 3).k == 1
    assert choose_k_geometric(rates.alpha, cost, 3)[0] == 2


def test_what_loses_is_off() -> None:
    choice = choose_k(Rates(conditional=(0.3, 0.2)), LinearCost(draft=0.1, row=0.35), 2)
    assert (choice.k, choice.speedup) == (0, 1.0)
    even = choose_k(Rates(conditional=(0.5,)), LinearCost(draft=0.25, row=0.25), 1)
    assert even.k == 0, "what only breaks even is not worth its trouble"


@pytest.mark.parametrize(
    ("conditional", "draft", "row"), [((0.8,), 0.1, 0.7), ((0.1, 1.0), 0.1, 0.0)], ids=["the cost", "the tokens"]
)
def test_breaking_even_is_off_whatever_rounding_makes_of_it(
    conditional: tuple[float, ...], draft: float, row: float
) -> None:
    """1.8 / 1.8 and 1.2 / 1.2; in floating point a little more than 1."""
    choice = choose_k(Rates(conditional=conditional), LinearCost(draft=draft, row=row), len(conditional))
    assert max(one.speedup for one in choice.table) > 1
    assert (choice.k, choice.speedup) == (0, 1.0)
    assert choose_k_geometric(0.8, LinearCost(draft=0.1, row=0.7), 1) == (0, 1.0)


def test_behind_the_measured_positions_the_last_rate_is_held_and_said_so() -> None:
    rows = k_table(Rates(conditional=(0.8, 0.5)), LinearCost(draft=0, row=0), 4)
    assert [row.survival for row in rows[1:]] == pytest.approx([0.8, 0.4, 0.2, 0.1])
    assert [row.extrapolated for row in rows] == [False, False, False, True, True]


@pytest.mark.parametrize("rates", [(), (1.01,), (0.5, -0.1), (float("nan"),)], ids=str)
def test_rates_that_are_none_are_refused(rates: tuple[float, ...]) -> None:
    with pytest.raises(InputError, match="conditional: "):
        Rates(conditional=rates)


@pytest.mark.parametrize("cost", [-0.1, float("inf"), float("nan")], ids=str)
def test_costs_that_are_none_are_refused(cost: float) -> None:
    with pytest.raises(InputError, match="draft-cost: "):
        LinearCost(draft=cost, row=0)
    with pytest.raises(InputError, match="row-cost: "):
        LinearCost(draft=0, row=cost)
