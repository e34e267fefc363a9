"""The benchmark of stored types: it codes the states of one capture again, which gives the files that capture gives."""

import shutil
from types import ModuleType

import pytest
from drafthead.eval.acceptance import RequestRounds
from drafthead.pipeline.run_dir import MANIFEST, Run

from tests.bench_module import load_bench
from tests.conftest import MakeRun


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_bench("store")


def captured(make_run: MakeRun, name: str, *overrides: str) -> Run:
    run = make_run(name, "capture.shard_tokens=1k", *overrides)
    for stage in ("prompts", "respond", "encode", "capture"):
        run.run_stage(stage)
    return run


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@pytest.mark.parametrize("last", ["all", "read"])
def test_coded_again_the_files_are_those_of_capture(
    bench: ModuleType, tiny_run: Run, make_run: MakeRun, dtype: str, last: str
) -> None:
    exact = captured(make_run, "exact", "capture.dtype=bfloat16", f"capture.last={last}")
    own = captured(make_run, "own", f"capture.dtype={dtype}", f"capture.last={last}")
    again = make_run("again", f"capture.dtype={dtype}", f"capture.last={last}", "capture.shard_tokens=1k")
    folder = own.folder("capture")
    expected = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.safetensors")}
    assert len(expected) > 2
    shutil.rmtree(folder)  # both runs have the same key, so the same folder
    counts = bench.code_again(exact, again)
    assert {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.safetensors")} == expected
    assert counts["bytes_per_token"] > 0
    assert not (folder / MANIFEST).exists()


def test_a_difference_of_walks_has_an_error(bench: ModuleType) -> None:
    def walks(*accepted: list[int]) -> dict[str, RequestRounds]:
        return {
            str(number): RequestRounds(domain="x", accepted=one, num_tokens=9) for number, one in enumerate(accepted)
        }

    first = walks([0, 1], [2, 0, 1], [3])
    assert bench.compare_walks(first, first) == (0, 0)
    difference, error = bench.compare_walks(first, walks([1, 1], [2, 0, 1], [0]))
    assert difference == pytest.approx(5 / 6 - 7 / 6)
    assert 0.2 < error < 2
