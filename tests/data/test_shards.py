"""The hidden-state store: what was added comes back, kills leave no half rows, damage is named.

Shapes: T tokens, A captured layers, D hidden.
"""

import json
import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drafthead.data.encoding import Row
from drafthead.data.errors import InputError
from drafthead.data.files import read_json, sha256_of, write_json
from drafthead.data.quantize import CODES
from drafthead.data.shards import ShardWriter, Store
from drafthead.data.store_format import CONVENTION, FORMAT, StoreInfo
from torch import Tensor

A, D = 3, 8
INFO = StoreInfo(
    fingerprint="f00d",
    revision="org/target",
    template="7e",
    layer_ids=[2, 4, 5],
    num_layers=8,
    hidden_size=D,
    dtype="bfloat16",
)
LENGTHS = {"a/0": 5, "b/0": 3, "b/1": 9, "c/0": 1, "d/0": 4}
States = dict[str, tuple[Tensor, Tensor]]


def make_states(length: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    aux, last = (torch.randn(length, *shape, generator=generator).bfloat16() for shape in ((A, D), (D,)))
    return aux, last


def make_row(name: str, ids: list[int], context: int = 1) -> Row:
    conversation, _, turn = name.rpartition("/")
    return Row(
        id=conversation,
        source="test",
        domain="test",
        turn=int(turn),
        input_ids=ids,
        context_length=context,
        clipped=False,
    )


@pytest.fixture(scope="module")
def states() -> States:
    return {name: make_states(length, seed) for seed, (name, length) in enumerate(LENGTHS.items())}


ROWS = {
    name: make_row(name, [100 * number + place for place in range(length)])
    for number, (name, length) in enumerate(LENGTHS.items())
}


def write(folder: Path, states: States, shard_tokens: int = 7) -> ShardWriter:
    """Add all rows that are not there yet, in order."""
    writer = ShardWriter(folder, INFO, shard_tokens)
    for name, (aux, last) in states.items():
        if name not in writer.done:
            writer.add(ROWS[name], aux, last)
    return writer


def assert_holds(store: Store, states: States) -> None:
    assert set(store.ids()) == set(states)
    for name, (aux, last) in states.items():
        found_aux, found_last = store.get(name)
        assert store.length(name) == len(last)
        assert store.token_ids(name) == ROWS[name].input_ids
        assert torch.equal(found_aux, aux)
        assert torch.equal(found_last, last)


@pytest.mark.parametrize("shard_tokens", [1, 7, 1000], ids=["a shard each", "several shards", "one shard"])
def test_rows_come_back_as_they_were_added(tmp_path: Path, states: States, shard_tokens: int) -> None:
    folder = tmp_path / "new" / "train"
    index = write(folder, states, shard_tokens).finish()
    assert index is not None
    assert_holds(Store(folder), states)
    assert len(index["shards"]) == {1: 5, 7: 3, 1000: 1}[shard_tokens]
    assert sum(shard["tokens"] for shard in index["shards"]) == sum(LENGTHS.values())


def test_index_states_the_convention_and_what_the_shards_have_in_common(tmp_path: Path, states: States) -> None:
    write(tmp_path, states).finish()
    index = read_json(tmp_path / "index.json")
    assert index["convention"] == CONVENTION
    assert index["layer_ids"] == [2, 4, 5]
    assert (index["format"], index["fingerprint"], index["revision"]) == (FORMAT, "f00d", "org/target")
    assert (index["template"], index["dtype"], index["last"]) == ("7e", "bfloat16", "all")
    assert Store(tmp_path).info == INFO
    for shard in index["shards"]:
        assert shard["sha256"] == sha256_of(tmp_path / shard["file"])


def test_bytes_per_token_are_what_lies_on_disk(tmp_path: Path, states: States) -> None:
    assert INFO.bytes_per_token() == 4 * D * 2 + 4
    write(tmp_path, states, 1000).finish()
    payload = sum(LENGTHS.values()) * INFO.bytes_per_token()
    assert payload <= (tmp_path / "shard-0-00000.safetensors").stat().st_size < payload + 1024


def test_a_killed_writer_goes_on_behind_its_last_whole_shard(tmp_path: Path, states: States) -> None:
    """Rows of whole shards (8 and 9 tokens here) are neither asked for again nor written again."""
    killed = ShardWriter(tmp_path, INFO, 7)
    for name in ("a/0", "b/0", "b/1"):
        killed.add(ROWS[name], *states[name])
    again = ShardWriter(tmp_path, INFO, 7)
    assert again.done == {"a/0", "b/0", "b/1"}
    before = sha256_of(tmp_path / "shard-0-00000.safetensors")
    write(tmp_path, states).finish()
    assert sha256_of(tmp_path / "shard-0-00000.safetensors") == before
    assert_holds(Store(tmp_path), states)


def test_unflushed_rows_of_a_killed_writer_are_written_again(tmp_path: Path, states: States) -> None:
    killed = ShardWriter(tmp_path, INFO, 1000)
    killed.add(ROWS["a/0"], *states["a/0"])
    assert killed.done == set()
    assert ShardWriter(tmp_path, INFO, 1000).done == set()
    write(tmp_path, states).finish()
    assert_holds(Store(tmp_path), states)


@pytest.mark.parametrize("rest", ["shard without its list", "torn temporary files"])
def test_what_a_kill_left_behind_does_not_count(tmp_path: Path, states: States, rest: str) -> None:
    writer = ShardWriter(tmp_path, INFO, 7)
    for name in ("a/0", "b/0", "b/1"):
        writer.add(ROWS[name], *states[name])
    if rest == "shard without its list":
        (tmp_path / "shard-0-00001.json").unlink()
    else:
        (tmp_path / "shard-0-00001.json").rename(tmp_path / ".shard-0-00001.json.x1.part")
        whole = (tmp_path / "shard-0-00001.safetensors").read_bytes()
        (tmp_path / "shard-0-00001.safetensors").unlink()
        (tmp_path / ".shard-0-00001.safetensors.x1.part").write_bytes(whole[:50])
    again = ShardWriter(tmp_path, INFO, 7)
    assert again.done == {"a/0", "b/0"}
    write(tmp_path, states).finish()
    store = Store(tmp_path)
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
    with pytest.raises(InputError, match=r"format 99, this version reads 2; remove .* to capture again"):
        Store(tmp_path)


def test_shards_of_the_first_format_are_refused(tmp_path: Path) -> None:
    """Its lists had no format number."""
    write_json(tmp_path / "shard-00000.json", {"file": "shard-00000.safetensors", "rows": [], "tokens": 0})
    with pytest.raises(InputError, match=r"a store of format 1, this version reads 2; remove .* to capture again"):
        ShardWriter(tmp_path, INFO, 7)


@pytest.mark.parametrize(("name", "value"), [("fingerprint", "beef"), ("layer_ids", [1, 4, 5]), ("dtype", "int8")])
def test_a_folder_is_not_filled_with_states_of_two_kinds(
    tmp_path: Path, states: States, name: str, value: object
) -> None:
    write(tmp_path, states)
    with pytest.raises(InputError, match=rf"shard-0-00000\.safetensors: {name} is .*, here it is"):
        ShardWriter(tmp_path, replace(INFO, **{name: value}), 7)


@pytest.mark.parametrize("damage", ["cut off", "missing", "header torn"])
def test_a_damaged_shard_is_named(tmp_path: Path, states: States, damage: str) -> None:
    write(tmp_path, states).finish()
    path = tmp_path / "shard-0-00001.safetensors"
    whole = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(whole[: len(whole) // 2 if damage == "cut off" else 4])
    store = Store(tmp_path)
    store.get("a/0")
    with pytest.raises(InputError, match=r"shard-0-00001\.safetensors.*capture again"):
        store.get("b/1")


# ---- several writers -------------------------------------------------------------------------------------


def write_share(folder: Path, rank: int, num_ranks: int, barrier: object) -> None:
    torch.set_num_threads(1)
    writer = ShardWriter(folder, INFO, 7, rank=rank, num_ranks=num_ranks)
    for number in range(rank, 12, num_ranks):
        writer.add(make_row(f"n{number}/0", [number, 1, 2, 3]), *make_states(4, number))
    barrier.wait()  # type: ignore[attr-defined]
    writer.finish()


def test_several_processes_fill_one_folder(tmp_path: Path) -> None:
    """All finish at once; whoever is last writes the one index."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    writers = [context.Process(target=write_share, args=(tmp_path, rank, 3, barrier)) for rank in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    store = Store(tmp_path)
    assert store.index["shards_by_rank"] == {"0": 2, "1": 2, "2": 2}
    for number in range(12):
        aux, last = make_states(4, number)
        found_aux, found_last = store.get(f"n{number}/0")
        assert torch.equal(found_aux, aux)
        assert torch.equal(found_last, last)


def test_there_is_no_index_before_every_writer_has_finished(tmp_path: Path, states: States) -> None:
    first = ShardWriter(tmp_path, INFO, 7, rank=0, num_ranks=2)
    second = ShardWriter(tmp_path, INFO, 7, rank=1, num_ranks=2)
    first.add(ROWS["a/0"], *states["a/0"])
    second.add(ROWS["b/0"], *states["b/0"])
    assert first.finish() is None
    with pytest.raises(InputError, match=r"index\.json: no such file"):
        Store(tmp_path)
    assert second.finish() is not None
    assert set(Store(tmp_path).ids()) == {"a/0", "b/0"}


def test_a_writer_that_begins_again_takes_its_word_back(tmp_path: Path, states: States) -> None:
    first = ShardWriter(tmp_path, INFO, 7, rank=0, num_ranks=2)
    assert first.finish() is None
    ShardWriter(tmp_path, INFO, 7, rank=0, num_ranks=2)
    assert ShardWriter(tmp_path, INFO, 7, rank=1, num_ranks=2).finish() is None


def test_rows_of_more_writers_than_go_on_are_kept(tmp_path: Path, states: States) -> None:
    """Killed with two ranks, taken up again by one."""
    killed = ShardWriter(tmp_path, INFO, 1, rank=1, num_ranks=2)
    killed.add(ROWS["b/1"], *states["b/1"])
    write(tmp_path, states).finish()
    assert_holds(Store(tmp_path), states)


def test_an_index_that_misses_a_rank_is_refused(tmp_path: Path, states: States) -> None:
    for rank, name in enumerate(("a/0", "b/0")):
        writer = ShardWriter(tmp_path, INFO, 7, rank=rank, num_ranks=2)
        writer.add(ROWS[name], *states[name])
        writer.finish()
    index = read_json(tmp_path / "index.json")
    write_json(tmp_path / "index.json", {**index, "shards": index["shards"][:1]})
    with pytest.raises(InputError, match=r"index\.json: 0 shards of rank 1 instead of 1; remove"):
        Store(tmp_path)
    write_json(tmp_path / "index.json", {**index, "shards": index["shards"][:1], "shards_by_rank": {"0": 1}})
    with pytest.raises(InputError, match=r"index\.json: 0 shards of rank 1 instead of its own"):
        Store(tmp_path)


# ---- only what a loss reads, and nothing twice -----------------------------------------------------------


def test_the_last_state_is_kept_where_a_loss_over_the_answer_reads_it(tmp_path: Path) -> None:
    """From Medusa's first slot, two before the answer, up to the state that predicts the answer's last token."""
    info = replace(INFO, last="answer")
    writer = ShardWriter(tmp_path, info, 1000)
    contexts = {"a/0": (10, 6), "b/0": (3, 1), "c/0": (1, 1)}
    rows = {name: make_row(name, list(range(length)), context) for name, (length, context) in contexts.items()}
    found = {name: make_states(len(row.input_ids), seed) for seed, (name, row) in enumerate(rows.items())}
    for name, row in rows.items():
        writer.add(row, *found[name])
    writer.finish()
    store = Store(tmp_path)
    assert {name: store.last_window(name) for name in rows} == {"a/0": (4, 9), "b/0": (0, 2), "c/0": (0, 0)}
    assert info.count_last(rows.values()) == 5 + 2
    for name, (aux, last) in found.items():
        first, stop = store.last_window(name)
        assert torch.equal(store.get(name)[0], aux)
        assert torch.equal(store.get(name)[1][first:stop], last[first:stop])
        assert not store.get(name)[1][:first].any()
        assert not store.get(name)[1][stop:].any()
        assert torch.equal(store.kept_last(name), last[first:stop])
    payload = info.num_bytes(14, 7)
    assert payload <= (tmp_path / "shard-0-00000.safetensors").stat().st_size < payload + 1024


def stored_positions(folder: Path) -> int:
    store = Store(folder)
    return sum(len(store.files.tensors(Path(shard["file"]).stem)["aux"]) for shard in store.shards)


def turns_of_one_conversation() -> dict[str, tuple[Row, tuple[Tensor, Tensor]]]:
    """Three turns, the longest first, as they are captured; each has the states of its beginning."""
    aux, last = make_states(20, 0)
    return {
        f"a/{turn}": (make_row(f"a/{turn}", list(range(length)), length - 3), (aux[:length], last[:length]))
        for turn, length in ((2, 20), (1, 13), (0, 6))
    }


@pytest.mark.parametrize("last", ["all", "answer"])
@pytest.mark.parametrize("shard_tokens", [1, 1000], ids=["a shard each", "one shard"])
def test_what_turns_of_a_conversation_have_in_common_is_stored_once(
    tmp_path: Path, shard_tokens: int, last: str
) -> None:
    turns = turns_of_one_conversation()
    writer = ShardWriter(tmp_path, replace(INFO, last=last), shard_tokens)
    for row, states in turns.values():
        writer.add(row, *states)
    other = make_row("b/0", list(range(8)))
    writer.add(other, *make_states(8, 1))
    writer.finish()
    assert stored_positions(tmp_path) == 20 + 8
    store = Store(tmp_path)
    for name, (row, (aux, last_TD)) in turns.items():
        first, stop = store.last_window(name)
        assert torch.equal(store.get(name)[0], aux)
        assert torch.equal(store.get(name)[1][first:stop], last_TD[first:stop])
        assert store.token_ids(name) == row.input_ids


def test_states_of_all_bits_are_shared_only_where_they_are_equal(tmp_path: Path) -> None:
    """The same tokens in another batch have other last bits."""
    turns = turns_of_one_conversation()
    aux, last = (states.clone() for states in turns["a/1"][1])
    aux[9:] += 0.5
    turns["a/1"] = (turns["a/1"][0], (aux, last))
    writer = ShardWriter(tmp_path, INFO, 1000)
    for row, states in turns.values():
        writer.add(row, *states)
    writer.finish()
    assert stored_positions(tmp_path) == 20 + 4
    for name, (_, (aux, last)) in turns.items():
        assert torch.equal(Store(tmp_path).get(name)[0], aux)
        assert torch.equal(Store(tmp_path).get(name)[1], last)


def test_a_writer_that_goes_on_shares_with_what_is_there(tmp_path: Path) -> None:
    turns = list(turns_of_one_conversation().values())
    killed = ShardWriter(tmp_path, INFO, 1)
    killed.add(turns[0][0], *turns[0][1])
    again = ShardWriter(tmp_path, INFO, 1)
    for row, states in turns[1:]:
        again.add(row, *states)
    again.finish()
    assert stored_positions(tmp_path) == 20
    for row, (aux, _) in turns:
        assert torch.equal(Store(tmp_path).get(row.key)[0], aux)


# ---- one byte a value ------------------------------------------------------------------------------------


def near(found: Tensor, wanted: Tensor, bound: float = 0.1) -> bool:
    difference = (found.float() - wanted.float()).norm(dim=-1) / wanted.float().norm(dim=-1)
    return bool((difference < bound).all())


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("shard_tokens", [1, 1000], ids=["a shard each", "one shard"])
def test_rows_of_one_byte_a_value_come_back_near(tmp_path: Path, states: States, dtype: str, shard_tokens: int) -> None:
    writer = ShardWriter(tmp_path, replace(INFO, dtype=dtype), shard_tokens)
    for name, (aux, last) in states.items():
        writer.add(ROWS[name], aux, last)
    writer.finish()
    store = Store(tmp_path)
    for name, (aux, last) in states.items():
        found_aux, found_last = store.get(name)
        assert found_aux.dtype == found_last.dtype == torch.bfloat16
        assert near(found_aux, aux)
        assert near(found_last, last)


@pytest.mark.parametrize("dtype", CODES)
def test_rows_without_captured_layers_can_have_one_byte_a_value(tmp_path: Path, dtype: str) -> None:
    writer = ShardWriter(tmp_path, replace(INFO, dtype=dtype, layer_ids=[]), 1000)
    aux, last = make_states(9, 0)
    writer.add(make_row("a/0", list(range(9))), aux[:, :0], last)
    writer.finish()
    found_aux, found_last = Store(tmp_path).get("a/0")
    assert found_aux.shape == (9, 0, D)
    assert near(found_last, last)


def test_an_opening_of_one_byte_a_value_is_stored_once_in_each_shard(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, replace(INFO, dtype="int8"), 30)
    for number in range(4):
        aux, last = make_states(16, number)
        aux[:10], last[:10] = make_states(10, 99)
        writer.add(make_row(f"n{number}/0", [*range(10), *range(100 * number, 100 * number + 6)]), aux, last)
    writer.finish()
    assert stored_positions(tmp_path) == 2 * (16 + 6)
    for number in range(4):
        aux, last = make_states(16, number)
        aux[:10], last[:10] = make_states(10, 99)
        assert near(Store(tmp_path).get(f"n{number}/0")[0], aux)
        assert near(Store(tmp_path).get(f"n{number}/0")[1], last)


@pytest.mark.parametrize("dtype", CODES)
def test_one_byte_a_value_takes_at_most_half_of_bf16(tmp_path: Path, dtype: str) -> None:
    """As wide as a small target, with an opening of 8 in rows of 64 tokens; the files as they are, lists and all."""
    sizes = {}
    for kind in ("bfloat16", dtype):
        info = replace(INFO, dtype=kind, hidden_size=576, last="answer")
        writer = ShardWriter(tmp_path / kind, info, 4096)
        generator = torch.Generator().manual_seed(0)
        for number in range(64):
            ids = [*range(8), *torch.randint(1000, (56,), generator=generator).tolist()]
            shape = (64, A, 576)
            aux = torch.randn(shape, generator=generator).bfloat16()
            writer.add(make_row(f"n{number}/0", ids, 32), aux, aux[:, 0])
        writer.finish()
        sizes[kind] = sum(path.stat().st_size for path in (tmp_path / kind).iterdir())
    assert sizes[dtype] <= sizes["bfloat16"] / 2
