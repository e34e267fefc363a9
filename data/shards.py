"""The hidden-state store: shards of row states, each whole or absent, and an index with checksums.

    shard-0-00000.safetensors   ids [T]; aux [S, A, D]; last [L, D]; of one byte a value also their scales and channels
    shard-0-00000.json          which rows, where, their digests, the shard's checksum; the commit record of the shard
    rank-0.json                 this writer has finished
    index.json                  what all shards have in common, and every shard of every writer; written by the last

Shards are named by the rank of their writer and a number, so several processes write into one folder.

A row's states are pieces: what its conversation has in common with an earlier row (the turns before) is stored once.
Of types that keep all bits only what is equal bit for bit is taken from there. States of one byte a value, which differ
by more than the rounding of a batch, are taken where the token ids are equal, and also what a shard's rows have in
common at their beginning (a system prompt) is stored once: with it they need at most half of the bytes of bf16, in
spite of their scales. `last` is kept where a loss reads it (`StoreInfo.last`).

Layer convention, here and everywhere: id i is the residual stream ENTERING layer i of the target (0 = embeddings);
`last` is the stream before the final norm.

Shapes: T tokens of rows, S stored positions, L stored last states, A captured layers, D hidden.
"""

import contextlib
import fcntl
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from drafthead.data.encoding import Row
from drafthead.data.errors import InputError
from drafthead.data.files import read_json, sha256_of, write_atomically, write_json, write_text
from drafthead.data.quantize import CODES, Quantized, read_dtype
from drafthead.data.store_format import (
    CONVENTION,
    FORMAT,
    Piece,
    RowPlace,
    StoreInfo,
    channels_digest,
    check_same,
    code_states,
    cut,
    list_of,
    listed,
    read_index,
    read_lists,
    row_places,
)
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

LEAST_SHARED = 2
OPENING_KEY = 4
"""Rows that begin with the same so many tokens are compared."""


# ---- writing ---------------------------------------------------------------------------------------------


class ShardWriter:
    """Write rows into shards; rows of whole shards survive a kill and are listed in `done`.

    Args:
        rank: Of this writer among the `num_ranks` that fill the folder at the same time; each row belongs to one.

    Raises:
        InputError: The folder holds shards of another format, target or setting.
    """

    def __init__(self, folder: Path, info: StoreInfo, shard_tokens: int, *, rank: int = 0, num_ranks: int = 1):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.info, self.shard_tokens = folder, info, shard_tokens
        self.rank, self.num_ranks = rank, num_ranks
        self.files = ShardFiles(folder, info)
        (folder / f"rank-{rank}.json").unlink(missing_ok=True)
        self.done: set[str] = set()
        self.number = 0
        self.conversations: dict[str, list[RowPlace]] = {}
        for shard in read_lists(folder):
            check_same(folder, shard, info)
            self._continue_behind(shard)
        self._clear()

    def _continue_behind(self, shard: dict[str, Any]) -> None:
        if shard["rank"] == self.rank:
            self.number = max(self.number, shard["number"] + 1)
        for row_id, place in row_places(shard).items():
            self.done.add(row_id)
            self.conversations.setdefault(row_id.rpartition("/")[0], []).append(place)

    def _clear(self) -> None:
        self.name = f"shard-{self.rank}-{self.number:05d}"
        self.pending: dict[str, RowPlace] = {}
        self.ids: list[int] = []
        # by the position that they begin at
        self.parts: dict[str, dict[int, Tensor]] = {"aux": {}, "last": {}}
        self.filled = {"aux": 0, "last": 0}
        self.tokens = 0
        # of this shard alone, so that losing a shard costs no other conversation's rows
        self.openings: dict[tuple[int, ...], RowPlace] = {}

    def add(self, row: Row, aux_TAD: Tensor, last_TD: Tensor) -> None:
        """Take the states of a row, those of all its positions."""
        length = len(row.input_ids)
        assert len(aux_TAD) == len(last_TD) == length, row.key
        if self.info.dtype not in CODES:
            kept = read_dtype(self.info.dtype)
            aux_TAD, last_TD = aux_TAD.to(kept), last_TD.to(kept)
        shared, home = self._shared(row, aux_TAD, last_TD)
        first, stop = self.info.last_window(length, row.context_length)
        kept_last = shared if self.info.last == "all" else first
        place = RowPlace(
            shard=self.name,
            start=len(self.ids),
            length=length,
            context_length=row.context_length,
            aux=[*cut(home.aux if home else [], shared), *self._append("aux", aux_TAD[shared:])],
            last=[
                *cut(home.last if home and self.info.last == "all" else [], shared),
                *self._append("last", last_TD[kept_last:stop]),
            ],
            digest="",  # known once the shard is coded
        )
        self.ids += row.input_ids
        self.pending[row.key] = place
        self.conversations.setdefault(row.id, []).append(place)
        self.openings.setdefault(tuple(row.input_ids[:OPENING_KEY]), place)
        self.tokens += length
        if self.tokens >= self.shard_tokens:
            self.flush()

    def _append(self, name: str, states: Tensor) -> list[Piece]:
        if not len(states):
            return []
        start = self.filled[name]
        self.filled[name] += len(states)
        self.parts[name][start] = states
        return [(self.name, start, len(states))]

    def _shared(self, row: Row, aux_TAD: Tensor, last_TD: Tensor) -> tuple[int, RowPlace | None]:
        """The longest beginning of the row that is stored already, and the row that it is stored with."""
        keeps_bits = self.info.dtype not in CODES
        stored = list(self.conversations.get(row.id, []))
        opening = self.openings.get(tuple(row.input_ids[:OPENING_KEY]))
        if opening and not keeps_bits:
            stored.append(opening)
        best: tuple[int, RowPlace | None] = (0, None)
        for place in stored:
            count = equal_beginning(self._ids(place), row.input_ids)
            if count > best[0] and keeps_bits:
                count = self._equal_bits(count, place, aux_TAD, last_TD)
            if count > best[0]:
                best = (count, place)
        return best if best[0] >= LEAST_SHARED else (0, None)

    def _ids(self, place: RowPlace) -> list[int]:
        if place.shard == self.name:
            return self.ids[place.start : place.start + place.length]
        return self.files.ids(place)

    def _equal_bits(self, count: int, place: RowPlace, aux_TAD: Tensor, last_TD: Tensor) -> int:
        """How many of the first `count` states are the very ones stored."""
        same = (self._stored("aux", cut(place.aux, count)) == aux_TAD[:count]).flatten(1).all(-1)
        if self.info.last == "all":
            same &= (self._stored("last", cut(place.last, count)) == last_TD[:count]).all(-1)
        return int(same.long().cumprod(0).sum())

    def _stored(self, name: str, pieces: list[Piece]) -> Tensor:
        own = self.parts[name]  # a piece begins where one that was appended does
        return torch.cat(
            [
                own[start][:count] if shard == self.name else self.files.states(name, (shard, start, count))
                for shard, start, count in pieces
            ]
        )

    def flush(self) -> None:
        """Write the rows that were added since the last shard."""
        if not self.pending:
            return
        path = self.folder / f"{self.name}.safetensors"
        tensors = {"ids": torch.tensor(self.ids, dtype=torch.int32)}
        for name, parts in self.parts.items():
            found = torch.cat(list(parts.values())) if parts else self.info.no_states(name)
            tensors.update(code_states(name, found, self.info.dtype))
        write_atomically(path, lambda temporary: save_file(tensors, temporary))
        rows = [listed(key, place, tensors, self.name) for key, place in self.pending.items()]
        shard = {
            "format": FORMAT,
            "info": asdict(self.info),
            "file": path.name,
            "rank": self.rank,
            "number": self.number,
            "tokens": self.tokens,
            "sha256": sha256_of(path),
            "channels": channels_digest(tensors),
            "rows": rows,
        }
        # last: a shard without it does not count
        write_text(self.folder / f"{self.name}.json", json.dumps(shard, separators=(",", ":"), ensure_ascii=False))
        self.done |= self.pending.keys()
        self.number += 1
        self._clear()

    def finish(self) -> dict[str, Any] | None:
        """Flush; the last of the writers writes the index, the others return None."""
        self.flush()
        write_json(self.folder / f"rank-{self.rank}.json", {"rank": self.rank, "num_ranks": self.num_ranks})
        with _locked(self.folder):
            return write_index(self.folder, self.info, self.num_ranks)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with open(folder / ".index.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_index(folder: Path, info: StoreInfo, num_ranks: int) -> dict[str, Any] | None:
    """Merge the lists of all shards into the index, once every writer has finished."""
    finished = [read_json(folder / f"rank-{rank}.json") for rank in range(num_ranks) if _is_there(folder, rank)]
    if [one["num_ranks"] for one in finished] != [num_ranks] * num_ranks:
        return None
    shards = [
        {
            "file": shard["file"],
            "rank": shard["rank"],
            "rows": len(shard["rows"]),
            "tokens": shard["tokens"],
            "bytes": (folder / shard["file"]).stat().st_size,
            "sha256": shard["sha256"],
            "list_sha256": sha256_of(list_of(folder, shard["file"])),
        }
        for shard in read_lists(folder)
    ]
    by_rank = Counter(shard["rank"] for shard in shards)
    index = {
        "format": FORMAT,
        "convention": CONVENTION,
        **asdict(info),
        "num_ranks": num_ranks,
        "shards_by_rank": {str(rank): by_rank[rank] for rank in sorted({*range(num_ranks), *by_rank})},
        "shards": shards,
    }
    write_json(folder / "index.json", index)
    return index


def _is_there(folder: Path, rank: int) -> bool:
    return (folder / f"rank-{rank}.json").is_file()


def equal_beginning(one: list[int], other: list[int]) -> int:
    """How many ids two rows have in common at their beginning."""
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:
        return shorter
    return next(place for place in range(shorter) if one[place] != other[place])


class ShardFiles:
    """Tensors of a store's shards, memory-mapped and opened when first needed."""

    def __init__(self, folder: Path, info: StoreInfo):
        self.folder, self.info = folder, info
        self.handles: dict[str, Any] = {}
        self.channels: dict[tuple[str, str], Tensor] = {}

    def ids(self, place: RowPlace) -> list[int]:
        window = slice(place.start, place.start + place.length)
        found: list[int] = self.open(place.shard).get_slice("ids")[window].tolist()
        return found

    def states(self, name: str, piece: Piece) -> Tensor:
        """States of one piece as they are read: `aux` [S, A, D] or `last` [S, D]."""
        shard, start, count = piece
        window = slice(start, start + count)
        found: Tensor = self.open(shard).get_slice(name)[window]
        if self.info.dtype not in CODES:
            return found
        scale: Tensor = self.open(shard).get_slice(f"{name}_scale")[window]
        channel = self._channel(shard, name)
        if name == "last":
            return Quantized(found, scale, channel).widen()
        layers = [Quantized(found[:, one], scale[:, one], channel[one]).widen() for one in range(found.shape[1])]
        return torch.stack(layers, 1) if layers else found.to(read_dtype(self.info.dtype))

    def _channel(self, shard: str, name: str) -> Tensor:
        if (shard, name) not in self.channels:
            self.channels[shard, name] = self.open(shard).get_tensor(f"{name}_channel")
        return self.channels[shard, name]

    def tensors(self, shard: str) -> dict[str, Tensor]:
        """All that a shard holds."""
        handle = self.open(shard)
        return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118

    def open(self, shard: str) -> Any:
        if shard not in self.handles:
            path = self.folder / f"{shard}.safetensors"
            try:
                self.handles[shard] = safe_open(path, "pt").__enter__()
            except Exception as error:  # safetensors raises its own bare type
                raise InputError(
                    f"{path}: missing or cut off ({error}); remove {self.folder} to capture again"
                ) from None
        return self.handles[shard]


class Store:
    """Random access to the states of a finished store, memory-mapped.

    Args:
        without: Files of shards that are left out.

    Raises:
        InputError: No index, another format, shards of a rank that the index misses; a shard that is missing or cut off
            when it is first needed.
    """

    def __init__(self, folder: Path, *, without: Collection[str] = ()):
        self.folder = folder
        self.index = read_index(folder)
        self.info = StoreInfo(**{name: self.index[name] for name in StoreInfo.__dataclass_fields__})
        self.shards = [shard for shard in self.index["shards"] if shard["file"] not in without]
        self.files = ShardFiles(folder, self.info)
        self.where: dict[str, RowPlace] = {}
        for shard in self.shards:
            self.where.update(row_places(read_json(list_of(folder, shard["file"]))))

    def ids(self) -> Iterable[str]:
        return self.where.keys()

    def length(self, row_id: str) -> int:
        return self.where[row_id].length

    def token_ids(self, row_id: str) -> list[int]:
        """The row that the states belong to."""
        return self.files.ids(self.where[row_id])

    def get(self, row_id: str) -> tuple[Tensor, Tensor]:
        """States of a row: aux [T, A, D] and last [T, D], of which those that are not kept are zero.

        States of one byte a value are widened to bf16.
        """
        place = self.where[row_id]
        aux = self._joined("aux", place.aux)
        kept = self.kept_last(row_id)
        if len(kept) == place.length:
            return aux, kept
        first, stop = self.last_window(row_id)
        last = kept.new_zeros(place.length, self.info.hidden_size)
        last[first:stop] = kept
        return aux, last

    def kept_last(self, row_id: str) -> Tensor:
        """The last states that are stored, of the positions `last_window`."""
        return self._joined("last", self.where[row_id].last)

    def _joined(self, name: str, pieces: list[Piece]) -> Tensor:
        found = [self.files.states(name, piece) for piece in pieces]
        return found[0] if len(found) == 1 else torch.cat([self.info.no_states(name), *found])

    def last_window(self, row_id: str) -> tuple[int, int]:
        place = self.where[row_id]
        return self.info.last_window(place.length, place.context_length)
