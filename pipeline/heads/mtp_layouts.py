"""The families of MTP layers that vLLM serves: what each is fed and feeds back, and how its tensors are named.

What all have in common is a decoder layer behind a projection of two normed inputs (DeepSeek-V3, section 2.2):

    y = Layer(fc(cat[token_norm(embed(x[i+1])), hidden_norm(state)]));  out = final_norm(y);  logits = lm_head(out)

Which state that is, which half comes first and whether `y` or `out` is the next step's state differs by family and must
be what the server does (vllm/v1/spec_decode/llm_base_proposer.py, `model_returns_tuple`, and the model files named
below). Our module names its parts as above; `MTPLayout.tensor_names` gives a checkpoint's names.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from drafthead.data.errors import InputError
from drafthead.data.files import read_json
from drafthead.pipeline.target import Target
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class MTPLayout:
    """One family's arithmetic and names."""

    feeds_normed: bool
    """Step 0 is fed with the target's state behind its final norm, else with the one before it."""
    embedding_first: bool
    """Order of the concatenation: cat[embedding, hidden], else cat[hidden, embedding]."""
    zeroes_first_embedding: bool
    """The embedding in the slot at position 0 counts as zero."""
    feeds_back_normed: bool
    """Later steps are fed with the layer's state behind its own final norm, else with the one before it."""
    norm_offset: float = 0.0
    """Norms multiply by weight + offset."""
    prefix: str
    """Of the tensors in a checkpoint; `{layer}` is the number of the target's layers."""
    names: Mapping[str, str]
    """Names below the prefix of `token_norm`, `hidden_norm`, `fc`, `final_norm` and of the decoder layer (`layer.`)."""
    count_key: str
    """Key of the text part of config.json that says how many MTP layers the checkpoint holds."""

    def checkpoint_name(self, name: str, num_layers: int) -> str:
        """Name in a checkpoint of the tensor that our module calls `name`."""
        part, _, rest = name.partition(".")
        below = self.names["layer"] + rest if part == "layer" else f"{self.names[part]}.{rest}"
        return self.prefix.format(layer=num_layers) + below

    def to_checkpoint(self, state: Mapping[str, Tensor], num_layers: int) -> dict[str, Tensor]:
        """A head's tensors as a checkpoint holds them: without the lm_head, which is the target's."""
        own = {name: tensor for name, tensor in state.items() if not name.startswith("lm_head.")}
        return {self.checkpoint_name(name, num_layers): tensor for name, tensor in unpack_experts(own).items()}

    def from_checkpoint(self, tensors: Mapping[str, Tensor], num_layers: int) -> dict[str, Tensor]:
        """The inverse of `to_checkpoint`; names that are none of the layer's are left out."""
        prefix = self.prefix.format(layer=num_layers)
        outer = {theirs: ours for ours, theirs in self.names.items() if ours != "layer"}
        found = {}
        for name, tensor in tensors.items():
            if not name.startswith(prefix):
                continue
            below = name.removeprefix(prefix)
            part, _, kind = below.rpartition(".")
            if part in outer:
                found[f"{outer[part]}.{kind}"] = tensor
            elif below.startswith(tuple(self.names["layer"] + one for one in LAYER_PARTS)):
                found["layer." + below.removeprefix(self.names["layer"])] = tensor
        return pack_experts(found)


LAYER_PARTS = ("input_layernorm.", "self_attn.", "post_attention_layernorm.", "mlp.")
"""Beginnings of the names inside a decoder layer."""

MIMO = MTPLayout(
    feeds_normed=False,
    embedding_first=False,
    zeroes_first_embedding=True,
    feeds_back_normed=True,
    prefix="model.mtp_layers.0.",
    names={
        "token_norm": "token_layernorm",
        "hidden_norm": "hidden_layernorm",
        "fc": "input_proj",
        "final_norm": "final_layernorm",
        "layer": "",
    },
    count_key="num_nextn_predict_layers",
)
"""Qwen2-style, also for any Llama target (mimo.py, mimo_mtp.py): fed BEFORE the target's final norm,
cat[hidden, embedding], first embedding zero, what is behind `final_layernorm` gives the logits and is fed back."""

QWEN3_5 = MTPLayout(
    feeds_normed=True,
    embedding_first=True,
    zeroes_first_embedding=False,
    feeds_back_normed=True,
    norm_offset=1.0,
    prefix="mtp.",
    names={
        "token_norm": "pre_fc_norm_embedding",
        "hidden_norm": "pre_fc_norm_hidden",
        "fc": "fc",
        "final_norm": "norm",
        "layer": "layers.0.",
    },
    count_key="mtp_num_hidden_layers",
)
"""Qwen3.5 (qwen3_5_mtp.py): fed BEHIND the target's final norm, cat[embedding, hidden], no zeroed embedding, what is
behind `norm` gives the logits and is fed back; all norms multiply by 1 + weight, attention outputs are gated."""

QWEN3_NEXT = MTPLayout(**{**vars(QWEN3_5), "count_key": "num_nextn_predict_layers"})
"""Qwen3-Next (qwen3_next_mtp.py): as Qwen3.5, with a mixture of experts."""

DEEPSEEK = MTPLayout(
    feeds_normed=True,
    embedding_first=True,
    zeroes_first_embedding=True,
    feeds_back_normed=True,
    prefix="model.layers.{layer}.",
    names={
        "token_norm": "enorm",
        "hidden_norm": "hnorm",
        "fc": "eh_proj",
        "final_norm": "shared_head.norm",
        "layer": "",
    },
    count_key="num_nextn_predict_layers",
)
"""DeepSeek-V3 (deepseek_mtp.py): fed BEHIND the target's final norm, cat[embedding, hidden], first embedding zero, what
is behind `shared_head.norm` gives the logits and is fed back; latent attention."""

GLM4_MOE = MTPLayout(**{**vars(DEEPSEEK), "feeds_back_normed": False})
"""GLM-4.5 to 4.7 (glm4_moe_mtp.py): as DeepSeek-V3, but what is fed back is the state BEFORE `shared_head.norm`;
ordinary attention with a partial rotary embedding."""

LAYOUTS = {
    "mimo": MIMO,
    "qwen3_5": QWEN3_5,
    "qwen3_next": QWEN3_NEXT,
    "deepseek": DEEPSEEK,
    "glm4_moe": GLM4_MOE,
}
"""By `MTPOptions.layout`."""

FAMILIES = {
    "llama": "mimo",
    "mistral": "mimo",
    "qwen2": "mimo",
    "qwen3_5_text": "qwen3_5",
    "qwen3_next": "qwen3_next",
    "deepseek_v3": "deepseek",
    "glm4_moe": "glm4_moe",
}
"""Layout of each `model_type` of the target's text part."""

ASKED = {"mimo": {"mimo"}, "qwen3_5": {"qwen3_5", "qwen3_next"}, "deepseek": {"deepseek", "glm4_moe"}}
"""What each `head.layout` of a recipe stands for."""


def resolve_layout(asked: str, target: Target) -> str:
    """Which of `LAYOUTS` a target's MTP layer has.

    Raises:
        InputError: The target's family has none, has another than was asked for, or cannot be served that way.
    """
    kind = target.config.model_type
    found = FAMILIES.get(kind)
    if found is None:
        raise InputError(f"head.type=mtp: a {kind} target has no MTP layout here; there are {', '.join(FAMILIES)}")
    if asked != "auto" and found not in ASKED[asked]:
        raise InputError(f"head.layout={asked}: a {kind} target is served as {found}; leave head.layout at auto")
    raw = read_json(target.path / "config.json")
    for key in ("quantization_config", "compression_config"):
        if raw.get(key) is not None:
            raise InputError(f"{target.path}/config.json: {key}: an MTP layer needs an unquantised target; give that")
    count = getattr(target.config, LAYOUTS[found].count_key, None)
    if count is not None and count > 1:
        raise InputError(f"{target.path}/config.json: {count} MTP layers; one, applied recursively, is supported")
    if found == "mimo":
        _check_servable_as_qwen2(target, raw)
    return found


def _check_servable_as_qwen2(target: Target, raw: Mapping[str, Any]) -> None:
    """vLLM's MiMo is a Qwen2: heads of hidden / heads channels, silu, full attention, no bias on o_proj or in the MLP.

    Raises:
        InputError: Naming the key of the target's config.json in which it differs.
    """
    config = target.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    wrong = {
        "text_config": "text_config" in raw,
        "head_dim": head_dim * config.num_attention_heads != config.hidden_size,
        "hidden_act": config.hidden_act != "silu",
        "attention_bias": bool(getattr(config, "attention_bias", False)),
        "mlp_bias": bool(getattr(config, "mlp_bias", False)),
        "sliding_window": getattr(config, "sliding_window", None) is not None or kinds != {"full_attention"},
    }
    for key in (key for key, is_wrong in wrong.items() if is_wrong):
        raise InputError(
            f"{target.path}/config.json: {key}={raw.get(key)!r}: vLLM serves such a target as MiMo, a Qwen2 that has "
            f"no such thing; train an EAGLE-3 head for it (head.type=eagle3)"
        )


# ---- experts: one tensor each in a checkpoint, one for all in transformers' modules ------------------------

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


def unpack_experts(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Split `experts.gate_up_proj` and `experts.down_proj` into `experts.{i}.{gate,up,down}_proj.weight`."""
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        stem, _, kind = name.rpartition(".")
        if stem.endswith(".experts") and kind == "gate_up_proj":
            for number, expert in enumerate(tensor):
                found[f"{stem}.{number}.gate_proj.weight"], found[f"{stem}.{number}.up_proj.weight"] = expert.chunk(2)
        elif stem.endswith(".experts") and kind == "down_proj":
            found.update({f"{stem}.{number}.down_proj.weight": expert for number, expert in enumerate(tensor)})
        else:
            found[name] = tensor
    return found


def pack_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `unpack_experts`; experts that lack a part are left out."""
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        if match := EXPERT.fullmatch(name):
            stem, number, kind = match.groups()
            experts.setdefault(stem, {}).setdefault(int(number), {})[kind] = tensor
        else:
            found[name] = tensor
    for stem, by_number in experts.items():
        ordered = [by_number[number] for number in sorted(by_number)]
        if all(len(parts) == 3 for parts in ordered):
            found[f"{stem}.gate_up_proj"] = torch.stack(
                [torch.cat([parts["gate_proj"], parts["up_proj"]]) for parts in ordered]
            )
            found[f"{stem}.down_proj"] = torch.stack([parts["down_proj"] for parts in ordered])
    return found
