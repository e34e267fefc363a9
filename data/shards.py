"""The hidden-state store: shards of concatenated rows, each whole or absent, and an index with checksums.

`shard-00000.safetensors` holds `aux` [T, A, D] and `last` [T, D] of many rows; `shard-00000.json` beside it says which
rows, where, and the file's sha256. `index.json` is written once all rows are there.

Layer convention, here and everywhere: id i is the residual stream ENTERING layer i of the target (0 = embeddings);
`last` is the stream before the final norm.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from drafthead.data.errors import InputError
from drafthead.data.files import read_json, sha256_of, write_atomically, write_json
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

FORMAT = 1
CONVENTION = "id i: the residual stream entering layer i; last: before the final norm"


@dataclass(frozen=True, kw_only=True)
class StoreInfo:
    """What all shards of a store have in common."""

    fingerprint: str
    """Of the target that the states come from."""
    layer_ids: list[int]
    num_layers: int
    hidden_size: int
    dtype: str

    def bytes_per_token(self) -> int:
        return (len(self.layer_ids) + 1) * self.hidden_size * int(getattr(torch, self.dtype).itemsize)


class ShardWriter:
    """Write rows into shards; rows of whole shards survive a kill and are listed in `done`."""

    def __init__(self, folder: Path, info: StoreInfo, shard_tokens: int):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.info = info
        self.shard_tokens = shard_tokens
        self.shards = [read_json(path) for path in sorted(folder.glob("shard-*.json"))]
        self.done = {row["id"] for shard in self.shards for row in shard["rows"]}
        self._clear()

    def _clear(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.tensors: list[tuple[Tensor, Tensor]] = []
        self.tokens = 0

    def add(self, row_id: str, aux_TAD: Tensor, last_TD: Tensor) -> None:
        length = len(last_TD)
        self.rows.append({"id": row_id, "offset": self.tokens, "length": length})
        self.tensors.append((aux_TAD, last_TD))
        self.tokens += length
        if self.tokens >= self.shard_tokens:
            self.flush()

    def flush(self) -> None:
        """Write the rows that were added since the last shard."""
        if not self.rows:
            return
        name = f"shard-{len(self.shards):05d}"
        path = self.folder / f"{name}.safetensors"
        aux = torch.cat([aux for aux, _ in self.tensors]).contiguous()
        last = torch.cat([last for _, last in self.tensors]).contiguous()
        write_atomically(path, lambda temporary: save_file({"aux": aux, "last": last}, temporary))
        shard = {"file": path.name, "rows": self.rows, "tokens": self.tokens, "sha256": sha256_of(path)}
        write_json(self.folder / f"{name}.json", shard)  # last: a shard without it does not count
        self.shards.append(shard)
        self.done |= {row["id"] for row in self.rows}
        self._clear()

    def finish(self) -> dict[str, Any]:
        """Flush and write the index."""
        self.flush()
        index = {"format": FORMAT, "convention": CONVENTION, **asdict(self.info), "shards": self.shards}
        write_json(self.folder / "index.json", index)
        return index


class Store:
    """Random access to the states of a finished store, memory-mapped.

    Raises:
        InputError: No index, another format, or a shard that is missing or of another size.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        index = read_json(folder / "index.json")
        if index["format"] != FORMAT:
            raise InputError(f"{folder}/index.json: format {index['format']}, this version reads {FORMAT}")
        self.info = StoreInfo(**{name: index[name] for name in StoreInfo.__dataclass_fields__})
        self.shards = index["shards"]
        self.where = {
            row["id"]: (number, row["offset"], row["length"])
            for number, shard in enumerate(self.shards)
            for row in shard["rows"]
        }
        self.handles: dict[int, Any] = {}

    def ids(self) -> Iterable[str]:
        return self.where.keys()

    def length(self, row_id: str) -> int:
        return int(self.where[row_id][2])

    def get(self, row_id: str) -> tuple[Tensor, Tensor]:
        """States of a row: aux [T, A, D] and last [T, D]."""
        number, offset, length = self.where[row_id]
        handle = self._open(number)
        window = slice(offset, offset + length)
        return handle.get_slice("aux")[window], handle.get_slice("last")[window]

    def _open(self, number: int) -> Any:
        if number not in self.handles:
            path = self.folder / self.shards[number]["file"]
            try:
                self.handles[number] = safe_open(path, "pt").__enter__()
            except Exception as error:  # safetensors raises its own bare type
                raise InputError(
                    f"{path}: missing or cut off ({error}); remove {self.folder} to capture again"
                ) from None
        return self.handles[number]

    def check_files(self) -> None:
        """Compare every shard with its checksum."""
        for shard in self.shards:
            path = self.folder / shard["file"]
            if not path.is_file() or sha256_of(path) != shard["sha256"]:
                raise InputError(f"{path}: differs from its checksum; remove {self.folder} to capture again")
