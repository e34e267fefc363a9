"""What is wrong with stored states: damaged files, and rows that no training should see.

A shard's checksum is compared once and remembered by the file's size and times (`.checked.json` in the store; the time
of the last change of its inode too, which no copy keeps). Where it differs, the digests of the shard's rows say which
of them are affected; what belongs to all of them (sizes of channels, the list) affects all.

Shapes: T tokens, A captured layers, D hidden, L positions with a last state.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from drafthead.data.encoding import Row
from drafthead.data.errors import InputError
from drafthead.data.files import read_json, sha256_of, write_json
from drafthead.data.shards import Store
from drafthead.data.store_format import StoreInfo, channels_digest, digest_of, list_of, read_index, stored_dtype
from torch import Tensor

REMEMBERED = ".checked.json"
Faults = dict[str, str]
"""Reason by row id; by the shard's name where no row can be named."""


def find_fault(aux_TAD: Tensor, last_LD: Tensor, length: int, last_length: int | None = None) -> str | None:
    """Why the states of a row cannot be used, or None.

    Args:
        length: Tokens of the row.
        last_length: How many of them have a last state; all unless given.
    """
    if len(aux_TAD) != length:
        return f"short: {len(aux_TAD)} states for {length} tokens"
    wanted = length if last_length is None else last_length
    if len(last_LD) != wanted:
        return f"short: {len(last_LD)} last states for {wanted} tokens"
    for name, states_TLD in (("aux", aux_TAD), ("last", last_LD[:, None])):
        if not bool(torch.isfinite(states_TLD).all()):
            return f"{name} holds NaN or infinity"
        if bool((states_TLD == 0).all(-1).any()):
            return f"{name} holds a zero state"
        # the first position is an attention sink and may differ
        if len(states_TLD) > 2 and bool((states_TLD[1:] == states_TLD[1:2]).all(-1).all(0).any()):
            return f"{name} is the same at every position"
    return None


# ---- files -----------------------------------------------------------------------------------------------


def open_sound(folder: Path) -> tuple[Store, Faults]:
    """Open a store whose files may be damaged: the store without lists that cannot be read, and what is damaged.

    All files are read, whatever is remembered of them.
    """
    faults: Faults = {}
    unread = set()
    for shard in read_index(folder)["shards"]:
        path = list_of(folder, shard["file"])
        try:
            read_json(path)
        except InputError as error:
            unread.add(shard["file"])
            faults[path.stem] = f"the list of its {shard['rows']} rows cannot be read: {error}"
    store = Store(folder, without=unread)
    return store, {**faults, **damaged_rows(store, again=True)}


def damaged_rows(store: Store, *, again: bool = False) -> Faults:
    """Rows whose stored states are missing, differ from their checksums, or are not what the store says it holds.

    Args:
        again: Read files too that had the right checksum before and seem unchanged.
    """
    faults: Faults = {}
    rows: dict[str, list[str]] = {}
    for row_id, place in store.where.items():
        rows.setdefault(place.shard, []).append(row_id)
    with _remembered(store.folder, again) as known:
        for shard in store.shards:
            faults.update(_damage(store, shard, rows.get(Path(shard["file"]).stem, []), known))
    return {**faults, **_sharing(store, faults)}


def _damage(store: Store, shard: dict[str, Any], rows: list[str], known: dict[str, list[int]]) -> Faults:
    path, listed = store.folder / shard["file"], list_of(store.folder, shard["file"])
    if not path.is_file():
        return dict.fromkeys(rows, f"{path.name}: missing or cut off: no such file")
    if not _matches(listed, shard["list_sha256"], known):
        return dict.fromkeys(rows, f"{listed.name}: the list of the shard's rows differs from its checksum")
    if not _matches(path, shard["sha256"], known):
        return _changed_rows(store, shard, rows)
    reason = _other_setting(StoreInfo(**read_json(listed)["info"]), store.info) or _other_type(store, path)
    return dict.fromkeys(rows, reason) if reason else {}


def _changed_rows(store: Store, shard: dict[str, Any], rows: list[str]) -> Faults:
    """Which rows of a file that differs from its checksum are affected."""
    path = store.folder / shard["file"]
    try:
        tensors = store.files.tensors(path.stem)
    except InputError:
        return dict.fromkeys(rows, f"{path.name}: missing or cut off: {path.stat().st_size} of {shard['bytes']} bytes")
    if {"ids", "aux", "last"} - tensors.keys():
        return dict.fromkeys(rows, f"{path.name}: differs from its checksum, tensors are missing")
    if read_json(list_of(store.folder, shard["file"])).get("channels", "") != channels_digest(tensors):
        return dict.fromkeys(rows, f"{path.name}: what its rows have in common differs from its checksum")
    bad = [row_id for row_id in rows if digest_of(row_id, store.where[row_id], tensors) != store.where[row_id].digest]
    reason = f"{path.name}: the row differs from its checksum"
    return dict.fromkeys(
        bad or [path.stem], reason if bad else f"{path.name}: differs from its checksum, its rows do not"
    )


def _other_setting(found: StoreInfo, wanted: StoreInfo) -> str | None:
    names = [name for name, value in asdict(wanted).items() if asdict(found)[name] != value]
    return f"{names[0]} of its shard is {getattr(found, names[0])}" if names else None


def _other_type(store: Store, path: Path) -> str | None:
    """What a shard holds against what the store says: another type or width reads as other states."""
    sizes = {"aux": (len(store.info.layer_ids), store.info.hidden_size), "last": (store.info.hidden_size,)}
    for name, size in sizes.items():
        found = store.files.open(path.stem).get_slice(name)[:1]
        wanted = stored_dtype(store.info.dtype)
        if found.dtype != wanted or tuple(found.shape[1:]) != size:
            return f"{path.name}: {name} is {found.dtype} {list(found.shape[1:])}, must be {wanted} {list(size)}"
    return None


def _sharing(store: Store, faults: Faults) -> Faults:
    """Rows that take states from a damaged one, or from a shard that is not there."""
    owner = {
        piece[:2]: row_id
        for row_id in faults
        if row_id in store.where
        for piece in (*store.where[row_id].aux, *store.where[row_id].last)
        if piece[0] == store.where[row_id].shard
    }
    shards = {Path(shard["file"]).stem for shard in store.shards}
    found: Faults = {}
    for row_id, place in store.where.items():
        for shard, start, _ in (*place.aux, *place.last):
            if row_id not in faults and (shard, start) in owner:
                found[row_id] = f"shares states with {owner[shard, start]}: {faults[owner[shard, start]]}"
            elif shard not in shards:
                found[row_id] = f"shares states of {shard}, which is not in the index"
    return found


def _matches(path: Path, sha256: str, known: dict[str, list[int]]) -> bool:
    stat = path.stat()
    stamp = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
    if known.get(path.name) != stamp:
        if sha256_of(path) != sha256:
            known.pop(path.name, None)
            return False
        known[path.name] = stamp
    return True


@contextlib.contextmanager
def _remembered(folder: Path, again: bool) -> Iterator[dict[str, list[int]]]:
    """Size and times of the files that had the right checksum when they were last read; nothing to read `again`."""
    path = folder / REMEMBERED
    before: dict[str, list[int]] = read_json(path) if path.is_file() else {}
    known = {} if again else dict(before)
    yield known
    if known != before:
        with contextlib.suppress(OSError):  # a store that cannot be written to is read again
            write_json(path, known)


# ---- training --------------------------------------------------------------------------------------------


def sound_rows(rows: list[Row], store: Store, max_bad_share: float) -> tuple[list[Row], str | None]:
    """Rows whose states are whole and theirs, and one line about the others.

    Raises:
        InputError: More than `max_bad_share` of the rows cannot be used, or none is left.
    """
    faults = damaged_rows(store)
    reasons: Faults = {}
    for row in rows:
        if row.key not in store.where:
            reasons[row.key] = "no states were stored"
        elif row.key in faults:
            reasons[row.key] = faults[row.key]
        elif store.token_ids(row.key) != row.input_ids:
            reasons[row.key] = "the stored states belong to other tokens"
    sound = [row for row in rows if row.key not in reasons]
    if not reasons and sound:
        return sound, None
    told = f"{store.folder}: {len(reasons)} of {len(rows)} rows cannot be used{_most_common(reasons)}"
    if not sound or len(reasons) > max_bad_share * len(rows):
        raise InputError(
            f"{told}; more than capture.max_bad_share={max_bad_share:g} allows; see `drafthead store verify "
            f"{store.folder}`, remove {store.folder} to capture again"
        )
    return sound, f"{told}; they are left out"


def _most_common(reasons: Faults) -> str:
    counts = Counter(reasons.values())
    return ": " + "; ".join(f"{reason} ({count})" for reason, count in counts.most_common(3)) if counts else ""
