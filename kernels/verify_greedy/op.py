"""Public greedy verification: checks and launch.

Shapes: B requests, K draft steps, Q = K + 1 queries, V target vocabulary, S chunks of the vocabulary.
"""

import torch
from drafthead.kernels.backend import runs_triton
from drafthead.kernels.verify_greedy import reference
from torch import Tensor

INTEGERS = (torch.int32, torch.int64)
LOGITS = (torch.bfloat16, torch.float16, torch.float32)
LARGEST_VOCAB = 2**30


def verify_greedy(
    logits_BQV: Tensor, draft_BK: Tensor, num_draft_B: Tensor, impl: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept the longest prefix of each draft that the target would have written itself; see `reference`.

    Args:
        logits_BQV: Target logits, bf16, fp16 or fp32 (the reference takes float64 too), of any strides. Queries behind
            a request's last draft token + 1 are not read.
        draft_BK: Draft token ids, int32 or int64; an id outside the vocabulary is never accepted.
        num_draft_B: How many draft tokens each request has, 0 to K (taken as the nearer bound outside).
        impl: See `backend.runs_triton`.

    Returns:
        accepted_B (int64), output_BQ (int64, -1 behind the tokens of this round), accepted_BK (bool).

    Raises:
        ValueError: Shapes, dtypes or devices do not fit.
    """
    _check(logits_BQV, draft_BK, num_draft_B)
    if not runs_triton(impl, logits_BQV):
        return reference.verify_greedy(logits_BQV, draft_BK, num_draft_B)
    return _launch(logits_BQV, draft_BK, num_draft_B)


def _check(logits_BQV: Tensor, draft_BK: Tensor, num_draft_B: Tensor) -> None:
    shapes = f"logits {list(logits_BQV.shape)}, draft {list(draft_BK.shape)}, lengths {list(num_draft_B.shape)}"
    if logits_BQV.dim() != 3 or draft_BK.shape != (len(logits_BQV), logits_BQV.shape[1] - 1):
        raise ValueError(f"shapes do not fit: {shapes}; wanted [B, K + 1, V], [B, K], [B]")
    if num_draft_B.shape != (len(logits_BQV),):
        raise ValueError(f"shapes do not fit: {shapes}; wanted [B, K + 1, V], [B, K], [B]")
    if not 0 < logits_BQV.shape[2] <= LARGEST_VOCAB:
        raise ValueError(f"vocabulary of {logits_BQV.shape[2]}: wanted 1 to 2^30")
    for name, ids in (("draft", draft_BK), ("lengths", num_draft_B)):
        if ids.dtype not in INTEGERS:
            raise ValueError(f"{name} of {ids.dtype}: wanted int32 or int64")
        if ids.device != logits_BQV.device:
            raise ValueError(f"{name} on {ids.device}, logits on {logits_BQV.device}")


def _launch(logits_BQV: Tensor, draft_BK: Tensor, num_draft_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from drafthead.kernels.verify_greedy import kernel

    if logits_BQV.dtype not in LOGITS:
        raise ValueError(f"logits of {logits_BQV.dtype}: the kernel takes bf16, fp16 or fp32")
    batch, queries, vocab = logits_BQV.shape
    device, itemsize = logits_BQV.device, logits_BQV.element_size()
    chunk = kernel.chunk_of(vocab, itemsize)
    chunks = -(-vocab // chunk)
    key_BQS, id_BQS = torch.empty((2, batch, queries, chunks), dtype=torch.int32, device=device)
    accepted_B = torch.empty(batch, dtype=torch.int64, device=device)
    output_BQ = torch.empty((batch, queries), dtype=torch.int64, device=device)
    accepted_BK = torch.empty((batch, queries - 1), dtype=torch.bool, device=device)
    if batch == 0:
        return accepted_B, output_BQ, accepted_BK
    with torch.cuda.device_of(logits_BQV):
        kernel.find_largest[(batch * queries * chunks,)](
            logits_BQV,
            num_draft_B,
            key_BQS,
            id_BQS,
            queries,
            vocab,
            chunks,
            *logits_BQV.stride(),
            num_draft_B.stride(0),
            CHUNK=chunk,
            LEVELS=kernel.levels_of(itemsize),
            num_warps=4,
        )
        kernel.accept_prefix[(batch,)](
            key_BQS,
            id_BQS,
            draft_BK,
            num_draft_B,
            accepted_B,
            output_BQ,
            accepted_BK,
            queries,
            chunks,
            *draft_BK.stride(),
            num_draft_B.stride(0),
            QUERY_BLOCK=kernel.QUERY_BLOCK,
            CHUNK_BLOCK=kernel.CHUNK_BLOCK,
            num_warps=4,
        )
    return accepted_B, output_BQ, accepted_BK
