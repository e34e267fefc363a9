"""Which rows of a store stand out, so that they are worth capturing again (`store_verify.py`).

Three looks at the stored states, none of which runs the target: do the last states predict the row's own tokens; are
the states of each layer as large as those of other rows; and is each state nearer to the one of its own position in the
layer behind it (the tokens' embeddings come first, the last states last) than to those of the positions beside it, as a
residual stream's are. A row that stands out need not be wrong.

Shapes: T tokens, A captured layers, D hidden, L positions with a last state, V vocabulary, N of several rows or
positions.
"""

import itertools
from collections import defaultdict
from statistics import median

import torch
from drafthead.data.shards import Store
from drafthead.pipeline.state_logits import StateLogits
from drafthead.pipeline.target import Target
from torch import Tensor

POSITIONS = 16
"""Looked at of each row."""
ODD_SHARE = 0.5
"""Rows that reach less than this share of what the others do stand out."""
ODD_SIZE = 1.5
"""Rows whose states are larger or smaller by this factor stand out."""
TELLING = 0.6
"""Layers where fewer states of the usual row are nearest to their own position tell nothing; by chance a third is."""
BATCH = 1024


def odd_rows(store: Store, target: Target, row_ids: list[str]) -> list[str]:
    """Rows that stand out, in their order."""
    predicted = predicted_shares(store, target, row_ids)
    odd = _low(predicted)
    nearest: dict[int, dict[str, float]] = defaultdict(dict)
    sizes: dict[int, dict[str, float]] = defaultdict(dict)
    for row_id in row_ids:
        for layer, (share, size) in enumerate(_readings(store, target.embedding_VD, row_id)):
            if share is not None:
                nearest[layer][row_id] = share
            sizes[layer][row_id] = size
    for shares in nearest.values():
        odd |= _low(shares) if median(shares.values()) >= TELLING else set()
    for of_layer in sizes.values():
        usual = median(of_layer.values())
        odd |= {row_id for row_id, size in of_layer.items() if not usual / ODD_SIZE <= size <= usual * ODD_SIZE}
    return [row_id for row_id in row_ids if row_id in odd]


def _low(shares: dict[str, float]) -> set[str]:
    usual = median(shares.values()) if shares else 0.0
    return {row_id for row_id, share in shares.items() if share < ODD_SHARE * usual}


def predicted_shares(store: Store, target: Target, row_ids: list[str]) -> dict[str, float]:
    """For each row with an answer the share of looked at tokens that norm + lm_head of its last states predict."""
    logits = StateLogits(target)
    owner_N: list[str] = []
    states_ND: list[Tensor] = []
    next_N: list[int] = []
    for row_id in row_ids:
        first, stop = store.last_window(row_id)
        place, ids = store.where[row_id], store.token_ids(row_id)
        chosen = _spread(range(max(first, place.context_length - 1), min(stop, place.length - 1)))
        owner_N += [row_id] * len(chosen)
        next_N += [ids[position + 1] for position in chosen]
        states_ND.append(store.kept_last(row_id)[[position - first for position in chosen]])
    hits: dict[str, list[bool]] = {}
    batches = torch.cat(states_ND).split(BATCH) if owner_N else ()
    for start, batch in zip(range(0, len(owner_N), BATCH), batches, strict=True):
        guess_N = logits(batch).argmax(-1).tolist()
        for row_id, guess, wanted in zip(owner_N[start:], guess_N, next_N[start:], strict=False):
            hits.setdefault(row_id, []).append(guess == wanted)
    return {row_id: sum(one) / len(one) for row_id, one in hits.items()}


def _readings(store: Store, embedding_VD: Tensor, row_id: str) -> list[tuple[float | None, float]]:
    """Of each captured layer, then of the last states: how many are nearest to their own position, how large they are.

    Looked at in the answer, where both are kept and which no other row shares.
    """
    aux_TAD, place = store.get(row_id)[0], store.where[row_id]
    first, stop = store.last_window(row_id)
    chosen = _spread(range(max(1, first + 1, place.context_length - 1), min(stop, place.length) - 1))
    if not chosen:
        return []
    beside = torch.tensor(chosen)[:, None] + torch.tensor([-1, 0, 1])
    last_LD = store.kept_last(row_id)
    ids_T = torch.tensor(store.token_ids(row_id))
    layers_N3D = [embedding_VD[ids_T[beside]], *(aux_TAD[beside, layer] for layer in range(aux_TAD.shape[1]))]
    layers_N3D.append(last_LD[beside - first])
    found: list[tuple[float | None, float]] = []
    for before_N3D, own_N3D in itertools.pairwise(layers_N3D):
        wide_N3D, own_ND = before_N3D.float(), own_N3D[:, 1].float()
        near_N3 = torch.nn.functional.cosine_similarity(wide_N3D, own_ND[:, None], dim=-1)
        # equal tokens side by side have equal embeddings
        told = (wide_N3D[:, 1] != wide_N3D[:, 0]).any(-1) & (wide_N3D[:, 1] != wide_N3D[:, 2]).any(-1)
        is_own_N = near_N3.argmax(-1) == 1
        share = float(is_own_N[told].float().mean()) if told.any() else None
        found.append((share, float(own_ND.norm(dim=-1).median())))
    return found


def _spread(places: range) -> list[int]:
    """At most POSITIONS of them, over all of their length."""
    return list(places[:: max(1, len(places) // POSITIONS)][:POSITIONS])
