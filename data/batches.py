"""Packed micro batches in a seeded order that can be taken up again at any micro batch.

A pack is a list of whole rows laid end to end; attention never crosses a row's edge. Epochs follow one another without
a break, so no rank ever gets an empty or short last batch.
"""

import itertools
import random
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from drafthead.data.encoding import Row
from drafthead.data.shards import Store
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Pack:
    """Tensors of one micro batch; shapes T tokens, A captured layers, D hidden."""

    tokens_T: Tensor
    aux_TAD: Tensor
    last_TD: Tensor
    """State before the final norm."""
    position_T: Tensor
    supervised_T: Tensor
    """True where the token is one that the target generates."""
    documents: list[tuple[int, int]]
    """(start, length) of each row in the pack, in order, covering 0..T."""

    def checksum(self, start: int = 0) -> int:
        """Of its tokens: a seed that a resumed run, and any number of ranks, gives this pack again."""
        return zlib.crc32(self.tokens_T.cpu().numpy().tobytes(), start)


def plan_epoch(lengths: list[int], capacity: int, seed: int, epoch: int) -> list[list[int]]:
    """Deal all rows, shuffled, into packs of at most `capacity` tokens (a longer row gets a pack of its own)."""
    order = list(range(len(lengths)))
    random.Random(f"{seed}-{epoch}").shuffle(order)
    packs: list[list[int]] = []
    room = 0
    for row in order:
        if lengths[row] > room or not packs:
            packs.append([])
            room = capacity
        packs[-1].append(row)
        room -= lengths[row]
    return packs


def stream_packs(lengths: list[int], capacity: int, seed: int) -> Iterator[list[int]]:
    """Packs of epoch 0, 1, 2, ... without end."""
    for epoch in itertools.count():
        yield from plan_epoch(lengths, capacity, seed, epoch)


ALIKE_WITHIN = 16
"""Steps among whose packs those of a step are chosen; of the recipe's, 2 % of a step is waited then, instead of 10."""


def plan_steps(
    lengths: list[int], slots: list[int], capacity: int, seed: int, packs_per_step: int, tokens: int
) -> list[list[list[int]]]:
    """Steps of `packs_per_step` packs each, until `tokens` tokens have been dealt.

    The packs of a step run at once, on ranks or cores, and the step takes as long as its longest: they are those of
    `ALIKE_WITHIN` steps of an epoch that have about as many supervised slots (`slots` of each row).
    """
    stream = _steps_of_alike(lengths, slots, capacity, seed, packs_per_step)
    steps: list[list[list[int]]] = []
    dealt = 0
    while dealt < tokens:
        steps.append(next(stream))
        dealt += sum(lengths[row] for pack in steps[-1] for row in pack)
    return steps


def _steps_of_alike(
    lengths: list[int], slots: list[int], capacity: int, seed: int, packs_per_step: int
) -> Iterator[list[list[int]]]:
    """Without end; every epoch is dealt out before the next one, so that no row is seen twice before all others are."""
    if packs_per_step == 1:
        yield from ([pack] for pack in stream_packs(lengths, capacity, seed))
    left: list[list[int]] = []
    for epoch in itertools.count():
        packs = left + plan_epoch(lengths, capacity, seed, epoch)
        if left and len(packs) >= packs_per_step:  # a step of two epochs
            yield packs[:packs_per_step]
            packs = packs[packs_per_step:]
        whole = len(packs) - len(packs) % packs_per_step
        packs, left = packs[:whole], packs[whole:]
        chance = random.Random(f"{seed}-{epoch}-alike")
        for start in range(0, whole, ALIKE_WITHIN * packs_per_step):
            window = packs[start : start + ALIKE_WITHIN * packs_per_step]
            window.sort(key=lambda pack: sum(slots[row] for row in pack))
            steps = [window[first : first + packs_per_step] for first in range(0, len(window), packs_per_step)]
            chance.shuffle(steps)
            yield from steps


def supervised_slots(row: Row) -> int:
    """Slots of a row that a head is trained on at step 0: those whose predicted token x[i+2] is supervised."""
    return sum(row.loss_mask[2:])


def load_pack(rows: list[Row], store: Store) -> Pack:
    """Read the states of the rows and lay everything end to end."""
    return lay_out(rows, [store.get(row.key) for row in rows])


def lay_out(rows: list[Row], states: list[tuple[Tensor, Tensor]]) -> Pack:
    """Rows and their states (aux [T, A, D], last [T, D]) end to end."""
    lengths = [len(row.input_ids) for row in rows]
    starts = list(itertools.accumulate(lengths, initial=0))
    return Pack(
        tokens_T=torch.tensor([token for row in rows for token in row.input_ids]),
        aux_TAD=torch.cat([aux for aux, _ in states]),
        last_TD=torch.cat([last for _, last in states]),
        position_T=torch.cat([torch.arange(length) for length in lengths]),
        supervised_T=torch.tensor([bool(flag) for row in rows for flag in row.loss_mask]),
        documents=list(zip(starts, lengths, strict=False)),
    )


def prefetch(packs: list[list[Row]], store: Store, ahead: int = 2) -> Iterator[Pack]:
    """Load packs of stored states; see `load_ahead`."""
    return load_ahead(packs, lambda rows: load_pack(rows, store), ahead)


def load_ahead(packs: list[list[Row]], load: Callable[[list[Row]], Pack], ahead: int = 2) -> Iterator[Pack]:
    """Load packs in a thread, `ahead` of the one in use."""
    with ThreadPoolExecutor(1) as pool:
        waiting = [pool.submit(load, rows) for rows in packs[:ahead]]
        for upcoming in [*packs[ahead:], *[None] * len(waiting)]:
            pack = waiting.pop(0).result()
            if upcoming is not None:
                waiting.append(pool.submit(load, upcoming))
            yield pack
