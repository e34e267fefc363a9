"""Buffers and launches that verification by sampling shares with `verify_block`.

Shapes: B requests, K draft steps, Q = K + 1 queries, V target vocabulary, U draft vocabulary, R = B Q rows, S tiles.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from drafthead.kernels.verify_sampling import kernel
from drafthead.kernels.verify_sampling.cut_kernel import row_cut
from drafthead.kernels.verify_sampling.inputs import Sampling
from drafthead.kernels.verify_sampling.row_kernel import row_stats
from torch import Tensor

SMALLEST_BLOCK = 16


@dataclass(frozen=True)
class Prepared:
    """Arguments that the kernels of a round share, by name, and the sizes of the round."""

    arguments: dict[str, Any]
    constants: dict[str, int]
    batch: int
    queries: int
    vocab: int
    device: torch.device


def prepare(
    logits_BQV: Tensor,
    draft_BK: Tensor,
    num_draft_B: Tensor,
    sampling: Sampling,
    draft_BKU: Tensor | None,
    target_ids_U: Tensor | None,
) -> Prepared:
    """Run `row_stats`, and `row_cut` where top-k or top-p is set.

    Raises:
        ValueError: Logits of a type that the kernels do not take.
    """
    if logits_BQV.dtype not in kernel.KEY_SHIFT:
        raise ValueError(f"logits of {logits_BQV.dtype}: the kernels take bf16, fp16 or fp32")
    batch, queries, vocab = logits_BQV.shape
    block = block_of(vocab, kernel.STATS_BLOCK)
    tiles = -(-vocab // block)
    filtered = sampling.top_k_B is not None or sampling.top_p_B is not None
    top_RS, total_RS = torch.empty(2, batch * queries, tiles, device=logits_BQV.device)
    rows = {
        "logits_ptr": logits_BQV,
        **_strides("stride_", "bqv", logits_BQV),
        "num_draft_ptr": num_draft_B.long().contiguous(),
        "temperature_ptr": sampling.temperature_B.float().contiguous(),
        "top_ptr": top_RS,
        "total_ptr": total_RS,
        "first_ptr": torch.empty_like(top_RS, dtype=torch.int32),
        "queries": queries,
        "vocab": vocab,
        "tiles": tiles,
    }
    row_stats[(batch * queries * tiles,)](**rows, BLOCK=block, num_warps=kernel.NUM_WARPS)
    # what a kernel does not read still has to point at something
    cut = {"cut_ptr": top_RS, "last_ptr": rows["first_ptr"]}
    if filtered:
        cut = {"cut_ptr": top_RS.new_empty(len(top_RS)), "last_ptr": rows["first_ptr"].new_empty(len(top_RS))}
        row_cut[(batch * queries,)](
            **rows,
            **cut,
            top_k_ptr=_all(sampling.top_k_B, 0, num_draft_B).long().contiguous(),
            top_p_ptr=_all(sampling.top_p_B, 1, num_draft_B).float().contiguous(),
            SHIFT=kernel.KEY_SHIFT[logits_BQV.dtype],
            BLOCK=block_of(vocab, kernel.CUT_BLOCK),
            TILES=triton.next_power_of_2(tiles),
            num_warps=kernel.NUM_WARPS,
        )
    probs = logits_BQV if draft_BKU is None else draft_BKU
    kind = kernel.ONE_HOT if draft_BKU is None else kernel.DENSE if target_ids_U is None else kernel.SPARSE
    arguments = {
        **rows,
        **cut,
        "token_ptr": draft_BK.long().contiguous(),
        "probs_ptr": probs,
        **_strides("stride_p", "bku", probs),
        "ids_ptr": rows["first_ptr"] if target_ids_U is None else _places(target_ids_U, vocab),
        "seed_ptr": sampling.seed_B.long().contiguous(),
        "position_ptr": sampling.position_B.long().contiguous(),
    }
    constants = {
        "STEPS": triton.next_power_of_2(max(queries - 1, 1)),
        "TILES": triton.next_power_of_2(tiles),
        "KIND": kind.value,
        "FILTERED": filtered,
    }
    return Prepared(arguments, constants, batch, queries, vocab, logits_BQV.device)


def accept_and_race(judge: Any, prepared: Prepared, **extra: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Run the kernel that accepts and races, then `finish`."""
    batch, queries, device = prepared.batch, prepared.queries, prepared.device
    block = block_of(prepared.vocab, kernel.RACE_BLOCK)
    tiles = -(-prepared.vocab // block)
    found: dict[str, Any] = {
        "accepted_ptr": torch.empty(batch, dtype=torch.long, device=device),
        "score_ptr": torch.empty(batch, 2, tiles, device=device),
        "winner_ptr": torch.empty(batch, 2, tiles, dtype=torch.int32, device=device),
        "race_tiles": tiles,
    }
    judge[(batch * tiles,)](
        **prepared.arguments,
        **found,
        **extra,
        **prepared.constants,
        BLOCK=block,
        num_warps=kernel.NUM_WARPS,
    )
    output_BQ = torch.empty(batch, queries, dtype=torch.long, device=device)
    mask_BK = torch.empty(batch, queries - 1, dtype=torch.bool, device=device)
    kernel.finish[(batch,)](
        token_ptr=prepared.arguments["token_ptr"],
        **found,
        output_ptr=output_BQ,
        mask_ptr=mask_BK,
        queries=queries,
        QUERIES=triton.next_power_of_2(queries),
        TILES=triton.next_power_of_2(tiles),
        num_warps=1,
    )
    return found["accepted_ptr"], output_BQ, mask_BK


def block_of(vocab: int, largest: int) -> int:
    """How many logits a program takes at once."""
    return int(min(largest, max(triton.next_power_of_2(vocab), SMALLEST_BLOCK)))


def _strides(prefix: str, axes: str, tensor: Tensor) -> dict[str, int]:
    return {prefix + axis: stride for axis, stride in zip(axes, tensor.stride(), strict=True)}


def _all(value_B: Tensor | None, neutral: int, like_B: Tensor) -> Tensor:
    return torch.full_like(like_B, neutral) if value_B is None else value_B


def _places(target_ids_U: Tensor, vocab: int) -> Tensor:
    """Place of each target id in the draft vocabulary, or -1."""
    place_U = torch.arange(len(target_ids_U), dtype=torch.int32, device=target_ids_U.device)
    return torch.full((vocab,), -1, dtype=torch.int32, device=place_U.device).index_copy_(
        0, target_ids_U.long(), place_U
    )
