"""Building blocks that heads share: norm, rotary positions, gated MLP, and attention over packed documents.

Shapes: T packed tokens of a micro batch, R the rows (slots) that are computed, H heads, G key-value heads, P head dim,
S training-time-test step.
"""

from collections.abc import Sequence
from typing import Any

import torch
from drafthead.data.errors import InputError
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def rms_normalize(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, in fp32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


class RMSNorm(nn.Module):
    """x / rms(x) * (weight + offset), computed in fp32 (vllm/model_executor/layers/layernorm.py)."""

    def __init__(self, size: int, eps: float, offset: float = 0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), 1.0 - offset))
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        return rms_normalize(x, self.weight.float() + self.offset, self.eps).to(x.dtype)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), without biases, which vLLM would drop without a word."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def rope_frequencies(config: Any) -> tuple[Tensor, float]:
    """Inverse frequencies [P / 2] and the attention factor that a target's configuration asks for.

    Raises:
        InputError: A rope type that this version of transformers does not know, or one that depends on the
            sequence length, which a served draft head cannot follow.
    """
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        size = int(size * parameters.get("partial_rotary_factor", 1.0))
        exponent = torch.arange(0, size, 2, dtype=torch.float32) / size
        return 1.0 / float(parameters.get("rope_theta", 10_000.0)) ** exponent, 1.0
    if kind not in ROPE_INIT_FUNCTIONS or kind in ("dynamic", "longrope"):
        raise InputError(f"rope_parameters.rope_type={kind!r}: a draft head supports default, linear, llama3 and yarn")
    inverse, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return inverse, float(factor)


class Rotary(nn.Module):
    """Rotary position embedding in the half-split layout of Llama."""

    inverse: Tensor

    def __init__(self, config: Any):
        super().__init__()
        with torch.device("cpu"):  # also in a module that is built on no device, for its shapes
            inverse, self.factor = rope_frequencies(config)
        self.register_buffer("inverse", inverse, persistent=False)

    def forward(self, x_RHP: Tensor, position_R: Tensor) -> Tensor:
        """Rotate the first 2 * len(inverse) channels of each head by its position."""
        angle_RF = position_R[:, None].float() * self.inverse
        cos, sin = (angle_RF.cos() * self.factor)[:, None], (angle_RF.sin() * self.factor)[:, None]
        width = self.inverse.shape[0]
        wide = x_RHP.float()
        first, second, rest = wide[..., :width], wide[..., width : 2 * width], wide[..., 2 * width :]
        rotated = torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)
        return rotated.to(x_RHP.dtype)


class Attention(nn.Module):
    """Projections of one attention layer whose input may be wider than its output (EAGLE-3 reads 2D)."""

    def __init__(self, config: Any, input_size: int, *, bias: bool = False):
        super().__init__()
        self.num_heads = int(config.num_attention_heads)
        self.num_kv_heads = int(config.num_key_value_heads)
        self.head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        self.value_dim = self.head_dim
        self.q_proj = nn.Linear(input_size, self.num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(input_size, self.num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(input_size, self.num_kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)
        self.rotary = Rotary(config)

    def queries(self, x_RI: Tensor, position_R: Tensor) -> Tensor:
        rotated: Tensor = self.rotary(self.q_proj(x_RI).unflatten(-1, (self.num_heads, self.head_dim)), position_R)
        return rotated

    def keys_values(self, x_RI: Tensor, position_R: Tensor) -> tuple[Tensor, Tensor]:
        shape = (self.num_kv_heads, self.head_dim)
        keys = self.rotary(self.k_proj(x_RI).unflatten(-1, shape), position_R)
        return keys, self.v_proj(x_RI).unflatten(-1, shape)

    def output(self, mixed_RX: Tensor, x_RI: Tensor) -> Tensor:
        """Projection [R, D] of the heads' outputs; `x_RI` is what the queries were made from."""
        projected: Tensor = self.o_proj(mixed_RX)
        return projected


def unroll_attention(
    query_RHP: Tensor,
    base: tuple[Tensor, Tensor],
    own: Sequence[tuple[Tensor, Tensor]],
    documents: Sequence[tuple[int, int]],
    row_T: Tensor,
) -> Tensor:
    """Attention of one step of the training-time test, without a T x T x S mask.

    The query of slot t sees the step-0 keys of its own document up to slot t, and of each later step only its own
    column: exactly the keys that a served draft holds in its cache at that step. Documents are separate matrix
    products, so nothing can leak between them.

    Args:
        query_RHP: Queries of the slots `row_T`, in ascending order.
        base: Step-0 keys and values [T, G, P] of all slots; values may have another size than keys.
        own: Keys and values [R, G, P] of the steps after 0, each for the same rows as the queries.
        documents: (start, length) of each document in the pack.
        row_T: Slot index of each query [R], ascending.

    Returns:
        [R, H * P].
    """
    if query_RHP.device.type == "cpu":
        # small bf16 products of ever new shapes cost more to compile than to compute
        with torch.autocast("cpu", enabled=False):
            wide = [(keys.float(), values.float()) for keys, values in (base, *own)]
            mixed = _unroll_attention(query_RHP.float(), wide[0], wide[1:], documents, row_T)
        return mixed.to(query_RHP.dtype)
    return _unroll_attention(query_RHP, base, own, documents, row_T)


def _unroll_attention(
    query_RHP: Tensor,
    base: tuple[Tensor, Tensor],
    own: Sequence[tuple[Tensor, Tensor]],
    documents: Sequence[tuple[int, int]],
    row_T: Tensor,
) -> Tensor:
    heads, size = query_RHP.shape[1:]
    groups = base[0].shape[1]
    grouped = query_RHP.unflatten(1, (groups, heads // groups)) * size**-0.5
    own_scores = [torch.einsum("rgnp,rgp->rgn", grouped, keys) for keys, _ in own]
    edges = torch.searchsorted(row_T, torch.tensor([start for start, _ in documents], device=row_T.device))
    bounds = [*edges.tolist(), row_T.shape[0]]
    outputs = []
    for (start, length), first, last in zip(documents, bounds, bounds[1:], strict=False):
        if first == last:
            continue
        keys, values = (tensor[start : start + length] for tensor in base)
        scores = torch.einsum("rgnp,tgp->gnrt", grouped[first:last], keys)
        position = row_T[first:last] - start
        future = torch.arange(length, device=row_T.device) > position[:, None]
        scores = scores.masked_fill(future, float("-inf"))
        columns = [score[first:last].permute(1, 2, 0)[..., None] for score in own_scores]
        weights = torch.cat([scores, *columns], -1).softmax(-1, dtype=torch.float32).to(values.dtype)
        output = torch.einsum("gnrt,tgp->rgnp", weights[..., :length], values)
        for step, (_, own_values) in enumerate(own):
            column = weights[..., length + step].permute(2, 0, 1)[..., None]
            output = output + column * own_values[first:last, :, None]
        outputs.append(output)
    # no rows at all still pass through every module: ZeRO-3 gathers weights on all ranks at the same call
    return torch.cat(outputs or [grouped[:0, ..., :1].expand(-1, -1, -1, base[1].shape[-1])]).flatten(1)


def cached_attention(query_BQHP: Tensor, keys_BLGP: Tensor, values_BLGP: Tensor, visible_BQL: Tensor) -> Tensor:
    """Attention of a decoding step over a cache; `visible_BQL` says which cache slots each query sees.

    Returns:
        [B, Q, H * P].
    """
    repeat = query_BQHP.shape[2] // keys_BLGP.shape[2]
    output = F.scaled_dot_product_attention(
        query_BQHP.transpose(1, 2),
        keys_BLGP.transpose(1, 2).repeat_interleave(repeat, 1),
        values_BLGP.transpose(1, 2).repeat_interleave(repeat, 1),
        attn_mask=visible_BQL[:, None],
    )
    return output.transpose(1, 2).flatten(2)
