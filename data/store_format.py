"""How a hidden-state store is laid out: what its files say, and how states are coded in them.

Shapes: T tokens of rows, S stored positions, L stored last states, A captured layers, D hidden.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from drafthead.data.encoding import Row
from drafthead.data.errors import InputError
from drafthead.data.files import read_json
from drafthead.data.quantize import CODES, quantize, read_dtype, vector_bytes
from torch import Tensor

FORMAT = 2
CONVENTION = "id i: the residual stream entering layer i; last: before the final norm"
LAST_LEAD = 2
"""Positions before the first supervised token whose last state a loss reads: Medusa's first slot, then the state that
predicts the first supervised token."""
TOKEN_ID_BYTES = 4

CHANNELS = ("aux_channel", "last_channel")
"""Sizes of each channel, of states of one byte a value."""

LastKept = Literal["all", "answer"]
Piece = tuple[str, int, int]
"""Shard, first position in it, count."""


@dataclass(frozen=True, kw_only=True)
class StoreInfo:
    """What all shards of a store have in common."""

    fingerprint: str
    """Of the target that the states come from: of all its files."""
    revision: str = ""
    """What the target was called: a folder, a hub id."""
    template: str = ""
    """Hash of the chat template and its arguments."""
    layer_ids: list[int]
    num_layers: int
    hidden_size: int
    dtype: str
    """`bfloat16`, `float16`, `float32`, or of one byte a value `int8`, `fp8`."""
    last: LastKept = "all"
    """Positions that keep the last state: all, or those that a loss over the answer reads."""

    def bytes_per_token(self) -> int:
        """Of a token that keeps everything and shares nothing."""
        return self.num_bytes(1, 1)

    def num_bytes(self, tokens: int, last_states: int) -> int:
        """Of so many tokens, so many of which keep the last state."""
        vector = vector_bytes(self.hidden_size, self.dtype)
        return tokens * (len(self.layer_ids) * vector + TOKEN_ID_BYTES) + last_states * vector

    def last_window(self, length: int, context_length: int) -> tuple[int, int]:
        """First position of a row that keeps its last state, and the first behind them."""
        if self.last == "all":
            return 0, length
        return max(0, context_length - LAST_LEAD), max(0, length - 1)

    def no_states(self, name: str) -> Tensor:
        """`aux` [0, A, D] or `last` [0, D] as they are read."""
        layers = [len(self.layer_ids)] if name == "aux" else []
        return torch.zeros(0, *layers, self.hidden_size, dtype=read_dtype(self.dtype))

    def count_last(self, rows: Iterable[Row]) -> int:
        """Last states that the rows keep."""
        windows = (self.last_window(len(row.input_ids), row.context_length) for row in rows)
        return sum(stop - first for first, stop in windows)


@dataclass(frozen=True, kw_only=True)
class RowPlace:
    """Where the states of a row are; `shard` holds its ids and what it does not share."""

    shard: str
    start: int
    """Of its ids."""
    length: int
    context_length: int
    aux: list[Piece]
    last: list[Piece]
    digest: str
    """Of what it does not share; see `digest_of`."""


def cut(pieces: list[Piece], count: int) -> list[Piece]:
    """The first `count` positions of the pieces."""
    found: list[Piece] = []
    for shard, start, size in pieces:
        if count > 0:
            found.append((shard, start, min(size, count)))
        count -= size
    return found


# ---- tensors of a shard


def stored_dtype(dtype: str) -> torch.dtype:
    """Of the tensors `aux` and `last` of a shard."""
    return CODES[dtype][0] if dtype in CODES else read_dtype(dtype)


def code_states(name: str, states: Tensor, dtype: str) -> dict[str, Tensor]:
    """Tensors of a shard that hold `aux` [S, A, D] or `last` [S, D]."""
    if dtype not in CODES:
        return {name: states.contiguous()}
    if name == "last":
        coded = quantize(states, dtype)
        return {name: coded.code_SD, f"{name}_scale": coded.scale_S, f"{name}_channel": coded.channel_D}
    layers = [quantize(states[:, layer], dtype) for layer in range(states.shape[1])]
    if not layers:
        empty = states.new_zeros(0, states.shape[2])
        return {
            name: states.to(CODES[dtype][0]),
            f"{name}_scale": states.new_zeros(len(states), 0).half(),
            f"{name}_channel": empty.float(),
        }
    return {
        name: torch.stack([one.code_SD for one in layers], 1),
        f"{name}_scale": torch.stack([one.scale_S for one in layers], 1),
        f"{name}_channel": torch.stack([one.channel_D for one in layers]),
    }


def digest_of(row_id: str, place: RowPlace, tensors: dict[str, Tensor]) -> str:
    """Hash of a row's name, ids and stored states, of those in its own shard."""
    found = hashlib.blake2b(row_id.encode(), digest_size=8)
    found.update(_bytes(tensors["ids"][place.start : place.start + place.length]))
    for name, pieces in (("aux", place.aux), ("last", place.last)):
        for shard, start, count in pieces:
            if shard == place.shard:
                for tensor in (tensors[name], tensors.get(f"{name}_scale")):
                    if tensor is not None:
                        found.update(_bytes(tensor[start : start + count]))
    return found.hexdigest()


def channels_digest(tensors: dict[str, Tensor]) -> str:
    """Hash of what all rows of a shard are widened with; empty where nothing is."""
    names = [name for name in CHANNELS if name in tensors]
    found = hashlib.blake2b(digest_size=8)
    for name in names:
        found.update(_bytes(tensors[name]))
    return found.hexdigest() if names else ""


def _bytes(tensor: Tensor) -> bytes:
    found: bytes = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return found


def listed(row_id: str, place: RowPlace, tensors: dict[str, Tensor], own: str) -> dict[str, Any]:
    """A row in its shard's list; the shard's own pieces do not repeat its name."""
    short = {
        name: [[start, count] if shard == own else [start, count, shard] for shard, start, count in pieces]
        for name, pieces in (("aux", place.aux), ("last", place.last))
    }
    lengths = {"start": place.start, "length": place.length, "context": place.context_length}
    return {"id": row_id, **lengths, **short, "digest": digest_of(row_id, place, tensors)}


# ---- lists and the index


def check_same(folder: Path, shard: dict[str, Any], info: StoreInfo) -> None:
    for name, value in asdict(info).items():
        if shard["info"][name] != value:
            raise InputError(
                f"{folder}/{shard['file']}: {name} is {shard['info'][name]}, here it is {value}; remove {folder}"
            )


def read_lists(folder: Path) -> list[dict[str, Any]]:
    """The lists of all whole shards, in the order of their names.

    Raises:
        InputError: One has another format.
    """
    lists = [read_json(path) for path in sorted(folder.glob("shard-*.json"))]
    for shard in lists:
        check_format(folder, shard)
    return lists


def list_of(folder: Path, shard_file: str) -> Path:
    return (folder / shard_file).with_suffix(".json")


def row_places(shard: dict[str, Any]) -> dict[str, RowPlace]:
    """Where a shard's rows are, by id, from its list."""
    own = Path(shard["file"]).stem

    def pieces(listed: list[list[Any]]) -> list[Piece]:
        return [(str(rest[0]) if rest else own, start, count) for start, count, *rest in listed]

    return {
        row["id"]: RowPlace(
            shard=own,
            start=row["start"],
            length=row["length"],
            context_length=row["context"],
            aux=pieces(row["aux"]),
            last=pieces(row["last"]),
            digest=row["digest"],
        )
        for row in shard["rows"]
    }


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a finished store.

    Raises:
        InputError: There is none, it has another format, or it misses shards of a rank.
    """
    index: dict[str, Any] = read_json(folder / "index.json")
    check_format(folder, index)
    listed = Counter(str(shard["rank"]) for shard in index["shards"])
    ranks = {str(rank) for rank in range(index["num_ranks"])} | index["shards_by_rank"].keys()
    for rank in sorted(ranks):
        if index["shards_by_rank"].get(rank) != listed[rank]:
            raise InputError(
                f"{folder}/index.json: {listed[rank]} shards of rank {rank} instead of "
                f"{index['shards_by_rank'].get(rank, 'its own')}; remove {folder} to capture again"
            )
    return index


def check_format(folder: Path, found: dict[str, Any]) -> None:
    # the lists of format 1 had no number
    if found.get("format", 1) != FORMAT:
        raise InputError(
            f"{folder}: a store of format {found.get('format', 1)}, this version reads {FORMAT}; "
            f"remove {folder} to capture again"
        )
