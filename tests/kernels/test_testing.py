"""The assertions that compare kernels with their definitions, the interpreter, and the self-check's verdict."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from drafthead.kernels import testing
from drafthead.kernels.backend import interpreting
from drafthead.kernels.testing import same, within_budget

EXACT = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
PLAIN = torch.tensor([1.01, -2.0, 0.5])


@pytest.mark.parametrize(
    ("found", "fits"),
    [([0.99, -2.0, 0.5], True), ([1.0, -2.0, 0.511], False), ([1.0, float("nan"), 0.5], False)],
    ids=["as far off", "farther off", "NaN"],
)
def test_error_is_bounded_by_plain_torch(found: list[float], fits: bool) -> None:
    if fits:
        within_budget(torch.tensor(found), EXACT, PLAIN)
    else:
        with pytest.raises(AssertionError, match=r"loss.* first at"):
            within_budget(torch.tensor(found), EXACT, PLAIN, what="loss")


def test_slack_is_relative_to_the_largest_value() -> None:
    within_budget(EXACT.float() * 1.001, EXACT, EXACT.float(), eps=0.002)
    with pytest.raises(AssertionError):
        within_budget(EXACT.float() * 1.001, EXACT, EXACT.float())


@pytest.mark.parametrize("wrong", [0.0, float("inf"), float("nan")])
def test_what_is_not_finite_must_be_equal(wrong: float) -> None:
    exact = torch.tensor([float("-inf"), 1.0], dtype=torch.float64)
    within_budget(exact.float(), exact, exact.float())
    with pytest.raises(AssertionError, match="not finite"):
        within_budget(torch.tensor([wrong, 1.0]), exact, exact.float())


def test_ids_must_be_the_same_in_shape_and_dtype_too() -> None:
    ids = torch.tensor([[1, 2], [3, 4]])
    same(ids, ids.clone())
    with pytest.raises(AssertionError, match=r"tokens int64 \[2, 2\]: 1 wrong, first at \(1, 0\): 5 instead of 3"):
        same(torch.tensor([[1, 2], [5, 4]]), ids, "tokens")
    with pytest.raises(AssertionError, match="shape"):
        same(ids[:1], ids)
    with pytest.raises(AssertionError, match="int32 instead of"):
        same(ids.int(), ids)


def test_outputs_that_nobody_writes_are_seen() -> None:
    assert torch.empty(3).isnan().all()
    assert (torch.empty(3, dtype=torch.int32) == 2**31 - 1).all()


def test_the_interpreter_does_not_reach_other_processes() -> None:
    """`vllm serve` and the command line, started by other tests, must compile their kernels."""
    if not interpreting():
        pytest.skip("kernels of this process are compiled")
    assert "TRITON_INTERPRET" not in os.environ
    code = "from drafthead.kernels.backend import interpreting; print(interpreting())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_every_operation_with_a_kernel_has_a_check() -> None:
    folder = Path(testing.__file__).parent
    assert [path for path in folder.glob("*/kernel.py") if not path.with_name("check.py").exists()] == []


def test_a_mismatch_is_told_with_the_seed_that_shows_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from drafthead.kernels.verify_greedy import check

    seen = []

    def fail_at(seed: int, device: str) -> None:
        seen.append(seed)
        assert seed != 12, "tokens differ"

    monkeypatch.setattr(check, "check", fail_at)
    arguments = ["--op", "verify_greedy", "--device", "cpu", "--seed"]
    assert testing.main([*arguments, "9", "--seeds", "3"]) == 0
    assert testing.main([*arguments, "10", "--seeds", "9"]) == 1
    assert seen == [9, 10, 11, 10, 11, 12]
    told = capsys.readouterr().out
    assert "FAILED on cpu: tokens differ" in told
    assert "--seed 12" in told
