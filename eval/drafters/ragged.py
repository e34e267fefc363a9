"""Drafts of different lengths as one tensor, in the form that `protocols.Drafter.draft` returns."""

import torch
from torch import Tensor


def pad_drafts(drafts: list[list[int]], device: torch.device) -> Tensor:
    """The drafts of each request [B, K], K that of the longest, with -1 behind."""
    width = max((len(tokens) for tokens in drafts), default=0)
    padded = [tokens + [-1] * (width - len(tokens)) for tokens in drafts]
    return torch.tensor(padded, dtype=torch.long, device=device).reshape(len(drafts), width)
