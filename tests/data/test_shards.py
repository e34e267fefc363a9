"""The hidden-state store: what was added comes back, kills leave no half rows, damage is named."""

import json
from pathlib import Path

import pytest
import torch
from drafthead.data.errors import InputError
from drafthead.data.files import read_json, sha256_of, write_json
from drafthead.data.shards import CONVENTION, ShardWriter, Store, StoreInfo
from torch import Tensor

A, D = 3, 8
INFO = StoreInfo(fingerprint="f00d", layer_ids=[2, 4, 5], num_layers=8, hidden_size=D, dtype="bfloat16")
LENGTHS = {"a/0": 5, "b/0": 3, "b/1": 9, "c/0": 1, "d/0": 4}
States = dict[str, tuple[Tensor, Tensor]]


@pytest.fixture(scope="module")
def states() -> States:
    generator = torch.Generator().manual_seed(0)
    return {
        name: (
            torch.randn(length, A, D, generator=generator).bfloat16(),
            torch.randn(length, D, generator=generator).bfloat16(),
        )
        for name, length in LENGTHS.items()
    }


def write(folder: Path, states: States, shard_tokens: int = 7) -> ShardWriter:
    """Add all rows that are not there yet, in order."""
    writer = ShardWriter(folder, INFO, shard_tokens)
    for name, (aux, last) in states.items():
        if name not in writer.done:
            writer.add(name, aux, last)
    return writer


def assert_holds(store: Store, states: States) -> None:
    assert set(store.ids()) == set(states)
    for name, (aux, last) in states.items():
        found_aux, found_last = store.get(name)
        assert store.length(name) == len(last)
        assert torch.equal(found_aux, aux)
        assert torch.equal(found_last, last)


@pytest.mark.parametrize("shard_tokens", [1, 7, 1000], ids=["a shard each", "several shards", "one shard"])
def test_rows_come_back_as_they_were_added(tmp_path: Path, states: States, shard_tokens: int) -> None:
    folder = tmp_path / "new" / "train"
    index = write(folder, states, shard_tokens).finish()
    assert_holds(Store(folder), states)
    assert len(index["shards"]) == {1: 5, 7: 3, 1000: 1}[shard_tokens]
    assert sum(shard["tokens"] for shard in index["shards"]) == sum(LENGTHS.values())


def test_index_states_the_convention_and_what_the_shards_have_in_common(tmp_path: Path, states: States) -> None:
    write(tmp_path, states).finish()
    index = read_json(tmp_path / "index.json")
    assert index["convention"] == CONVENTION
    assert index["layer_ids"] == [2, 4, 5]
    assert Store(tmp_path).info == INFO
    for shard in index["shards"]:
        assert shard["sha256"] == sha256_of(tmp_path / shard["file"])
    Store(tmp_path).check_files()


def test_bytes_per_token_are_what_lies_on_disk(tmp_path: Path, states: States) -> None:
    assert INFO.bytes_per_token() == 4 * D * 2
    write(tmp_path, states, 1000).finish()
    payload = sum(LENGTHS.values()) * INFO.bytes_per_token()
    assert payload <= (tmp_path / "shard-00000.safetensors").stat().st_size < payload + 1024


def test_a_killed_writer_goes_on_behind_its_last_whole_shard(tmp_path: Path, states: States) -> None:
    """Rows of whole shards (8 and 9 tokens here) are neither asked for again nor written again."""
    killed = ShardWriter(tmp_path, INFO, 7)
    for name in ("a/0", "b/0", "b/1"):
        killed.add(name, *states[name])
    again = ShardWriter(tmp_path, INFO, 7)
    assert again.done == {"a/0", "b/0", "b/1"}
    before = sha256_of(tmp_path / "shard-00000.safetensors")
    write(tmp_path, states).finish()
    assert sha256_of(tmp_path / "shard-00000.safetensors") == before
    assert_holds(Store(tmp_path), states)


def test_unflushed_rows_of_a_killed_writer_are_written_again(tmp_path: Path, states: States) -> None:
    killed = ShardWriter(tmp_path, INFO, 1000)
    killed.add("a/0", *states["a/0"])
    assert killed.done == set()
    assert ShardWriter(tmp_path, INFO, 1000).done == set()
    write(tmp_path, states).finish()
    assert_holds(Store(tmp_path), states)


@pytest.mark.parametrize("rest", ["shard without its list", "torn temporary files"])
def test_what_a_kill_left_behind_does_not_count(tmp_path: Path, states: States, rest: str) -> None:
    writer = ShardWriter(tmp_path, INFO, 7)
    for name in ("a/0", "b/0", "b/1"):
        writer.add(name, *states[name])
    if rest == "shard without its list":
        (tmp_path / "shard-00001.json").unlink()
    else:
        (tmp_path / "shard-00001.json").rename(tmp_path / ".shard-00001.json.x1.part")
        whole = (tmp_path / "shard-00001.safetensors").read_bytes()
        (tmp_path / "shard-00001.safetensors").unlink()
        (tmp_path / ".shard-00001.safetensors.x1.part").write_bytes(whole[:50])
    again = ShardWriter(tmp_path, INFO, 7)
    assert again.done == {"a/0", "b/0"}
    write(tmp_path, states).finish()
    store = Store(tmp_path)
    store.check_files()
    assert_holds(store, states)


def test_finishing_twice_or_with_nothing_to_add_keeps_the_store(tmp_path: Path, states: States) -> None:
    first = write(tmp_path, states).finish()
    assert write(tmp_path, states).finish() == first
    assert_holds(Store(tmp_path), states)


def test_an_unfinished_store_cannot_be_opened(tmp_path: Path, states: States) -> None:
    write(tmp_path, states)
    with pytest.raises(InputError, match=r"index\.json: no such file"):
        Store(tmp_path)


def test_a_store_of_another_format_is_refused(tmp_path: Path, states: States) -> None:
    write(tmp_path, states).finish()
    write_json(tmp_path / "index.json", {**json.loads((tmp_path / "index.json").read_text()), "format": 99})
    with pytest.raises(InputError, match="format 99"):
        Store(tmp_path)


@pytest.mark.parametrize("damage", ["cut off", "missing", "header torn"])
def test_a_damaged_shard_is_named(tmp_path: Path, states: States, damage: str) -> None:
    write(tmp_path, states).finish()
    path = tmp_path / "shard-00001.safetensors"
    whole = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(whole[: len(whole) // 2 if damage == "cut off" else 4])
    store = Store(tmp_path)
    store.get("a/0")
    with pytest.raises(InputError, match=r"shard-00001\.safetensors.*capture again"):
        store.get("b/1")
    with pytest.raises(InputError, match=r"shard-00001\.safetensors.*checksum"):
        store.check_files()


def test_a_flipped_byte_fails_the_checksum(tmp_path: Path, states: States) -> None:
    write(tmp_path, states).finish()
    path = tmp_path / "shard-00002.safetensors"
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)
    with pytest.raises(InputError, match=r"shard-00002\.safetensors.*checksum"):
        Store(tmp_path).check_files()
