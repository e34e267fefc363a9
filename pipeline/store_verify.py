"""Whether stored states can be trusted: `drafthead store verify DIR [--target DIR]`.

Without the target: files against checksums, rows against what no target gives (zeros, NaN, constant or short rows, the
states of another row). With it, also its fingerprint; and for rows that stand out (`odd_rows.py`), and a seeded sample
of the others, that the target gives these states again.

Shapes: T tokens, A captured layers, D hidden, L positions with a last state.
"""

import hashlib
import random
from pathlib import Path
from typing import Any

import torch
from drafthead.data.errors import InputError
from drafthead.data.shards import Store
from drafthead.data.store_faults import Faults, find_fault, open_sound
from drafthead.eval.states import StateRecorder
from drafthead.pipeline.capture import compute_dtype
from drafthead.pipeline.odd_rows import odd_rows
from drafthead.pipeline.respond import SPLITS
from drafthead.pipeline.target import Target
from torch import Tensor

SAMPLE = 16
"""Rows of a store that are captured again though nothing is odd about them."""
LARGEST_DIFFERENCE = 0.2
"""Of a state, relative, at half of a row's positions. Rounding to fp8 and another batch's order make 0.03; the states
of other tokens differ by 0.5 and more."""


def verify(folder: Path, target: Target | None) -> dict[str, Any]:
    """Check every row of a store, of a capture folder or of a run's.

    Raises:
        InputError: No store is there, or its index cannot be used.
    """
    bad: list[dict[str, str]] = []
    checked = 0
    stores = find_stores(folder)
    for path in stores:
        store, faults = open_sound(path)
        for row_id in store.ids():
            if row_id not in faults and (reason := _content_fault(store, row_id)):
                faults[row_id] = reason
        faults.update(_copies(store, faults))
        if target is not None:
            faults.update(target_faults(store, target, [row_id for row_id in store.ids() if row_id not in faults]))
        split = {"split": path.name} if len(stores) > 1 else {}
        bad += [{"sample": row_id, "reason": reason, **split} for row_id, reason in faults.items()]
        checked += len(store.where)
    return {"bad": bad, "checked": checked}


def find_stores(folder: Path) -> list[Path]:
    """The store that a folder is, or those of both splits below it or below its `capture`."""
    for base in (folder, folder / "capture"):
        if (base / "index.json").is_file():
            return [base]
        found = [base / split for split in SPLITS if (base / split / "index.json").is_file()]
        if found:
            return found
    raise InputError(f"{folder}: no finished store in it; give a folder with an index.json, a capture folder or a run")


def render(report: dict[str, Any]) -> str:
    lines = [f"{one['sample']}: {one['reason']}" for one in report["bad"]]
    return "\n".join([*lines, f"{len(report['bad'])} bad, {report['checked']} rows checked"])


# ---- without the target ----------------------------------------------------------------------------------


def _content_fault(store: Store, row_id: str) -> str | None:
    place = store.where[row_id]
    first, stop = store.last_window(row_id)
    try:
        aux_TAD, kept_LD = store.get(row_id)[0], store.kept_last(row_id)
    except RuntimeError as error:  # a window of tensors that are shorter than the list says
        return f"short: {error}"
    return find_fault(aux_TAD, kept_LD, place.length, stop - first)


def _copies(store: Store, faults: Faults) -> Faults:
    """Rows whose states another row has too, though its tokens are others."""
    seen: dict[bytes, str] = {}
    found: Faults = {}
    for row_id in (one for one in store.ids() if one not in faults):
        kept_LD = store.kept_last(row_id)
        if not len(kept_LD):
            continue
        states = kept_LD.contiguous().view(torch.uint8).numpy().tobytes()
        first = seen.setdefault(hashlib.blake2b(states, digest_size=16).digest(), row_id)
        if first != row_id and store.token_ids(first) != store.token_ids(row_id):
            found[row_id] = f"duplicate: the states of {first}, whose tokens are others"
    return found


# ---- with the target -------------------------------------------------------------------------------------


def target_faults(store: Store, target: Target, row_ids: list[str]) -> Faults:
    """Rows whose states are not what the target gives for their tokens."""
    if store.info.fingerprint != target.fingerprint:
        called = f" ({store.info.revision})" if store.info.revision else ""
        reason = f"states of target {store.info.fingerprint}{called}, {target.path} is {target.fingerprint}"
        return dict.fromkeys(row_ids, reason)
    odd = odd_rows(store, target, row_ids)
    others = [row_id for row_id in row_ids if row_id not in set(odd)]
    sample = random.Random(0).sample(others, min(SAMPLE, len(others)))
    model = target.load(compute_dtype(store.info.dtype), "cuda" if torch.cuda.is_available() else "cpu")
    recorder = StateRecorder(model, store.info.layer_ids)
    found: Faults = {}
    for row_id in [*odd, *sample]:
        difference = _difference(store, recorder, row_id)
        if not difference <= LARGEST_DIFFERENCE:
            found[row_id] = (
                f"swapped: not the states of its tokens, the target's differ by {difference:.2f} of their size"
            )
    return found


def _difference(store: Store, recorder: StateRecorder, row_id: str) -> float:
    """Between the stored states and the target's own: the largest of all layers, at half of the positions."""
    aux_TAD, _ = store.get(row_id)
    own_aux_TAD, own_last_TD = next(iter(recorder.record([store.token_ids(row_id)])))
    first, stop = store.last_window(row_id)
    layers = [(aux_TAD[:, layer], own_aux_TAD[:, layer]) for layer in range(aux_TAD.shape[1])]
    found = [_median_difference(*one) for one in [*layers, (store.kept_last(row_id), own_last_TD[first:stop])]]
    return max(found)


def _median_difference(stored_TD: Tensor, own_TD: Tensor) -> float:
    if not len(own_TD):
        return 0.0
    stored, own = stored_TD.float(), own_TD.float()
    return float(((stored - own).norm(dim=-1) / own.norm(dim=-1)).median())
