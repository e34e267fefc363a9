"""What verification by sampling takes, and whether it fits together (`verify_block` takes the same).

Shapes: B requests, K draft steps, Q = K + 1 queries, V target vocabulary, U draft vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM (v1/sample/sampler.py)."""
LOGIT_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How each request samples.

    Attributes:
        temperature_B: Below 1e-5 the request is greedy.
        seed_B: Key of the request's random numbers, int64.
        position_B: Index of the first token that the round decides, int64; for one seed never the same in two rounds.
        top_k_B: Keep the k largest logits and what is equal to the last of them; none below 1, or None: keep all.
        top_p_B: Then keep the most likely tokens, fewest that hold more than this part (vLLM's rule: drop the least
            likely while their sum is at most 1 - p); of equal logits the lower ids stay. 1 or None: keep all.
    """

    temperature_B: Tensor
    seed_B: Tensor
    position_B: Tensor
    top_k_B: Tensor | None = None
    top_p_B: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if value is not None}


def check_inputs(
    logits_BQV: Tensor,
    draft_BK: Tensor,
    num_draft_B: Tensor,
    sampling: Sampling,
    draft_BKU: Tensor | None,
    target_ids_U: Tensor | None,
) -> None:
    """Raise ValueError that names what does not fit; values are not looked at, which would wait for the device."""
    if logits_BQV.ndim != 3 or 0 in logits_BQV.shape[1:]:
        raise ValueError(f"logits of shape {tuple(logits_BQV.shape)}: [B, K + 1, V], V at least 1")
    batch, queries, vocab = logits_BQV.shape
    if logits_BQV.dtype not in LOGIT_TYPES:
        raise ValueError(f"logits of {logits_BQV.dtype}: one of {', '.join(map(str, LOGIT_TYPES))}")
    _expect("draft tokens", draft_BK, (batch, queries - 1), logits_BQV.device)
    _expect("numbers of draft tokens", num_draft_B, (batch,), logits_BQV.device)
    for name, tensor in sampling.tensors().items():
        _expect(name, tensor, (batch,), logits_BQV.device)
    wholes = {"draft tokens": draft_BK, "numbers of draft tokens": num_draft_B, "seed_B": sampling.seed_B}
    wholes |= {"position_B": sampling.position_B}
    for name, tensor in wholes.items():
        if tensor.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} of {tensor.dtype}: int32 or int64")
    if target_ids_U is not None:
        if draft_BKU is None:
            raise ValueError("target ids of a draft vocabulary without draft probabilities")
        _expect("target ids", target_ids_U, (target_ids_U.numel(),), logits_BQV.device)
    if draft_BKU is not None:
        drafted = vocab if target_ids_U is None else len(target_ids_U)
        _expect("draft probabilities", draft_BKU, (batch, queries - 1, drafted), logits_BQV.device)


def empty_outputs(draft_BK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The results for no requests."""
    shape = (0, draft_BK.shape[1] + 1)
    ids = torch.empty(shape, dtype=torch.long, device=draft_BK.device)
    return ids[:, 0], ids, ids[:, 1:].bool()


def _expect(name: str, tensor: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    if tensor.shape != shape:
        raise ValueError(f"shapes do not fit: {name} {tuple(tensor.shape)}, by the logits {shape}")
    if tensor.device != device:
        raise ValueError(f"{name} on {tensor.device}, logits on {device}")
