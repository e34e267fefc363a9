"""Building blocks that heads share: norm, rotary positions, gated MLP, attention layer and its decoding step.

Shapes: R rows that are computed, H heads, G key-value heads, P head dim.
"""

import copy
from typing import Any

import torch
from drafthead.pipeline.export.rope import flat_rope
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

    Of parameters that are nested by layer type, those of full attention: a served head has no other.

    Raises:
        GateError: A rope type that a served draft head cannot follow, or a number that it needs is missing.
    """
    parameters = flat_rope(getattr(config, "rope_parameters", None) or {}, config.to_dict())
    if parameters["rope_type"] == "default":
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        size = int(size * parameters.get("partial_rotary_factor", 1.0))
        exponent = torch.arange(0, size, 2, dtype=torch.float32) / size
        return 1.0 / parameters["rope_theta"] ** exponent, 1.0
    flattened = copy.copy(config)
    flattened.rope_parameters = parameters
    inverse, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](flattened, torch.device("cpu"))
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
