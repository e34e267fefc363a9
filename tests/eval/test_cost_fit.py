"""Two parameters fitted to measured rounds: exact where the model holds, the best of all where it does not."""

import pytest
from drafthead.eval.cost_fit import POOR_FIT, MeasuredRound, fit_costs

KS = (1, 2, 3, 5)


@pytest.mark.parametrize(("draft", "row"), [(0.06, 0.04), (0.0, 0.3), (0.5, 0.0), (0.0, 0.0)])
def test_rounds_that_the_model_describes_give_its_parameters(draft: float, row: float) -> None:
    fit = fit_costs([MeasuredRound(k=k, target=1 + k * row, draft=k * draft) for k in KS])
    assert (fit.cost.draft, fit.cost.row) == pytest.approx((draft, row), abs=1e-12)
    assert fit.largest_error == pytest.approx(0, abs=1e-12)


def test_no_other_costs_are_nearer() -> None:
    """The first further row is dear and the next are cheap, as where a matrix product follows on a vector's."""
    rounds = [MeasuredRound(k=k, target=1.5 + 0.05 * k, draft=0.02 + 0.1 * k) for k in KS]
    fit = fit_costs(rounds)

    def of_round(both: float) -> float:
        return sum(((1 + one.k * both) / one.cost - 1) ** 2 for one in rounds)

    def of_draft(draft: float) -> float:
        return sum(((one.k * draft - one.draft) / one.cost) ** 2 for one in rounds)

    for step in (-0.05, -1e-3, 1e-3, 0.05):
        assert of_round(fit.cost.draft + fit.cost.row + step) > of_round(fit.cost.draft + fit.cost.row)
        assert of_draft(fit.cost.draft + step) > of_draft(fit.cost.draft)


def test_the_error_is_that_of_the_whole_round_with_its_sign() -> None:
    """Rounds of 1.6 and 2 plain steps: the fitted 1 + k c with c = .528 is 4 % below the first, 3 % above the other."""
    fit = fit_costs([MeasuredRound(k=1, target=1.6), MeasuredRound(k=2, target=2.0)])
    c = (0.6 / 1.6**2 + 2 * 1 / 2.0**2) / (1 / 1.6**2 + 4 / 2.0**2)
    assert fit.cost.row == pytest.approx(c)
    assert [fit.error(one) for one in fit.rounds] == pytest.approx([(1 + c) / 1.6 - 1, (1 + 2 * c) / 2 - 1])
    assert fit.error(fit.rounds[0]) < 0 < fit.error(fit.rounds[1])
    assert fit.largest_error == max((fit.error(one) for one in fit.rounds), key=abs)


def test_rows_that_took_no_time_have_no_cost_below_zero() -> None:
    fit = fit_costs([MeasuredRound(k=k, target=0.97, draft=0.05 * k) for k in KS])
    assert fit.cost.row == 0
    assert 0 < fit.cost.draft < 0.05, "the round as a whole is still fitted best"
    assert fit_costs([MeasuredRound(k=1, target=0.9)]).cost(1) == 1


def test_a_step_at_one_k_is_a_poor_fit() -> None:
    fit = fit_costs([MeasuredRound(k=k, target=2.0, draft=0.01 * k) for k in KS])
    assert abs(fit.largest_error) > POOR_FIT
    assert fit.largest_error == fit.error(fit.rounds[0]), "the single draft token, whose row is the dear one"
