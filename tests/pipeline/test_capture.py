"""Capture: what is stored, what is refused before any work, and the gate that holds states against logits.

Shapes: T tokens, A captured layers, D hidden.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from drafthead.data.batches import load_pack
from drafthead.data.encoding import Row, write_rows
from drafthead.data.errors import GateError, InputError
from drafthead.data.shards import Store
from drafthead.data.store_faults import damaged_rows
from drafthead.data.store_format import StoreInfo
from drafthead.eval.states import StateRecorder
from drafthead.pipeline.capture import FeatureGate, capture, check_disk, last_kept, length_batches
from drafthead.pipeline.recipe import CaptureConfig, EncodeConfig, MTPConfig, TrainConfig, load_recipe
from drafthead.pipeline.run_dir import Run
from drafthead.pipeline.stages import STAGES
from drafthead.pipeline.target import Target
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

V, D, LAYERS = 64, 32, 8
BROKEN = 63
"""A token whose embedding is NaN."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Eight random layers with a final norm that changes what it normalises twice."""
    folder = tmp_path_factory.mktemp("target")
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            model.model.norm.weight.copy_(torch.rand(D) * 2 + 0.1)
            model.model.embed_tokens.weight[BROKEN] = float("nan")
        model.save_pretrained(folder)
    return Target(folder)


@pytest.fixture(scope="module")
def model(target: Target) -> Any:
    return target.load(torch.float32, "cpu")


def make_rows(lengths: list[int], split: str = "train", broken: tuple[int, ...] = ()) -> list[Row]:
    generator = torch.Generator().manual_seed(len(lengths))
    rows = []
    for number, length in enumerate(lengths):
        ids = torch.randint(BROKEN, (length,), generator=generator).tolist()
        if number in broken:
            ids[length // 2] = BROKEN
        rows.append(
            Row(
                id=f"{split}-{number}",
                source="test",
                domain="test",
                turn=0,
                input_ids=ids,
                context_length=1,
                clipped=False,
            )
        )
    return rows


def make_run(folder: Path, target: Target, train: list[Row], heldout: list[Row], **settings: Any) -> Run:
    """The parts of a run that the stage reads."""
    for split, rows in (("train", train), ("heldout", heldout)):
        write_rows(folder / "encode" / f"{split}.parquet", rows)
    config = CaptureConfig(**{"dtype": "float32", "batch_tokens": 64, "shard_tokens": 40, **settings})
    run = SimpleNamespace(
        recipe=SimpleNamespace(
            target="org/target",
            capture=config,
            encode=EncodeConfig(),
            train=TrainConfig(tokens=1),
            head=MTPConfig(type="mtp"),
        ),
        target=target,
        input=lambda name: folder / name,
        folder=lambda name: folder / name,
    )
    return cast(Run, run)


# ---- the stage -------------------------------------------------------------------------------------------


def test_stored_states_are_those_of_single_runs(tmp_path: Path, target: Target, model: Any) -> None:
    train, heldout = make_rows([5, 30, 17, 2, 30, 9, 12]), make_rows([4, 21], "heldout")
    counts = capture(make_run(tmp_path, target, train, heldout, aux_layers=[2, 4, 8]))
    assert counts["train"] == {"rows": 7, "tokens": 105}
    assert counts["heldout"] == {"rows": 2, "tokens": 25}
    assert counts["layer_ids"] == [2, 4, 8]
    assert counts["bad"] == []
    recorder = StateRecorder(model, [2, 4, 8])
    for split, rows in (("train", train), ("heldout", heldout)):
        store = Store(tmp_path / "capture" / split)
        assert not damaged_rows(store)
        assert store.info.layer_ids == [2, 4, 8]
        assert store.info.fingerprint == target.fingerprint
        assert set(store.ids()) == {row.key for row in rows}
        for row in rows:
            aux, last = store.get(row.key)
            expected_aux, expected_last = next(iter(recorder.record([row.input_ids])))
            torch.testing.assert_close(aux, expected_aux, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(last, expected_last, rtol=1e-4, atol=1e-4)


def test_what_all_rows_begin_with_is_run_once(
    tmp_path: Path, target: Target, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system prompt's states are stored with every row, and are those of a single run."""
    rows = [replace(row, input_ids=[3, 1, 4, *row.input_ids], context_length=4) for row in make_rows([5, 17, 2, 9])]
    widths: list[int] = []
    forward = StateRecorder.forward

    def watch(self: StateRecorder, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        widths.append(ids_BT.shape[1])
        return forward(self, ids_BT)

    with monkeypatch.context() as patch:
        patch.setattr(StateRecorder, "forward", watch)
        capture(make_run(tmp_path, target, rows, make_rows([6], "heldout"), aux_layers=[2, 8]))
    assert max(widths) == 17
    store, recorder = Store(tmp_path / "capture" / "train"), StateRecorder(model, [2, 8])
    for row in rows:
        expected = next(iter(recorder.record([row.input_ids])))
        for state, other in zip(store.get(row.key), expected, strict=True):
            torch.testing.assert_close(state, other, rtol=1e-4, atol=1e-4)


def test_the_last_state_alone_can_be_stored(tmp_path: Path, target: Target, model: Any) -> None:
    """As Medusa and MTP heads need: a quarter of the disk."""
    rows = make_rows([5, 30, 17])
    counts = capture(make_run(tmp_path, target, rows, make_rows([4], "heldout"), aux_layers=[]))
    assert (counts["layer_ids"], counts["bad"]) == ([], [])
    store = Store(tmp_path / "capture" / "train")
    assert not damaged_rows(store)
    recorder = StateRecorder(model, [2])
    for row in rows:
        aux, last = store.get(row.key)
        assert aux.shape == (len(row.input_ids), 0, D)
        torch.testing.assert_close(last, next(iter(recorder.record([row.input_ids])))[1], rtol=1e-4, atol=1e-4)
    pack = load_pack(rows, store)
    assert pack.aux_TAD.shape == (52, 0, D)
    assert pack.last_TD.shape == (52, D)


def test_omitted_ids_are_written_down(tmp_path: Path, target: Target) -> None:
    counts = capture(make_run(tmp_path, target, make_rows([6]), make_rows([5], "heldout")))
    assert counts["layer_ids"] == Store(tmp_path / "capture" / "train").info.layer_ids == [2, 4, 5]


@pytest.mark.parametrize(
    ("shard_tokens", "run_again"),
    [(40, [12, 14]), (30, [12, 14, 16, 18, 20])],
    ids=["shards end with batches", "a batch half written"],
)
def test_a_killed_capture_goes_on_behind_its_last_whole_shard(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch, shard_tokens: int, run_again: list[int]
) -> None:
    """Finished batches are not run again, and no row is stored twice."""
    train, heldout = make_rows([20, 18, 16, 14, 12]), make_rows([6], "heldout")
    run = make_run(tmp_path, target, train, heldout, shard_tokens=shard_tokens)
    first = capture(run)
    folder = tmp_path / "capture" / "train"
    before = Store(folder).shards
    for path in [folder / "index.json", *sorted(folder.glob("shard-*.json"))[1:]]:
        path.unlink()
    seen: list[int] = []
    record = StateRecorder.record

    def watch(self: StateRecorder, rows: list[list[int]], stored: torch.dtype) -> Any:
        seen.extend(len(row) for row in rows)
        return record(self, rows, stored)

    monkeypatch.setattr(StateRecorder, "record", watch)
    assert capture(run) == first
    assert sorted(seen) == run_again
    assert Store(folder).shards == before


def test_a_few_broken_rows_are_left_out_and_counted(tmp_path: Path, target: Target) -> None:
    """A33. The longest row, which the gate would look at first, is the broken one."""
    train = make_rows([30, *[6] * 149], broken=(0,))
    counts = capture(make_run(tmp_path, target, train, make_rows([5], "heldout")))
    assert counts["bad"] == ["train-0/0 (aux holds NaN or infinity)"]
    assert counts["train"]["rows"] == 149
    assert "train-0/0" not in set(Store(tmp_path / "capture" / "train").ids())


def test_many_broken_rows_stop_the_run(tmp_path: Path, target: Target) -> None:
    train = make_rows([6] * 20, broken=(3, 8))
    with pytest.raises(GateError, match=r"FeatureGate: states: 2 rows are unusable, for instance train-\d/0 \(aux"):
        capture(make_run(tmp_path, target, train, make_rows([5], "heldout")))


def test_how_many_broken_rows_are_too_many_is_the_recipes(tmp_path: Path, target: Target) -> None:
    run = make_run(tmp_path, target, make_rows([6] * 20, broken=(3, 8)), make_rows([5], "heldout"), max_bad_share=0.1)
    assert len(capture(run)["bad"]) == 2


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_states_of_one_byte_a_value_are_near_the_targets(
    tmp_path: Path, target: Target, model: Any, dtype: str
) -> None:
    rows = make_rows([40, 30, 17])
    counts = capture(make_run(tmp_path, target, rows, make_rows([9], "heldout"), dtype=dtype, aux_layers=[2, 4]))
    assert counts["bad"] == []
    store = Store(tmp_path / "capture" / "train")
    assert (store.info.dtype, store.info.revision, len(store.info.template)) == (dtype, "org/target", 16)
    recorder = StateRecorder(model, [2, 4])
    for row in rows:
        for found, wanted in zip(store.get(row.key), next(iter(recorder.record([row.input_ids]))), strict=True):
            difference = (found.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
            assert float(difference.max()) < 0.1


@pytest.mark.parametrize(
    ("name", "overrides", "kept"),
    [
        ("smoke/eagle3", ["capture.last=read"], "answer"),
        ("smoke/medusa", ["capture.last=read"], "answer"),
        ("smoke/mtp", ["capture.last=read"], "all"),
        ("smoke/eagle3", ["capture.last=read", "train.context_weight=0.3"], "all"),
        ("smoke/eagle3", ["capture.last=all"], "all"),
    ],
    ids=["eagle3", "medusa", "mtp", "prompts learned from too", "one store for all heads"],
)
def test_the_head_says_which_last_states_it_reads(name: str, overrides: list[str], kept: str) -> None:
    recipe = load_recipe(name, overrides)
    assert last_kept(recipe) == kept
    assert STAGES["capture"].settings(recipe)["last"] == kept


@pytest.mark.parametrize("batch_tokens", [1, 30, 1000], ids=lambda count: f"{count} tokens")
def test_batches_hold_every_row_once_longest_first(batch_tokens: int) -> None:
    rows = make_rows([5, 30, 17, 2, 30, 9])
    batches = list(length_batches(rows, batch_tokens))
    dealt = [row for batch in batches for row in batch]
    assert sorted(row.key for row in dealt) == sorted(row.key for row in rows)
    assert [len(row.input_ids) for row in dealt] == [30, 30, 17, 9, 5, 2]
    for batch in batches:
        assert len(batch) == 1 or len(batch) * len(batch[0].input_ids) <= batch_tokens


# ---- layer ids -------------------------------------------------------------------------------------------


def of_depth(folder: Path, layers: int) -> Target:
    LlamaConfig(vocab_size=V, hidden_size=D, num_hidden_layers=layers).save_pretrained(folder)
    return Target(folder)


@pytest.mark.parametrize(
    ("layers", "asked", "found"),
    [
        (8, None, [2, 4, 5]),
        (7, None, [2, 3, 4]),
        (30, None, [2, 15, 27]),
        (4, [0, 2, 4], [0, 2, 4]),
        (2, [1], [1]),
        (1, [], []),
    ],
    ids=["8 layers", "7 layers", "30 layers", "from the embeddings to the last", "one layer", "no layer"],
)
def test_layer_ids(tmp_path: Path, layers: int, asked: list[int] | None, found: list[int]) -> None:
    assert of_depth(tmp_path, layers).resolve_aux_layers(asked) == found


@pytest.mark.parametrize(
    ("layers", "asked"),
    [(8, [2, 4, 9]), (8, [-1, 4]), (8, [2, 2, 5]), (8, [5, 4, 2]), (4, None), (5, None), (6, None), (1, None)],
    ids=[
        "beyond the depth",
        "negative",
        "repeated",
        "descending",
        *(f"default of {n} layers" for n in (4, 5, 6, 1)),
    ],
)
def test_layer_ids_that_cannot_be_used_are_refused(tmp_path: Path, layers: int, asked: list[int] | None) -> None:
    with pytest.raises(InputError, match=rf"capture\.aux_layers=.*from 0 to {layers}\b.*{layers} the one before"):
        of_depth(tmp_path, layers).resolve_aux_layers(asked)


# ---- disk ------------------------------------------------------------------------------------------------


def free(monkeypatch: pytest.MonkeyPatch, size: float) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=int(size)))


def wide_info(layers: list[int], dtype: str = "bfloat16") -> StoreInfo:
    return StoreInfo(fingerprint="f", layer_ids=layers, num_layers=24, hidden_size=2880, dtype=dtype)


def test_states_that_do_not_fit_are_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C11: 30,000 rows of 65,536 tokens of a target 2,880 wide, with 1 TB free."""
    free(monkeypatch, 1e12)
    tokens = 30_000 * 65_536
    with pytest.raises(InputError) as refused:
        check_disk(tmp_path / "new" / "folder", wide_info([2, 12, 21]), tokens, tokens)
    message = str(refused.value)
    assert "1,966,080,000 tokens x 3 layers x 5,760 bytes = 34.0 TB, with 1,966,080,000 last states 45.3 TB" in message
    assert "1.0 TB free" in message
    for remedy in (
        "capture.mode=online",
        "capture.dtype=int8: 22.7 TB",
        "prompts.limit",
        "encode.max_length",
        "DRAFTHEAD_CACHE",
    ):
        assert remedy in message
    with pytest.raises(InputError, match=r"2,882 bytes = 17\.0 TB.*online\), or use fewer prompts"):
        check_disk(tmp_path, wide_info([2, 12, 21], "int8"), tokens, tokens)


def test_states_that_fit_pass_and_the_folder_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token of three layers and its id takes 17,284 bytes, its last state 5,760."""
    free(monkeypatch, 1e9)
    info = wide_info([2, 12, 21])
    check_disk(tmp_path / "new" / "folder", info, 54_000, 0)
    assert (tmp_path / "new" / "folder").is_dir()
    with pytest.raises(InputError, match=r"0\.9 GB, with 10,000 last states 1\.0 GB, but .* has 1\.0 GB free"):
        check_disk(tmp_path, info, 54_000, 10_000)


def test_what_an_earlier_try_wrote_is_not_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 1e9)
    info = wide_info([2, 12, 21])
    check_disk(tmp_path, info, 80_000, 0, written=450_000_000)
    with pytest.raises(InputError):
        check_disk(tmp_path, info, 80_000, 0, written=400_000_000)


def test_the_stage_asks_before_it_loads_the_target(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, 1000)
    monkeypatch.setattr(Target, "load", lambda *_: pytest.fail("loaded"))
    with pytest.raises(InputError, match=r"15 tokens x 3 layers x 128 bytes"):
        capture(make_run(tmp_path, target, make_rows([10]), make_rows([5], "heldout")))


# ---- FeatureGate -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [2, 4, 15], ids=lambda length: f"{length} tokens")
def test_the_gate_lets_the_right_state_pass(target: Target, model: Any, length: int) -> None:
    (row,) = make_rows([length])
    recorder = StateRecorder(model, [2])
    (states,) = recorder.record([row.input_ids])
    FeatureGate(model, target, "float32").check(row, states[1])


@pytest.mark.parametrize(
    "fault", ["behind the norm", "one layer early", "of another row", "moved by one", "zero", "NaN"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gate_refuses_another_state(target: Target, model: Any, fault: str, dtype: str) -> None:
    """A24, A28, A29."""
    row, other = make_rows([12, 12])
    recorder = StateRecorder(model, [LAYERS - 1])
    (aux, last), (_, other_last) = recorder.record([row.input_ids, other.input_ids])
    wrong = {
        "behind the norm": model.model.norm(last),
        "one layer early": aux[:, 0],
        "of another row": other_last,
        "moved by one": last.roll(1, 0),
        "zero": torch.zeros_like(last),
        "NaN": last * float("nan"),
    }[fault]
    with pytest.raises(GateError, match=rf"FeatureGate: row {row.key}: .*differs from the target's logits") as refused:
        FeatureGate(model, target, dtype).check(row, wrong)
    assert refused.value.gate == "FeatureGate"


def test_the_gate_looks_at_the_first_batch_and_every_32nd_after_it(target: Target, model: Any) -> None:
    (row,) = make_rows([6])
    gate = FeatureGate(model, target, "float32")
    refused = []
    for number in range(70):
        try:
            gate.check(row, torch.zeros(6, D))
        except GateError:
            refused.append(number)
    assert refused == [0, 32, 64]
