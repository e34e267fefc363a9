"""Attention of the MTP layers that is not Llama's: q/k norms and gated outputs, and latent attention.

Both are drop-in for `blocks.Attention`: rotated queries, keys and values for the unroll and the draft cache.

Shapes: R rows, D hidden, H heads, G key-value heads, P head dim, C latent dim.
"""

import math
from typing import Any

import torch
from drafthead.pipeline.heads.blocks import Attention, RMSNorm, Rotary
from torch import Tensor, nn


class NormedAttention(Attention):
    """Qwen3-Next's and GLM-4's: q and k normed per head, and the heads' outputs gated by the layer's input.

    out = o_proj(heads * sigmoid(gate)) where q_proj gives query and gate of each head side by side
    (vllm/model_executor/models/{qwen3_next,glm4_moe}.py).
    """

    def __init__(self, config: Any, *, bias: bool, qk_norm: bool, gated: bool, norm_offset: float):
        super().__init__(config, int(config.hidden_size), bias=bias)
        self.gated = gated
        if gated:
            self.q_proj = nn.Linear(config.hidden_size, 2 * self.num_heads * self.head_dim, bias=bias)
        eps = float(config.rms_norm_eps)
        self.q_norm = RMSNorm(self.head_dim, eps, norm_offset) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim, eps, norm_offset) if qk_norm else nn.Identity()

    def queries(self, x_RI: Tensor, position_R: Tensor) -> Tensor:
        """[R, H, P]."""
        query_RHP = self.q_proj(x_RI).unflatten(-1, (self.num_heads, -1))[..., : self.head_dim]
        rotated: Tensor = self.rotary(self.q_norm(query_RHP), position_R)
        return rotated

    def keys_values(self, x_RI: Tensor, position_R: Tensor) -> tuple[Tensor, Tensor]:
        """Both [R, G, P]."""
        shape = (self.num_kv_heads, self.head_dim)
        keys = self.rotary(self.k_norm(self.k_proj(x_RI).unflatten(-1, shape)), position_R)
        return keys, self.v_proj(x_RI).unflatten(-1, shape)

    def output(self, mixed_RX: Tensor, x_RI: Tensor) -> Tensor:
        """[R, D]."""
        if self.gated:
            # the projection runs again rather than its half: under ZeRO-3 weights are there inside `forward` alone
            gate_RHP = self.q_proj(x_RI).unflatten(-1, (self.num_heads, -1))[..., self.head_dim :]
            mixed_RX = mixed_RX * gate_RHP.flatten(1).sigmoid()
        projected: Tensor = self.o_proj(mixed_RX)
        return projected


class LatentAttention(nn.Module):
    """DeepSeek's multi-head latent attention, keys and values expanded (vllm/model_executor/models/deepseek_v2.py).

    A query and a key are a part without position beside a rotated one, which all heads' keys share; keys have another
    size than values. Rotary channels lie interleaved in the checkpoint.
    """

    def __init__(self, config: Any):
        super().__init__()
        size, eps = int(config.hidden_size), float(config.rms_norm_eps)
        bias = bool(config.attention_bias)
        self.num_heads = self.num_kv_heads = int(config.num_attention_heads)
        self.plain_dim, self.rotary_dim = int(config.qk_nope_head_dim), int(config.qk_rope_head_dim)
        self.head_dim, self.value_dim = self.plain_dim + self.rotary_dim, int(config.v_head_dim)
        self.latent_dim = int(config.kv_lora_rank)
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(size, self.num_heads * self.head_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(size, config.q_lora_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps)
            self.q_b_proj = nn.Linear(config.q_lora_rank, self.num_heads * self.head_dim, bias=False)
        self.low_rank_queries = config.q_lora_rank is not None
        self.kv_a_proj_with_mqa = nn.Linear(size, self.latent_dim + self.rotary_dim, bias=bias)
        self.kv_a_layernorm = RMSNorm(self.latent_dim, eps)
        self.kv_b_proj = nn.Linear(self.latent_dim, self.num_heads * (self.plain_dim + self.value_dim), bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.value_dim, size, bias=bias)
        self.rotary = Rotary(config)
        self.query_scale = yarn_scale(config.rope_parameters) ** 2

    def queries(self, x_RD: Tensor, position_R: Tensor) -> Tensor:
        """[R, H, P], YaRN's factor on the scores in them."""
        if self.low_rank_queries:
            projected = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_RD)))
        else:
            projected = self.q_proj(x_RD)
        plain, turning = projected.unflatten(-1, (self.num_heads, -1)).split([self.plain_dim, self.rotary_dim], -1)
        return torch.cat([plain, self._rotate(turning, position_R)], -1) * self.query_scale

    def keys_values(self, x_RD: Tensor, position_R: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [R, H, P] and values [R, H, value_dim]."""
        latent_RC, turning = self.kv_a_proj_with_mqa(x_RD).split([self.latent_dim, self.rotary_dim], -1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent_RC)).unflatten(-1, (self.num_heads, -1))
        plain, values = expanded.split([self.plain_dim, self.value_dim], -1)
        shared = self._rotate(turning[:, None], position_R).expand(-1, self.num_heads, -1)
        return torch.cat([plain, shared], -1), values

    def output(self, mixed_RX: Tensor, x_RD: Tensor) -> Tensor:
        """[R, D]."""
        projected: Tensor = self.o_proj(mixed_RX)
        return projected

    def _rotate(self, x_RHP: Tensor, position_R: Tensor) -> Tensor:
        """Rotate neighbouring channels; queries and keys both come back with their pairs half-split."""
        halves = torch.cat([x_RHP[..., 0::2], x_RHP[..., 1::2]], -1)
        rotated: Tensor = self.rotary(halves, position_R)
        return rotated


def yarn_scale(rope_parameters: dict[str, Any]) -> float:
    """DeepSeek's factor on queries and keys under YaRN; 1 for other rotary embeddings."""
    weight, factor = rope_parameters.get("mscale_all_dim", 0), rope_parameters.get("factor", 1.0)
    if rope_parameters.get("rope_type", "default") == "default" or not weight or factor <= 1:
        return 1.0
    return float(0.1 * weight * math.log(factor) + 1.0)
