"""Which rotary embedding a config.json means to vLLM, written from the formulae and apart from any head.

vLLM: model_executor/layers/rotary_embedding/. transformers agrees on the four types below, but for one thing:
its Llama ignores `partial_rotary_factor` with the default type, vLLM's does not.
"""

import math
from typing import Any

from drafthead.data.errors import GateError, InputError

SUPPORTED = ("default", "linear", "llama3", "yarn")
NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
PARTIAL_ROTARY = {
    **dict.fromkeys(("glm", "glm4", "glm4_moe", "glm4v_moe_text", "nemotron", "phi", "persimmon"), 0.5),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "stablelm"), 0.25),
}
"""Share of rotated channels that transformers assumes for a `model_type` whose config says nothing."""
NOT_FOR_A_HEAD = ("type", "mrope_section", "mrope_interleaved")
LLAMA_THETA = 10_000.0


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config (that of a multimodal target is nested)."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def rope_of(config: dict[str, Any]) -> dict[str, Any]:
    """Read a target's rotary embedding from whichever schema it has, flat and with its base in it.

    Raises:
        GateError: vLLM would compute another embedding than training, or the type is unknown.
    """
    rope = config.get("rope_parameters")
    return flat_rope(rope, config) if rope else legacy_rope(config)


def legacy_rope(config: dict[str, Any]) -> dict[str, Any]:
    """Read the older schema: `rope_theta` and `rope_scaling` at the top.

    Raises:
        GateError: As `rope_of`.
    """
    return flat_rope(config.get("rope_scaling") or {}, config)


def flat_rope(rope: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Flatten parameters that are nested by layer type or made for images; check that they are complete.

    Raises:
        GateError: The type is not supported, or a number that it needs is missing.
    """
    flat = _one_layer_type(rope)
    kind = flat.get("rope_type", flat.get("type", "default"))
    # on text alone the three sections of M-RoPE turn by the same position
    kind = "default" if kind == "mrope" else kind
    if kind not in SUPPORTED:
        raise _refusal("rope_type", f"{kind} is not supported; supported: {', '.join(SUPPORTED)}")
    flat = {name: value for name, value in flat.items() if name not in NOT_FOR_A_HEAD and value is not None}
    flat["rope_type"] = kind
    flat["rope_theta"] = float(flat.get("rope_theta") or config.get("rope_theta") or _default_theta(config))
    share = config.get("partial_rotary_factor", PARTIAL_ROTARY.get(str(config.get("model_type"))))
    if share is not None:
        flat.setdefault("partial_rotary_factor", share)
    for name in NEEDED.get(kind, ()):
        if name == "original_max_position_embeddings" and name not in flat:
            flat[name] = config.get(name) or config["max_position_embeddings"]
        if name not in flat:
            raise _refusal(name, f"missing, and rope type {kind} needs it")
    return flat


def both_schemas(rope: dict[str, Any]) -> dict[str, Any]:
    """The config keys that say `rope` twice: `rope_parameters`, and `rope_theta` with `rope_scaling`."""
    keys: dict[str, Any] = {"rope_parameters": dict(rope), "rope_theta": rope["rope_theta"]}
    if rope["rope_type"] != "default":
        keys["rope_scaling"] = {name: value for name, value in rope.items() if name != "rope_theta"}
    if "partial_rotary_factor" in rope:
        keys["partial_rotary_factor"] = rope["partial_rotary_factor"]
    return keys


def rotary_size(config: dict[str, Any]) -> int:
    """Channels of each head that a rotary embedding may turn; in latent attention they lie beside plain ones."""
    own = config.get("qk_rope_head_dim") or config.get("head_dim")
    return int(own or config["hidden_size"] // config["num_attention_heads"])


def inverse_frequencies(rope: dict[str, Any], head_dim: int) -> list[float]:
    """Angular step per position of each rotated pair, theta^(-2i/dim), scaled as the type says."""
    dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    plain = [rope["rope_theta"] ** (-2 * pair / dim) for pair in range(dim // 2)]
    kind = rope["rope_type"]
    if kind == "linear":
        return [step / rope["factor"] for step in plain]
    if kind == "llama3":
        return [_llama3_step(step, rope) for step in plain]
    if kind == "yarn":
        return _yarn_steps(plain, rope, dim)
    return plain


def attention_scaling(rope: dict[str, Any]) -> float:
    """Factor on cosine and sine: 1 but for YaRN."""
    if rope["rope_type"] != "yarn":
        return 1.0
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def scale(weight: float) -> float:
        return 1.0 if rope["factor"] <= 1 else 0.1 * weight * math.log(rope["factor"]) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope["mscale"]) / scale(rope["mscale_all_dim"])
    return scale(1.0)


def _llama3_step(step: float, rope: dict[str, Any]) -> float:
    """Keep short waves, stretch long ones, blend between (Llama 3.1)."""
    turns = rope["original_max_position_embeddings"] * step / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    if turns > high:
        return step
    if turns < low:
        return float(step / rope["factor"])
    kept = (turns - low) / (high - low) if high != low else 0.0
    return float((1 - kept) * step / rope["factor"] + kept * step)


def _yarn_steps(plain: list[float], rope: dict[str, Any], dim: int) -> list[float]:
    """Blend stretched and plain steps over the pairs between beta_fast and beta_slow turns (YaRN, 3.2)."""

    def pair_with(turns: float) -> float:
        span = rope["original_max_position_embeddings"] / (turns * 2 * math.pi)
        return float(dim * math.log(span) / (2 * math.log(rope["rope_theta"])))

    low, high = pair_with(rope.get("beta_fast") or 32), pair_with(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    stretched = [min(max((pair - low) / width, 0.0), 1.0) for pair in range(len(plain))]
    return [step / rope["factor"] * share + step * (1 - share) for step, share in zip(plain, stretched, strict=True)]


def _one_layer_type(rope: dict[str, Any]) -> dict[str, Any]:
    nested = {name: value for name, value in rope.items() if isinstance(value, dict)}
    if not nested:
        return rope
    if "full_attention" in nested:
        return nested["full_attention"]
    different = {str(sorted(value.items())) for value in nested.values()}
    if len(different) > 1:
        raise _refusal("full_attention", f"missing among the layer types {', '.join(sorted(nested))}")
    return next(iter(nested.values()))


def _default_theta(config: dict[str, Any]) -> float:
    """Llama's own default; for another family a missing base would be a guess."""
    if config.get("model_type") == "llama":
        return LLAMA_THETA
    raise InputError(f"rope_theta is missing from the config of a {config.get('model_type')} target; add it")


def _refusal(field: str, message: str) -> GateError:
    return GateError("RopeGate", f"rope_parameters.{field}", message)
