"""Read back what W&B wrote offline: the records of .wandb files."""

import json
import struct
from pathlib import Path
from typing import Any

BLOCK = 32768
HEADER = struct.Struct("<IHB")


def records(path: Path) -> list[Any]:
    """Read a .wandb file: 7 bytes of header, then LevelDB log blocks of protobuf records."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    assert data[:4] == b":W&B"
    found, parts, offset = [], b"", 7
    while offset + HEADER.size <= len(data):
        if BLOCK - offset % BLOCK < HEADER.size:
            offset += BLOCK - offset % BLOCK
            continue
        _, length, kind = HEADER.unpack_from(data, offset)
        parts += data[offset + HEADER.size : offset + HEADER.size + length]
        offset += HEADER.size + length
        if kind in (1, 4):  # full, last
            record = Record()
            record.ParseFromString(parts)
            found.append(record)
            parts = b""
    return found


def history(path: Path) -> list[dict[str, Any]]:
    return [
        {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records(path)
        if record.HasField("history")
    ]


def artifacts(path: Path) -> list[Any]:
    return [
        found
        for record in records(path)
        for found in (record.request.log_artifact.artifact, record.artifact)
        if found.type
    ]


def wandb_files(directory: Path) -> list[Path]:
    return sorted((directory / "wandb").glob("offline-run-*/*.wandb"))
