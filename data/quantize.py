"""Stored state vectors of one byte a value: int8 or fp8 (e4m3), each vector with a scale of its own.

    x[t, d] = code[t, d] * scale[t] * channel[d]

A language model's states have a few channels that are tens of times larger than the rest, the same ones at nearly
every token (Dettmers et al. 2022), and a first position whose state is hundreds of times larger. The scale of each
vector takes care of the positions. For int8 `channel`, the channels' usual size in a shard, takes care of the channels:
without it a step of the grid is as large as an ordinary value (docs/log.md has what was measured). Values of fp8 carry
an exponent each and need no more than one size for all channels.

Shapes: S state vectors, D hidden.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

CODES = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
"""Type of the codes, and the largest one used."""
SCALE_BYTES = 2
CHUNK = 4096
"""Vectors widened to fp32 at a time."""
SMALLEST_CHANNEL = 1e-3
"""Relative to the whole vector: smaller channels share a grid."""
SMALLEST = torch.finfo(torch.float16).tiny


@dataclass(frozen=True)
class Quantized:
    """State vectors as they are stored."""

    code_SD: Tensor
    scale_S: Tensor
    """fp16."""
    channel_D: Tensor
    """fp32; one for all vectors of a shard."""

    def widen(self) -> Tensor:
        """The states, bf16 [S, D]."""
        return (self.code_SD.float() * self.scale_S.float()[:, None] * self.channel_D).bfloat16()


def quantize(state_SD: Tensor, dtype: str) -> Quantized:
    """Code state vectors; values that are not finite stay so by way of their vector's scale."""
    kind, largest = CODES[dtype]
    channel_D = usual_channels(state_SD) if dtype == "int8" else usual_size(state_SD).expand(state_SD.shape[1])
    codes, scales = [], []
    for wide in _chunks(state_SD):
        even = wide / channel_D
        # the rounded scale is the one that the codes are read with
        scale = (even.abs().amax(-1) / largest).clamp_min(SMALLEST).half()
        code = (even / scale.float()[:, None]).clamp(-largest, largest)
        codes.append((code.round() if dtype == "int8" else code).nan_to_num().to(kind))
        scales.append(scale)
    return Quantized(torch.cat(codes), torch.cat(scales), channel_D.float().contiguous())


def usual_channels(state_SD: Tensor) -> Tensor:
    """Root mean square of each channel over vectors of equal weight, times the vectors' usual size [D]."""
    total_D = torch.zeros(state_SD.shape[1])
    for wide in _chunks(state_SD):
        size_S1 = wide.pow(2).mean(-1, keepdim=True).sqrt().clamp_min(SMALLEST)
        total_D += (wide / size_S1).pow(2).nan_to_num().sum(0)
    return (total_D / max(1, len(state_SD))).sqrt().clamp_min(SMALLEST_CHANNEL) * usual_size(state_SD)


def usual_size(state_SD: Tensor) -> Tensor:
    """Median root mean square of the vectors, a scalar; 1 where there are none."""
    sizes = [wide.pow(2).mean(-1).sqrt() for wide in _chunks(state_SD)]
    size = torch.cat(sizes).nan_to_num().median() if len(state_SD) else torch.ones(())
    return size.clamp_min(SMALLEST)


def vector_bytes(hidden_size: int, dtype: str) -> int:
    """Bytes of one stored state vector."""
    if dtype in CODES:
        return hidden_size + SCALE_BYTES
    return hidden_size * int(getattr(torch, dtype).itemsize)


def read_dtype(dtype: str) -> torch.dtype:
    """In which type states that are stored as `dtype` are read."""
    found: torch.dtype = torch.bfloat16 if dtype in CODES else getattr(torch, dtype)
    return found


def _chunks(state_SD: Tensor) -> Iterator[Tensor]:
    return (chunk.float() for chunk in state_SD.split(CHUNK))
