"""A real vLLM hands out the states of every request of a mixed batch, equal to those of the transformers backend.

The target is a random Llama; its engines chunk prompts (64 tokens a step) or run them in one step.

Shapes: T tokens, A captured layers, D hidden.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from drafthead.data.encoding import Row, write_rows
from drafthead.data.errors import GateError, InputError
from drafthead.data.shards import Store
from drafthead.eval.engine import Engine, EngineConfig, Request, is_available
from drafthead.eval.states import StateRecorder
from drafthead.pipeline.capture import capture
from drafthead.pipeline.capture_vllm import TokenGate, VllmStates, extraction_settings, read_states
from drafthead.pipeline.recipe import load_recipe
from drafthead.pipeline.run_dir import Run
from drafthead.pipeline.target import Target, open_target
from safetensors.torch import save_file
from torch import Tensor

from tests.conftest import MakeRun

serve = [pytest.mark.serve, pytest.mark.skipif(not is_available(), reason="vllm is not installed")]

V, D, LAYERS = 512, 64, 8
"""Of `builtin:tiny-random`."""
AUX = [2, 5]
LENGTHS = [1, 2, 15, 16, 17, 33, 64, 130, 200, 7, 7, 90]
CLOSE = 1e-4
"""Of fp32 states, |difference| / |state|."""


@pytest.fixture(scope="module")
def target(cache_folder: Path) -> Target:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTHEAD_CACHE", str(cache_folder))
        return open_target("builtin:tiny-random")


def make_rows(lengths: list[int]) -> list[Row]:
    draw = random.Random(0)
    return [
        Row(
            id=f"row-{number}",
            source="test",
            domain="test",
            turn=0,
            input_ids=[draw.randrange(3, V) for _ in range(length)],
            context_length=1,
            clipped=False,
        )
        for number, length in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def expected(target: Target) -> StateRecorder:
    return StateRecorder(target.load(torch.float32, "cpu"), AUX)


@pytest.fixture(scope="module")
def states(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmStates]:
    backend = VllmStates(
        target,
        AUX,
        compute=torch.float32,
        stored=torch.float32,
        longest=max(LENGTHS),
        kv_cache_gib=1,
        log_path=tmp_path_factory.mktemp("log") / "vllm.log",
    )
    with backend:
        yield backend


def assert_close(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape
    assert float((found - wanted).norm() / wanted.norm()) < CLOSE


def single(recorder: StateRecorder, ids: list[int]) -> tuple[Tensor, Tensor]:
    ((aux, last),) = recorder.record([ids])
    return aux, last


# ---- the backend -----------------------------------------------------------------------------------------


class TestBackend:
    pytestmark = serve

    def test_a_mixed_batch_is_its_single_runs_in_any_order(self, states: VllmStates, expected: StateRecorder) -> None:
        """A24, A25: more batches than are in flight, each state the row's own, no row short."""
        rows = make_rows(LENGTHS)
        for order in (1, 2, 3):
            random.Random(order).shuffle(rows)
            batches = [rows[start : start + order] for start in range(0, len(rows), order)]
            given = list(states.record_all(batches))
            assert [[row.key for row in batch] for batch, _ in given] == [[row.key for row in one] for one in batches]
            for row, (aux, last) in (
                (row, found) for batch, both in given for row, found in zip(batch, both, strict=True)
            ):
                wanted_aux, wanted_last = single(expected, row.input_ids)
                assert_close(aux, wanted_aux)
                assert_close(last, wanted_last)

    def test_equal_rows_beside_each_other_are_computed_whole(self, states: VllmStates, expected: StateRecorder) -> None:
        """A25: a row that another one begins with, and the same row again, get states for every token."""
        long = make_rows([200])[0]
        short = Row(**{**vars(long), "id": "opening", "input_ids": long.input_ids[:96]})
        ((_, found),) = states.record_all([[long, short, long]])
        for (aux, last), row in zip(found, (long, short, long), strict=True):
            wanted_aux, wanted_last = single(expected, row.input_ids)
            assert_close(aux, wanted_aux)
            assert_close(last, wanted_last)

    def test_nothing_is_left_in_the_scratch_folder(self, states: VllmStates) -> None:
        list(states.record_all([make_rows([5, 9])]))
        assert list(states.scratch.iterdir()) == []


@pytest.mark.serve
@pytest.mark.skipif(not is_available(), reason="vllm is not installed")
def test_the_stage_stores_what_it_stores_without_vllm(
    make_run: MakeRun, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {"train": make_rows(LENGTHS[2:]), "heldout": make_rows([9, 40])}
    for split, some in rows.items():
        write_rows(tmp_path / "encode" / f"{split}.parquet", some)
    monkeypatch.setattr(Run, "input", lambda self, name: tmp_path / name)
    monkeypatch.setattr(Run, "folder", lambda self, name: self.path / name)
    overrides = ["capture.dtype=float32", "capture.shard_tokens=256", "respond.kv_cache_gib=1"]
    plain, served = make_run("plain", *overrides), make_run("served", *overrides, "capture.backend=vllm")
    assert plain.key("capture") != served.key("capture")
    counts = [capture(run) for run in (served, plain)]
    gaps = [one.pop("on_policy")["sources"]["test"]["gap"] for one in counts]
    assert counts[0] == counts[1]
    assert gaps[0] == pytest.approx(gaps[1], abs=1e-3)
    for split, some in rows.items():
        stores = [Store(run.path / "capture" / split) for run in (plain, served)]
        for row in some:
            (aux, last), (served_aux, served_last) = (store.get(row.key) for store in stores)
            assert_close(served_aux, aux)
            assert_close(served_last, last)


@pytest.mark.parametrize("step_tokens", [64, 4096], ids=["chunked", "one-shot"])
@pytest.mark.serve
@pytest.mark.skipif(not is_available(), reason="vllm is not installed")
def test_states_of_prompt_and_output_tokens(
    target: Target, expected: StateRecorder, tmp_path: Path, step_tokens: int
) -> None:
    """A34: chunked prefill gives the states of one pass; output tokens have theirs, the newest has none yet."""
    config = EngineConfig(
        model=str(target.path),
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=step_tokens,
        kv_cache_gib=1,
        **extraction_settings([*AUX, LAYERS], tmp_path),
    )
    rows = {row.key.replace("/", "-"): row for row in make_rows(LENGTHS)}
    with Engine(config, tmp_path / "vllm.log") as engine:
        results = list(
            engine.generate(
                Request(
                    key=key,
                    prompt_ids=row.input_ids,
                    max_new_tokens=1 + number % 6,
                    kv_transfer_params={"key": key, "output": True},
                )
                for number, (key, row) in enumerate(rows.items())
            )
        )
    assert {result.key for result in results} == rows.keys()
    for result in results:
        row = rows[result.key]
        whole = Row(**{**vars(row), "input_ids": row.input_ids + result.token_ids[:-1]})
        found = read_states(whole, Path(str(result.states_path)))
        wanted_aux, wanted_last = single(expected, whole.input_ids)
        assert_close(found[:, :-1], wanted_aux)
        assert_close(found[:, -1], wanted_last)


@pytest.mark.serve
@pytest.mark.skipif(not is_available(), reason="vllm is not installed")
def test_the_connector_refuses_prefix_caching() -> None:
    """A25."""
    from types import SimpleNamespace

    from drafthead.pipeline.vllm_connector import StatesConnector

    config = SimpleNamespace(kv_transfer_config=object(), cache_config=SimpleNamespace(enable_prefix_caching=True))
    with pytest.raises(ValueError, match="prefix caching shortens samples; set enable_prefix_caching=False"):
        StatesConnector(config, None, None)


@pytest.mark.serve
@pytest.mark.skipif(not is_available(), reason="vllm is not installed")
def test_slots_that_were_read_are_zero_until_written_again() -> None:
    """A26: what nobody wrote is a zero state, which capture refuses."""
    from drafthead.pipeline.vllm_connector import take_states

    cache = torch.arange(1.0, 1 + 5 * 2 * 4 * 3).view(5, 2, 4, 3)
    slots = torch.stack([cache[3, :, 0], cache[3, :, 1], cache[3, :, 2], cache[3, :, 3], cache[1, :, 0]])
    assert torch.equal(take_states(cache, [3, 1], 5), slots)
    assert int(cache[3].count_nonzero()) == int(cache[1].count_nonzero()) == 0
    assert bool((cache[[0, 2, 4]] > 0).all())


# ---- what is refused -------------------------------------------------------------------------------------


def written(folder: Path, ids: list[int], length: int) -> Path:
    path = folder / "0.safetensors"
    save_file({"states": torch.ones(length, 3, D), "token_ids": torch.tensor(ids)}, path)
    return path


def test_states_of_other_tokens(tmp_path: Path) -> None:
    (row,) = make_rows([6])
    with pytest.raises(GateError, match="FeatureGate: row row-0/0: vLLM gave the states of other tokens"):
        read_states(row, written(tmp_path, row.input_ids[::-1], 6))


def test_fewer_states_than_tokens(tmp_path: Path) -> None:
    (row,) = make_rows([6])
    with pytest.raises(GateError, match="FeatureGate: row row-0/0: vLLM gave 4 states for 6 tokens"):
        read_states(row, written(tmp_path, row.input_ids, 4))


def test_a_token_that_the_state_does_not_lead_to(target: Target, expected: StateRecorder) -> None:
    """A28, A29: the state of another layer or place, or behind the norm, chooses other tokens on some rows."""
    gate = TokenGate(target, 1e-3)
    refused = {"one layer early": 0, "one token early": 0, "NaN": 0}
    for row in make_rows([12] * 8):
        aux, last = single(expected, row.input_ids)
        logits_V = target.lm_head_VD @ (expected.norm(last[-1]))
        token = int(logits_V.argmax())
        gate.check(row, last[-1], token)
        for name, state in (
            ("one layer early", aux[-1, -1]),
            ("one token early", last[-2]),
            ("NaN", last[-1] * float("nan")),
        ):
            try:
                gate.check(row, state, token)
            except GateError:
                refused[name] += 1
    assert refused["NaN"] == 8
    assert refused["one layer early"] >= 4
    assert refused["one token early"] >= 6


@pytest.mark.skipif(not is_available(), reason="vllm is not installed")
def test_a_row_that_leaves_no_room_for_a_token(target: Target, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a row of 2,048 tokens leaves no room .*set encode.max_length=2047"):
        VllmStates(
            target,
            AUX,
            compute=torch.float32,
            stored=torch.float32,
            longest=2048,
            kv_cache_gib=1,
            log_path=tmp_path / "vllm.log",
        )


def test_states_that_training_computes_itself_do_not_come_from_vllm() -> None:
    with pytest.raises(
        InputError, match=r"capture\.backend=vllm: capture\.mode=online runs the target in the training"
    ):
        load_recipe("smoke/eagle3", ["capture.mode=online", "capture.backend=vllm"])
