"""The EAGLE-3 head: vLLM's forward pass, and its training-time test (Li et al. 2025).

The arithmetic is that of vllm/model_executor/models/llama_eagle3.py, the pairing of tokens and states that of
vllm/v1/spec_decode/llm_base_proposer.py:

    g   = fc(cat(aux))                                              once per target token
    n   = hidden_norm(g);  res = n if norm_before_residual else g
    a   = Attention(cat[input_layernorm(embed(x[i+1])), n])
    pre = res + a + MLP(post_attention_layernorm(res + a));  out = norm(pre)
    logits = lm_head(out);  the next step's g is pre (out if norm_output)

Parameters are named as vLLM's plain checkpoint layout names them.
"""

from dataclasses import dataclass
from typing import Any

import torch
from drafthead.data.errors import InputError
from drafthead.pipeline.heads.base import DraftLMHead, FrozenTarget
from drafthead.pipeline.heads.blocks import Attention, GatedMLP, RMSNorm
from drafthead.pipeline.heads.recursive import RecursiveHead
from drafthead.pipeline.recipe import Eagle3Config
from drafthead.pipeline.target import Target
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Eagle3Options:
    """What the exported configuration must repeat."""

    num_aux: int
    draft_vocab_size: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


class Eagle3Layer(nn.Module):
    """The one decoder layer; its attention reads token and state side by side."""

    def __init__(self, config: Any):
        super().__init__()
        size, eps = int(config.hidden_size), float(config.rms_norm_eps)
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = Attention(config, 2 * size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = GatedMLP(size, int(config.intermediate_size))


class Eagle3(RecursiveHead):
    """An EAGLE-3 head for a Llama-shaped target configuration."""

    kind = "eagle3"
    # for the target's distribution alone; what is fused are the captured layers
    reads_last = "answer"

    def __init__(self, config: Any, options: Eagle3Options):
        super().__init__()
        size, eps = int(config.hidden_size), float(config.rms_norm_eps)
        self.options = options
        if options.norm_before_fc:
            self.input_norm = RMSNorm(options.num_aux * size, eps)
        if options.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(size, eps) for _ in range(options.num_aux))
        self.fc = nn.Linear(options.num_aux * size, size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(size, eps)
        self.lm_head = DraftLMHead(options.draft_vocab_size, size)

    @classmethod
    def fresh(cls, config: Eagle3Config, target: Target, frozen: FrozenTarget, num_aux: int) -> "Eagle3":
        """A new head, initialised as the recipe says."""
        options = Eagle3Options(
            num_aux=num_aux,
            draft_vocab_size=len(frozen.target_ids_U),
            norm_before_residual=config.norm_before_residual,
            norm_before_fc=config.norm_before_fc,
            fc_norm=config.fc_norm,
            norm_output=config.norm_output,
        )
        head = cls(target.config, options)
        if config.init_from_target:
            # the head's own norms multiply by their weights as they are
            last = {
                name: tensor + target.norm_offset if name.endswith("layernorm.weight") else tensor
                for name, tensor in target.last_layer().items()
            }
            initialise_from_target(head, last, target.final_norm_D, frozen.lm_head_UD)
        return head

    @property
    def attention(self) -> Attention:
        return self.midlayer.self_attn

    def fuse(self, aux_RAD: Tensor, last_RD: Tensor, target: FrozenTarget) -> Tensor:
        """g of each position from its captured states."""
        x = aux_RAD.flatten(1).to(self.fc.weight.dtype)
        if self.options.norm_before_fc:
            x = self.input_norm(x)
        if self.options.fc_norm:
            chunks = x.chunk(self.options.num_aux, -1)
            x = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], -1)
        fused: Tensor = self.fc(x)
        return fused

    def enter(self, embedding_RD: Tensor, state_RD: Tensor, position_R: Tensor) -> tuple[Tensor, Tensor]:
        """Input of the attention [R, 2D], and the residual [R, D]."""
        normed = self.midlayer.hidden_norm(state_RD)
        residual = normed if self.options.norm_before_residual else state_RD
        return torch.cat([self.midlayer.input_layernorm(embedding_RD).to(normed.dtype), normed], -1), residual

    def leave(self, residual_RD: Tensor, attention_RD: Tensor) -> tuple[Tensor, Tensor]:
        """`out` (for the logits) and the state fed back to the next draft step."""
        layer = self.midlayer
        middle = residual_RD + attention_RD
        pre = middle + layer.mlp(layer.post_attention_layernorm(middle))
        out = self.norm(pre)
        return out, out if self.options.norm_output else pre


# ---- initialisation --------------------------------------------------------------------------------------

EMBEDDING_SHARE = 0.5


def check_last_layer(target: Target) -> None:
    """Refuse a target whose last layer has no Llama attention, from which a head's could begin.

    Other parts (a mixture of experts, biases) may differ; the head's own begin at random then.

    Raises:
        InputError: Naming the tensor and the setting that does without it.
    """
    config, shapes = target.config, target.last_layer_shapes()
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads, "v": config.num_key_value_heads}
    wanted: dict[str, tuple[int, ...]] = {
        f"self_attn.{part}_proj.weight": (count * target.head_dim, target.hidden_size) for part, count in heads.items()
    }
    wanted["input_layernorm.weight"] = (target.hidden_size,)
    for name, shape in wanted.items():
        if shapes.get(name) != shape:
            found = "no such tensor" if name not in shapes else f"{list(shapes[name])} instead of {list(shape)}"
            raise InputError(
                f"head.init_from_target=true: {name} of the target's last layer: {found}; its attention is of another "
                f"kind, so set head.init_from_target=false"
            )


def initialise_from_target(head: Eagle3, last_layer: dict[str, Tensor], norm_D: Tensor, lm_head_UD: Tensor) -> None:
    """Start from the target's last layer, final norm and lm_head rows; fc passes the last aux state through.

    The half of q/k/v that reads the token's embedding starts at half of what reads the state; at zero the head is
    slower to use the token (docs/log.md).
    """
    size = head.fc.out_features
    layer = head.midlayer
    with torch.no_grad():
        head.fc.weight.zero_()
        head.fc.weight[:, -size:].copy_(torch.eye(size))
        for name, parameter in layer.named_parameters():
            if name in ("input_layernorm.weight", "hidden_norm.weight"):
                parameter.copy_(last_layer["input_layernorm.weight"])
            elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                parameter[:, :size].copy_(last_layer[name]).mul_(EMBEDDING_SHARE)
                parameter[:, size:].copy_(last_layer[name])
            elif name in last_layer and last_layer[name].shape == parameter.shape:
                parameter.copy_(last_layer[name])
        head.norm.weight.copy_(norm_D)
        head.lm_head.weight.copy_(lm_head_UD)
