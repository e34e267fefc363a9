"""Damaged stores: every bad row is named, no other; checksums are compared once; training leaves out what is bad.

Shapes: T tokens, A captured layers, D hidden.
"""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drafthead.data import store_faults
from drafthead.data.encoding import Row
from drafthead.data.errors import InputError
from drafthead.data.files import read_json, sha256_of, write_json
from drafthead.data.shards import ShardWriter, Store
from drafthead.data.store_faults import damaged_rows, find_fault, open_sound, sound_rows
from drafthead.data.store_format import StoreInfo
from safetensors.torch import load_file, save_file
from torch import Tensor

A, D = 3, 32
INFO = StoreInfo(fingerprint="f", layer_ids=[0, 1, 2], num_layers=4, hidden_size=D, dtype="bfloat16")


def make_rows(count: int) -> list[Row]:
    return [
        Row(
            id=f"row{number}",
            source="test",
            domain="test",
            turn=0,
            input_ids=[10 * number + place for place in range(6)],
            context_length=2,
            clipped=False,
        )
        for number in range(count)
    ]


@pytest.fixture(params=["bfloat16", "int8"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Rows 0 to 7, two in a shard."""
    info = StoreInfo(fingerprint="f", layer_ids=[0, 1, 2], num_layers=4, hidden_size=D, dtype=request.param)
    writer = ShardWriter(tmp_path, info, 12)
    generator = torch.Generator().manual_seed(0)
    for row in make_rows(8):
        writer.add(row, torch.randn(6, A, D, generator=generator), torch.randn(6, D, generator=generator))
    writer.finish()
    return Store(tmp_path)


# ---- files -----------------------------------------------------------------------------------------------


def test_a_whole_store_has_no_fault(store: Store) -> None:
    assert damaged_rows(store) == {}
    assert open_sound(store.folder)[1] == {}


@pytest.mark.parametrize("damage", ["cut off", "missing", "header torn"])
def test_all_rows_of_a_lost_shard_are_named(store: Store, damage: str) -> None:
    path = store.folder / "shard-0-00001.safetensors"
    whole = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(whole[: len(whole) // 2 if damage == "cut off" else 4])
    found = damaged_rows(Store(store.folder))
    assert list(found) == ["row2/0", "row3/0"]
    assert all(reason.startswith("shard-0-00001.safetensors: missing or cut off") for reason in found.values())


@pytest.mark.parametrize("name", ["aux", "last", "ids"])
def test_a_changed_value_names_its_row_alone(store: Store, name: str) -> None:
    path = store.folder / "shard-0-00002.safetensors"
    tensors = load_file(path)
    tensors[name][8] += 1
    save_file(tensors, path)
    assert damaged_rows(Store(store.folder)) == {"row5/0": f"{path.name}: the row differs from its checksum"}


def test_rows_that_changed_places_are_both_named(store: Store) -> None:
    path = store.folder / "shard-0-00002.safetensors"
    tensors = load_file(path)
    for name in ("aux", "last"):
        tensors[name] = torch.cat([tensors[name][6:], tensors[name][:6]])
    save_file(tensors, path)
    assert list(damaged_rows(Store(store.folder))) == ["row4/0", "row5/0"]


def test_a_flipped_byte_outside_the_rows_names_the_shard(store: Store) -> None:
    path = store.folder / "shard-0-00002.safetensors"
    save_file(load_file(path), path, metadata={"note": "rewritten"})
    assert damaged_rows(Store(store.folder)) == {
        "shard-0-00002": f"{path.name}: differs from its checksum, its rows do not"
    }


def test_what_the_rows_of_a_shard_share_affects_all_of_them(tmp_path: Path) -> None:
    """The sizes of channels, which no row's own digest holds."""
    writer = ShardWriter(tmp_path, replace(INFO, dtype="int8"), 12)
    generator = torch.Generator().manual_seed(0)
    for row in make_rows(4):
        writer.add(row, torch.randn(6, A, D, generator=generator), torch.randn(6, D, generator=generator))
    writer.finish()
    path = tmp_path / "shard-0-00001.safetensors"
    tensors = load_file(path)
    tensors["aux_channel"][1, 3] *= 2
    save_file(tensors, path)
    assert list(damaged_rows(Store(tmp_path))) == ["row2/0", "row3/0"]
    found, told = sound_rows(make_rows(4), Store(tmp_path), 0.5)
    assert [row.key for row in found] == ["row0/0", "row1/0"]
    assert told is not None
    assert "what its rows have in common differs from its checksum (2)" in told


def test_a_shard_of_another_run_is_named_row_by_row(store: Store, tmp_path: Path) -> None:
    """Of the same rows, with a list that fits it: nothing but the index knows."""
    other = tmp_path / "other"
    writer = ShardWriter(other, store.info, 12)
    generator = torch.Generator().manual_seed(1)
    for row in make_rows(8):
        writer.add(row, torch.randn(6, A, D, generator=generator), torch.randn(6, D, generator=generator))
    writer.finish()
    for suffix in ("safetensors", "json"):
        shutil.copy(other / f"shard-0-00002.{suffix}", store.folder / f"shard-0-00002.{suffix}")
    reason = "shard-0-00002.json: the list of the shard's rows differs from its checksum"
    assert damaged_rows(Store(store.folder)) == {"row4/0": reason, "row5/0": reason}


def test_a_list_with_another_context_names_the_rows(store: Store) -> None:
    """It decides which positions have a last state, and no digest of a row holds it."""
    path = store.folder / "shard-0-00003.json"
    shard = read_json(path)
    shard["rows"][0]["context"] += 1
    write_json(path, shard)
    assert list(damaged_rows(Store(store.folder))) == ["row6/0", "row7/0"]


@pytest.mark.parametrize("again", [False, True])
def test_a_change_that_keeps_size_and_time_is_seen(store: Store, again: bool) -> None:
    """As a copy with its times kept does, or an image whose files all have one time."""
    path = store.folder / "shard-0-00001.safetensors"
    damaged_rows(store)
    stat, whole = path.stat(), bytearray(path.read_bytes())
    whole[-3] ^= 1
    path.write_bytes(whole)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_mtime_ns == stat.st_mtime_ns
    found = damaged_rows(Store(store.folder), again=again)
    assert found
    assert all("differs from its checksum" in reason for reason in found.values())


def test_states_of_another_type_than_the_store_says_are_named(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, INFO, 12)
    states = torch.randn(6, A, D, generator=torch.Generator().manual_seed(0))
    writer.add(make_rows(1)[0], states, states[:, 0])
    writer.finish()
    path, index = tmp_path / "shard-0-00000.safetensors", read_json(tmp_path / "index.json")
    tensors = load_file(path)
    save_file({**tensors, "aux": tensors["aux"].float()}, path)
    index["shards"][0]["sha256"] = sha256_of(path)
    write_json(tmp_path / "index.json", index)
    assert damaged_rows(Store(tmp_path)) == {
        "row0/0": f"{path.name}: aux is torch.float32 [3, 32], must be torch.bfloat16 [3, 32]"
    }


@pytest.mark.parametrize("damage", ["missing", "torn"])
def test_a_list_that_cannot_be_read_names_its_shard(store: Store, damage: str) -> None:
    path = store.folder / "shard-0-00003.json"
    path.unlink() if damage == "missing" else path.write_text(path.read_text()[:100])
    opened, faults = open_sound(store.folder)
    assert list(faults) == ["shard-0-00003"]
    assert "its 2 rows cannot be read" in faults["shard-0-00003"]
    assert len(opened.where) == 6


def test_a_list_with_other_places_names_the_rows(store: Store) -> None:
    path = store.folder / "shard-0-00000.json"
    shard = read_json(path)
    first, second = shard["rows"]
    first["aux"], second["aux"] = second["aux"], first["aux"]
    write_json(path, shard)
    assert list(damaged_rows(Store(store.folder))) == ["row0/0", "row1/0"]


def test_rows_that_share_states_with_a_damaged_one_are_named_too(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, INFO, 1)
    generator = torch.Generator().manual_seed(0)
    aux, last = torch.randn(9, A, D, generator=generator), torch.randn(9, D, generator=generator)
    for turn, length in ((1, 9), (0, 5)):
        row = Row(id="a", source="", domain="", turn=turn, input_ids=[*range(length)], context_length=1, clipped=False)
        writer.add(row, aux[:length], last[:length])
    writer.finish()
    (tmp_path / "shard-0-00000.safetensors").unlink()
    found = damaged_rows(Store(tmp_path))
    assert found["a/0"].startswith("shares states with a/1: shard-0-00000.safetensors: missing")


def test_checksums_are_compared_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = store_faults.sha256_of
    monkeypatch.setattr(store_faults, "sha256_of", lambda path: read.append(path.name) or real(path))
    damaged_rows(store)
    assert len(read) == 8
    damaged_rows(Store(store.folder))
    assert len(read) == 8
    os.utime(store.folder / "shard-0-00001.safetensors")
    damaged_rows(Store(store.folder))
    assert read[8:] == ["shard-0-00001.safetensors"]


# ---- training --------------------------------------------------------------------------------------------


def test_rows_with_states_of_their_own_are_all_used(store: Store) -> None:
    assert sound_rows(make_rows(8), store, 0.0) == (make_rows(8), None)


def test_a_few_bad_rows_are_left_out_and_counted(store: Store) -> None:
    (store.folder / "shard-0-00001.safetensors").unlink()
    rows = make_rows(9)
    rows[0] = replace(rows[0], input_ids=[7] * 6)
    found, told = sound_rows(rows, Store(store.folder), 0.5)
    assert [row.key for row in found] == ["row1/0", "row4/0", "row5/0", "row6/0", "row7/0"]
    assert told is not None
    assert told.startswith(f"{store.folder}: 4 of 9 rows cannot be used: shard-0-00001.safetensors: missing")
    assert "no states were stored (1)" in told
    assert "the stored states belong to other tokens (1)" in told
    assert told.endswith("; they are left out")


def test_more_bad_rows_than_allowed_stop_the_training(store: Store) -> None:
    (store.folder / "shard-0-00001.safetensors").unlink()
    with pytest.raises(InputError, match=r"2 of 8 rows cannot be used.*capture\.max_bad_share=0\.2 allows.*verify"):
        sound_rows(make_rows(8), Store(store.folder), 0.2)


# ---- faults of single rows -------------------------------------------------------------------------------


def healthy() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 3, D, generator=generator), torch.randn(6, D, generator=generator)


def test_healthy_states_have_no_fault() -> None:
    aux, last = healthy()
    assert find_fault(aux, last, 6) is None
    assert find_fault(aux[:1], last[:1], 1) is None
    assert find_fault(aux[:2], last[:2], 2) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("where", ["aux", "last"])
def test_one_value_that_is_not_finite(where: str, value: float) -> None:
    aux, last = healthy()
    (aux[4, 1] if where == "aux" else last[4])[7] = value
    assert find_fault(aux, last, 6) == f"{where} holds NaN or infinity"


def test_a_state_of_zeros() -> None:
    aux, last = healthy()
    last[3] = 0
    assert find_fault(aux, last, 6) == "last holds a zero state"
    aux[3] = 0
    assert find_fault(aux, last, 6) == "aux holds a zero state"


def test_a_zero_state_of_one_layer_alone() -> None:
    aux, last = healthy()
    aux[3, 1] = 0
    assert find_fault(aux, last, 6) == "aux holds a zero state"


@pytest.mark.parametrize("where", ["aux", "last"])
def test_one_state_at_all_positions(where: str) -> None:
    """The first position is an attention sink and may differ; one layer alone is enough."""
    aux, last = healthy()
    states = aux[:, 1] if where == "aux" else last
    states[1:] = states[1].clone()
    assert find_fault(aux, last, 6) == f"{where} is the same at every position"


def test_fewer_states_than_tokens() -> None:
    """A25: with prefix caching a server gives the states of new tokens only."""
    aux, last = healthy()
    assert find_fault(aux[:4], last[:4], 6) == "short: 4 states for 6 tokens"
    assert find_fault(aux[:4], last, 6) is not None
    assert find_fault(aux, last[:4], 6) == "short: 4 last states for 6 tokens"
    assert find_fault(aux, last[:3], 6, last_length=3) is None
    assert find_fault(aux, last[:3], 6, last_length=4) == "short: 3 last states for 4 tokens"
