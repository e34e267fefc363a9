"""The MTP head: one multi-token-prediction layer, applied to its own output (DeepSeek-V3; FastMTP).

    x      = fc(cat[token_norm(embed(x[i+1])), hidden_norm(state)])
    pre    = Layer(x);  out = final_norm(pre);  logits = the target's lm_head(out)

`mtp_layouts.py` says which state a family is fed, in which order, and what is fed back. The target's embeddings and
lm_head stay as they are and the whole vocabulary is drafted: vLLM serves the layer with the target's own.

Shapes: T tokens, R rows, D hidden, A captured layers, U draft vocabulary (all of the target's).
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from drafthead.data.errors import InputError
from drafthead.pipeline.heads.base import DraftLMHead, FrozenTarget
from drafthead.pipeline.heads.blocks import Attention, GatedMLP, RMSNorm
from drafthead.pipeline.heads.mtp_attention import LatentAttention, NormedAttention
from drafthead.pipeline.heads.mtp_layouts import LAYOUTS, pack_experts, resolve_layout
from drafthead.pipeline.heads.recursive import RecursiveHead
from drafthead.pipeline.recipe import MTPConfig
from drafthead.pipeline.target import Target
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class MTPOptions:
    """What decides the module, beside the target's configuration."""

    layout: str
    """One of `mtp_layouts.LAYOUTS`."""
    draft_vocab_size: int
    qkv_bias: bool = False
    """Biases on q, k and v (Qwen2); a Llama target's are written as zeros and not trained."""


class MTPLayer(nn.Module):
    """A decoder layer as the target's family has it; its parts are named as in a checkpoint."""

    def __init__(self, config: Any, options: MTPOptions):
        super().__init__()
        norm = partial(
            RMSNorm, int(config.hidden_size), float(config.rms_norm_eps), LAYOUTS[options.layout].norm_offset
        )
        self.input_layernorm = norm()
        self.self_attn = build_attention(config, options)
        self.post_attention_layernorm = norm()
        self.mlp = build_mlp(config, options.layout)


class MTP(RecursiveHead):
    """An MTP layer for a target of one of `mtp_layouts.FAMILIES`."""

    kind = "mtp"

    def __init__(self, config: Any, options: MTPOptions):
        super().__init__()
        self.options, self.layout = options, LAYOUTS[options.layout]
        self.num_layers = int(config.num_hidden_layers)
        size = int(config.hidden_size)
        norm = partial(RMSNorm, size, float(config.rms_norm_eps), self.layout.norm_offset)
        self.token_norm, self.hidden_norm = norm(), norm()
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layer = MTPLayer(config, options)
        self.final_norm = norm()
        self.lm_head = DraftLMHead(options.draft_vocab_size, size)
        self.is_fresh = False

    @classmethod
    def fresh(cls, config: MTPConfig, target: Target, frozen: FrozenTarget, num_aux: int) -> "MTP":
        """A new layer begun as the target's last one, or the one that the target's checkpoint holds.

        Raises:
            InputError: The draft vocabulary is not the target's, the target's family or geometry cannot be served, or
                its checkpoint lacks the tensors to start from.
        """
        name = resolve_layout(config.layout, target)
        check_vocab(len(frozen.target_ids_U), target.vocab_size)
        last = target.last_layer()
        bias_name = LAYOUTS[name].checkpoint_name("layer.self_attn.q_proj.bias", target.num_layers)
        has_bias = bias_name in target.tensor_files if config.start == "native" else "self_attn.q_proj.bias" in last
        options = MTPOptions(layout=name, draft_vocab_size=target.vocab_size, qkv_bias=has_bias)
        head = cls(target.config, options)
        if config.start == "native":
            load_native(head, target)
        else:
            start_from_last_layer(head, last, target.final_norm_D)
        return head

    def calibrate(self, last_TD: Tensor, target: FrozenTarget) -> None:
        """Let a fresh layer read the state at its own size: `hidden_norm` undoes the final norm and the division.

        The projected state then is the target's own before the final norm, times 1 / its rms, times the median rms of
        the given states: what the target's last layer adds to it has the right proportion.
        """
        if not self.is_fresh:
            return
        wide = last_TD.float()
        scale = rms(wide).median()
        weight_D = torch.ones_like(target.norm_D, dtype=torch.float32)
        if self.layout.feeds_normed:
            weight_D = safe_inverse(target.norm_D.float()) * rms(target.normed(wide)).median()
        with torch.no_grad():
            self.hidden_norm.weight.copy_(scale * weight_D - self.layout.norm_offset)
            self.token_norm.weight.fill_(float(scale) - self.layout.norm_offset)

    @property
    def attention(self) -> Any:
        return self.layer.self_attn

    def fuse(self, aux_RAD: Tensor, last_RD: Tensor, target: FrozenTarget) -> Tensor:
        """The target's state before or behind its final norm."""
        state_RD = target.normed(last_RD) if self.layout.feeds_normed else last_RD
        return state_RD.to(self.fc.weight.dtype)

    def enter(self, embedding_RD: Tensor, state_RD: Tensor, position_R: Tensor) -> tuple[Tensor, Tensor]:
        """Input of the attention and the residual, both [R, D]."""
        if self.layout.zeroes_first_embedding:
            embedding_RD = embedding_RD.masked_fill((position_R == 0)[:, None], 0)
        hidden_RD = self.hidden_norm(state_RD)
        token_RD = self.token_norm(embedding_RD).to(hidden_RD.dtype)
        both = [token_RD, hidden_RD] if self.layout.embedding_first else [hidden_RD, token_RD]
        x_RD = self.fc(torch.cat(both, -1))
        return self.layer.input_layernorm(x_RD), x_RD

    def leave(self, residual_RD: Tensor, attention_RD: Tensor) -> tuple[Tensor, Tensor]:
        """`out` (for the logits) and the state fed back to the next draft step."""
        middle = residual_RD + attention_RD
        # a mixture of experts wants a batch dimension
        pre = middle + self.layer.mlp(self.layer.post_attention_layernorm(middle)[None])[0]
        out = self.final_norm(pre)
        return out, out if self.layout.feeds_back_normed else pre


def check_vocab(draft_vocab: int, target_vocab: int) -> None:
    """An MTP layer is served with the target's lm_head, so it drafts all of it.

    Raises:
        InputError: The draft vocabulary is smaller.
    """
    if draft_vocab != target_vocab:
        raise InputError(
            f"draft_vocab.size={draft_vocab}: vLLM serves an MTP layer with the target's whole lm_head; "
            f"set draft_vocab.size={target_vocab}"
        )


# ---- parts by family -------------------------------------------------------------------------------------


def build_attention(config: Any, options: MTPOptions) -> nn.Module:
    if options.layout == "mimo":
        return Attention(config, int(config.hidden_size), bias=options.qkv_bias)
    if options.layout == "deepseek":
        return LatentAttention(config)
    gated = options.layout in ("qwen3_5", "qwen3_next")
    return NormedAttention(
        config,
        bias=options.qkv_bias,
        qk_norm=gated or bool(config.use_qk_norm),
        gated=gated,
        norm_offset=LAYOUTS[options.layout].norm_offset,
    )


def build_mlp(config: Any, layout: str) -> Any:
    """Dense, or transformers' own mixture of experts where vLLM's layer of that number has one."""
    number, config = int(config.num_hidden_layers), copy.copy(config)
    config._experts_implementation = "eager"  # standing alone, a block finds no choice made
    if layout == "deepseek" and number >= config.first_k_dense_replace:
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

        return DeepseekV3MoE(config)
    if layout == "glm4_moe" and number >= config.first_k_dense_replace:
        from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE

        return Glm4MoeMoE(config)
    # vLLM numbers Qwen's MTP layers from 0
    if layout == "qwen3_next" and config.num_experts and 0 not in config.mlp_only_layers:
        from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

        return Qwen3NextSparseMoeBlock(config)
    return GatedMLP(int(config.hidden_size), int(config.intermediate_size))


# ---- initialisation --------------------------------------------------------------------------------------


def start_from_last_layer(head: MTP, last_layer: Mapping[str, Tensor], norm_D: Tensor) -> None:
    """Begin as the target's last layer and final norm; the projection passes the state through, the token not at all.

    Any part of the token's embedding beside the state is slower to learn from (docs/log.md).

    Raises:
        InputError: The target's last layer has other parts (linear attention, a dense MLP beside experts).
    """
    wanted = head.layer.state_dict()
    found = {name: tensor for name, tensor in pack_experts(last_layer).items() if name in wanted}
    if missing := sorted(wanted.keys() - found.keys()):
        raise InputError(
            f"head.start=fresh: the target's last layer has no {missing[0]} to begin with; set head.start=native"
        )
    size = head.fc.out_features
    with torch.no_grad():
        head.layer.load_state_dict(found)
        halves = [torch.zeros(size, size), torch.eye(size)]
        head.fc.weight.copy_(torch.cat(halves if head.layout.embedding_first else halves[::-1], 1))
        head.final_norm.weight.copy_(norm_D.float() - head.layout.norm_offset)
    head.is_fresh = True


def load_native(head: MTP, target: Target) -> None:
    """Take over the MTP layer that the target's checkpoint holds.

    Raises:
        InputError: Naming the tensors that it lacks.
    """
    state = {name: tensor for name, tensor in head.state_dict().items() if not name.startswith("lm_head.")}
    names = head.layout.to_checkpoint(state, head.num_layers).keys()
    missing = [name for name in names if name not in target.tensor_files]
    if missing:
        some = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise InputError(f"head.start=native: {target.path} holds no {some}; set head.start=fresh")
    tensors = {name: target.tensor(name) for name in names}
    head.load_state_dict(head.layout.from_checkpoint(tensors, head.num_layers), strict=False)


def rms(x_TD: Tensor) -> Tensor:
    """Root of the mean square of each row [T]."""
    return x_TD.pow(2).mean(-1).sqrt()


def safe_inverse(weight_D: Tensor) -> Tensor:
    """1 / w, bounded where w is far below its usual size."""
    floor = 0.1 * weight_D.abs().median()
    return weight_D.sign() / weight_D.abs().clamp_min(floor)
