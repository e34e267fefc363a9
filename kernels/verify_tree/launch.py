"""Buffers and launches of tree verification; the rows' statistics come from the launches of the chain.

Shapes: B requests, N draft nodes, M = N + 1 rows, V target vocabulary, U draft vocabulary, S tiles of a row.
"""

from typing import Any

import torch
import triton
from drafthead.kernels.verify_greedy import kernel as greedy_kernel
from drafthead.kernels.verify_sampling import kernel as sampling_kernel
from drafthead.kernels.verify_sampling.inputs import Sampling
from drafthead.kernels.verify_sampling.launch import block_of, prepare
from drafthead.kernels.verify_tree import kernel
from torch import Tensor

Results = tuple[Tensor, Tensor, Tensor]


def walk_greedily(logits_BMV: Tensor, draft_BN: Tensor, parent_BN: Tensor, num_draft_B: Tensor) -> Results:
    """Find the largest logit of every row, then walk."""
    batch, rows, vocab = logits_BMV.shape
    itemsize = logits_BMV.element_size()
    chunk = greedy_kernel.chunk_of(vocab, itemsize)
    chunks = triton.cdiv(vocab, chunk)
    key_BMS, id_BMS = torch.empty((2, batch, rows, chunks), dtype=torch.int32, device=logits_BMV.device)
    accepted_B, output_BM, path_BN = empty_results(draft_BN)
    greedy_kernel.find_largest[(batch * rows * chunks,)](
        logits_BMV,
        num_draft_B,
        key_BMS,
        id_BMS,
        rows,
        vocab,
        chunks,
        *logits_BMV.stride(),
        num_draft_B.stride(0),
        CHUNK=chunk,
        LEVELS=greedy_kernel.levels_of(itemsize),
        num_warps=4,
    )
    kernel.follow_largest[(batch,)](
        key_BMS,
        id_BMS,
        draft_BN.long().contiguous(),
        parent_BN.long().contiguous(),
        num_draft_B,
        accepted_B,
        output_BM,
        path_BN,
        rows - 1,
        chunks,
        NODES=triton.next_power_of_2(max(rows - 1, 1)),
        CHUNK_BLOCK=kernel.CHUNK_BLOCK,
        num_warps=1,
    )
    return accepted_B, output_BM, path_BN


def walk_by_sampling(
    logits_BMV: Tensor,
    draft_BN: Tensor,
    parent_BN: Tensor,
    num_draft_B: Tensor,
    sampling: Sampling,
    draft_BMU: Tensor | None,
    target_ids_U: Tensor | None,
) -> Results:
    """Statistics of every row, the walk, the race in the row where it ends."""
    batch, rows, vocab = logits_BMV.shape
    prepared = prepare(logits_BMV, draft_BN, num_draft_B, sampling, draft_BMU, target_ids_U)
    accepted_B, output_BM, path_BN = empty_results(draft_BN)
    tree = {"parent_ptr": parent_BN.long().contiguous(), "accepted_ptr": accepted_B}
    end = {
        "row_ptr": torch.empty(batch, dtype=torch.int64, device=logits_BMV.device),
        "shift_ptr": torch.empty(batch, dtype=torch.float32, device=logits_BMV.device),
    }
    taken_BN = torch.empty_like(path_BN)
    kernel.accept_children[(batch,)](
        **prepared.arguments,
        **tree,
        **end,
        path_ptr=path_BN,
        taken_ptr=taken_BN,
        **prepared.constants,
        BLOCK=block_of(vocab, kernel.MASS_BLOCK),
        num_warps=kernel.WALK_WARPS,
    )
    block = block_of(vocab, sampling_kernel.RACE_BLOCK)
    tiles = triton.cdiv(vocab, block)
    found = {
        "score_ptr": torch.empty(batch, 2, tiles, dtype=torch.float32, device=logits_BMV.device),
        "winner_ptr": torch.empty(batch, 2, tiles, dtype=torch.int32, device=logits_BMV.device),
        "race_tiles": tiles,
    }
    kernel.race_for_rest[(batch * tiles,)](
        **prepared.arguments,
        **tree,
        **end,
        **found,
        **prepared.constants,
        BLOCK=block,
        num_warps=sampling_kernel.NUM_WARPS,
    )
    sampling_kernel.finish[(batch,)](
        token_ptr=taken_BN,
        accepted_ptr=accepted_B,
        **found,
        output_ptr=output_BM,
        mask_ptr=torch.empty_like(path_BN, dtype=torch.bool),
        queries=rows,
        QUERIES=triton.next_power_of_2(rows),
        TILES=triton.next_power_of_2(tiles),
        num_warps=1,
    )
    return accepted_B, output_BM, path_BN


def empty_results(draft_BN: Tensor) -> Results:
    """Room for accepted counts [B], output tokens [B, M] and paths [B, N]."""
    batch, nodes = draft_BN.shape
    ids: dict[str, Any] = {"dtype": torch.long, "device": draft_BN.device}
    return torch.empty(batch, **ids), torch.empty(batch, nodes + 1, **ids), torch.empty(batch, nodes, **ids)
