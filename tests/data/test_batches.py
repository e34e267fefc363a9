"""Packs: every row once an epoch, within capacity, in an order that seed and epoch alone decide."""

import itertools
import random
from pathlib import Path

import pytest
import torch
from drafthead.data.batches import (
    ALIKE_WITHIN,
    load_pack,
    plan_epoch,
    plan_steps,
    prefetch,
    stream_packs,
    supervised_slots,
)
from drafthead.data.encoding import Row
from drafthead.data.shards import ShardWriter, Store
from drafthead.data.store_format import StoreInfo

A, D = 2, 4
LENGTHS = [5, 17, 3, 64, 9, 9, 1, 30, 22, 8, 40, 12]
SLOTS = [max(0, length - 2) for length in LENGTHS]


def make_row(number: int, length: int, context: int = 1) -> Row:
    return Row(
        id=f"row{number}",
        source="test",
        domain="test",
        turn=0,
        input_ids=[100 * number + place for place in range(length)],
        context_length=context,
        clipped=False,
    )


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return [make_row(number, length, context=min(2, length)) for number, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def store(rows: list[Row], tmp_path_factory: pytest.TempPathFactory) -> Store:
    """The states of position t of row n hold 100 n + t."""
    folder: Path = tmp_path_factory.mktemp("store")
    info = StoreInfo(fingerprint="f", layer_ids=[0, 1], num_layers=2, hidden_size=D, dtype="float32")
    writer = ShardWriter(folder, info, 40)
    for row in rows:
        values_T = torch.tensor(row.input_ids).float()
        writer.add(row, values_T[:, None, None].expand(-1, A, D), values_T[:, None].expand(-1, D))
    writer.finish()
    return Store(folder)


@pytest.mark.parametrize("capacity", [1, 16, 64, 10_000], ids=lambda capacity: f"capacity {capacity}")
@pytest.mark.parametrize("seed", [0, 7], ids=lambda seed: f"seed {seed}")
def test_an_epoch_deals_every_row_once_within_capacity(capacity: int, seed: int) -> None:
    packs = plan_epoch(LENGTHS, capacity, seed, epoch=2)
    assert sorted(row for pack in packs for row in pack) == list(range(len(LENGTHS)))
    for pack in packs:
        assert pack
        assert sum(LENGTHS[row] for row in pack) <= capacity or len(pack) == 1
    if capacity == 1:
        assert len(packs) == len(LENGTHS)
    if capacity == 10_000:
        assert len(packs) == 1


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    plans = {(seed, epoch): plan_epoch(LENGTHS, 64, seed, epoch) for seed in (0, 1) for epoch in (0, 1, 2)}
    assert all(plan == plan_epoch(LENGTHS, 64, *key) for key, plan in plans.items())
    assert len({str(plan) for plan in plans.values()}) == len(plans)


def test_the_stream_is_one_epoch_after_another() -> None:
    epochs = [plan_epoch(LENGTHS, 64, 3, epoch) for epoch in range(3)]
    count = sum(len(packs) for packs in epochs)
    streamed = list(itertools.islice(stream_packs(LENGTHS, 64, 3), count))
    assert streamed == [pack for packs in epochs for pack in packs]


@pytest.mark.parametrize("packs_per_step", [1, 3], ids=lambda count: f"{count} packs a step")
@pytest.mark.parametrize("tokens", [1, 200, 1000], ids=lambda tokens: f"{tokens} tokens")
def test_steps_are_full_and_end_once_the_tokens_are_dealt(packs_per_step: int, tokens: int) -> None:
    steps = plan_steps(LENGTHS, SLOTS, 64, 0, packs_per_step, tokens)
    assert {len(step) for step in steps} == {packs_per_step}
    sizes = [sum(LENGTHS[row] for pack in step for row in pack) for step in steps]
    assert sum(sizes) >= tokens > sum(sizes[:-1])
    dealt = [pack for step in steps for pack in step]
    if packs_per_step == 1:
        assert dealt == list(itertools.islice(stream_packs(LENGTHS, 64, 0), len(dealt)))


def test_the_packs_of_a_step_are_alike_and_no_row_is_lost() -> None:
    """What runs at once should take as long."""
    generator = random.Random(0)
    lengths = [generator.randint(4, 60) for _ in range(500)]
    slots = [generator.randint(1, length - 2) for length in lengths]
    steps = plan_steps(lengths, slots, 64, 0, 2, 3 * sum(lengths))
    streamed = list(itertools.islice(stream_packs(lengths, 64, 0), 2 * len(steps)))
    dealt = [row for step in steps for pack in step for row in pack]
    assert sorted(dealt[: 3 * len(lengths)]) == sorted(3 * [*range(len(lengths))])

    def waited(pairs: list[list[list[int]]]) -> float:
        work = [[sum(slots[row] for row in pack) for pack in pair] for pair in pairs]
        return sum(max(one) - min(one) for one in work) / sum(map(sum, work))

    assert waited(steps) < 0.25 * waited([streamed[at : at + 2] for at in range(0, len(streamed), 2)])
    totals = [sum(slots[row] for pack in step for row in pack) for step in steps[:ALIKE_WITHIN]]
    assert totals != sorted(totals), "large and small steps take turns"


@pytest.mark.parametrize("packs_per_step", [1, 2, 3, 40], ids=lambda count: f"{count} packs a step")
def test_every_epoch_is_dealt_before_the_next_one(packs_per_step: int) -> None:
    steps = plan_steps(LENGTHS, SLOTS, 64, 0, packs_per_step, 5 * sum(LENGTHS))
    dealt = [row for step in steps for pack in step for row in pack]
    for start in range(0, len(dealt) - len(LENGTHS), len(LENGTHS)):
        assert sorted(dealt[start : start + len(LENGTHS)]) == list(range(len(LENGTHS)))


def test_a_longer_plan_begins_with_the_shorter_one() -> None:
    """So a run can go on where it stopped, with more tokens too."""
    short, long = (plan_steps(LENGTHS, SLOTS, 64, 0, 2, tokens) for tokens in (300, 900))
    assert len(long) > len(short)
    assert long[: len(short)] == short


@pytest.mark.parametrize(
    ("length", "context", "slots"),
    [(7, 3, 4), (7, 1, 5), (7, 0, 5), (4, 2, 2), (3, 3, 0)],
    ids=["C6", "context of one", "no context", "shortest answer", "no answer"],
)
def test_supervised_slots_are_those_whose_predicted_token_is_supervised(length: int, context: int, slots: int) -> None:
    assert supervised_slots(make_row(0, length, context)) == slots


def test_a_pack_lays_rows_end_to_end(rows: list[Row], store: Store) -> None:
    chosen = [rows[7], rows[6], rows[0]]
    pack = load_pack(chosen, store)
    assert pack.documents == [(0, 30), (30, 1), (31, 5)]
    assert pack.tokens_T.tolist() == [token for row in chosen for token in row.input_ids]
    assert pack.position_T.tolist() == [*range(30), 0, *range(5)]
    assert pack.supervised_T.tolist() == [*[False] * 2, *[True] * 28, False, *[False] * 2, *[True] * 3]
    assert pack.aux_TAD.shape == (36, A, D)
    assert torch.equal(pack.aux_TAD[:, 1, 3], pack.tokens_T.float())
    assert torch.equal(pack.last_TD[:, 0], pack.tokens_T.float())


@pytest.mark.parametrize("count", [0, 1, 2, 5], ids=lambda count: f"{count} packs")
@pytest.mark.parametrize("ahead", [1, 2, 4], ids=lambda ahead: f"{ahead} ahead")
def test_prefetch_yields_every_pack_in_order(rows: list[Row], store: Store, count: int, ahead: int) -> None:
    packs = [[rows[2 * number], rows[2 * number + 1]] for number in range(count)]
    found = [pack.tokens_T.tolist() for pack in prefetch(packs, store, ahead)]
    assert found == [[token for row in pack for token in row.input_ids] for pack in packs]


def test_an_error_while_loading_reaches_the_loop(rows: list[Row], store: Store) -> None:
    loaded = prefetch([[rows[0]], [make_row(99, 4)], [rows[1]]], store)
    assert next(loaded).tokens_T.tolist() == rows[0].input_ids
    with pytest.raises(KeyError, match="row99"):
        next(loaded)
