"""How long a pass of the target takes on a device that is not at hand, by the roofline model.

A pass takes the longer of two times: reading weights and caches from memory, and the arithmetic of all its tokens.
Launches, communication, sampling and drafting are not in it, so speed-ups by it are upper bounds: measure before
serving. Tensor parallelism divides both times alike, so one device stands for several; whether all fits into its memory
is not asked.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drafthead.data.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator by its data sheet."""

    bandwidth: float
    """Bytes/s of memory."""
    peak: float
    """FLOP/s, dense bf16 (sheets often print twice that, for sparse matrices)."""


DEVICES = {
    "a100-80gb": Device(bandwidth=2.039e12, peak=312e12),
    "b200": Device(bandwidth=8e12, peak=2250e12),
    "h100-pcie": Device(bandwidth=2e12, peak=756e12),
    "h100-sxm": Device(bandwidth=3.35e12, peak=989e12),
    "h200": Device(bandwidth=4.8e12, peak=989e12),
    "l4": Device(bandwidth=0.3e12, peak=121e12),
    "l40s": Device(bandwidth=0.864e12, peak=362e12),
}


def find_device(name: str) -> Device:
    if name not in DEVICES:
        raise InputError(f"device: {name!r} is not in the table; one of {', '.join(DEVICES)}, or measured row costs")
    return DEVICES[name]


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """What of a target a pass reads and computes."""

    dense_parameters: float
    """Used by every token; the input embedding, of which a token reads one row, is not among them."""
    bytes_per_parameter: float = 2
    kv_bytes_per_token: float = 0
    """Cache of one token of context, all layers."""
    attention_flops: float = 0
    """Of one token per token of its context, all layers."""
    expert_parameters: float = 0
    """One expert, summed over layers; 0 for dense targets."""
    num_experts: int = 0
    experts_per_token: int = 0

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> "ModelSize":
        """Estimate from the keys of a Llama-shaped `config.json`, mixtures of experts included.

        Raises:
            InputError: Keys are missing, or the attention has another shape.
        """
        config = config.get("text_config") or config
        if config.get("kv_lora_rank"):
            raise InputError("device: targets with latent attention are not in the roofline; give --row-cost-by-batch")
        try:
            hidden, layers, heads = (config[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
            vocab, middle = config["vocab_size"], config["intermediate_size"]
        except KeyError as error:
            raise InputError(f"device: the target's config.json lacks {error}; give --row-cost-by-batch") from None
        width = config.get("head_dim") or hidden // heads
        groups = config.get("num_key_value_heads") or heads
        experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts")
        expert_middle = config.get("moe_intermediate_size") or middle
        shared = config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * expert_middle
        attention = hidden * width * (2 * heads + 2 * groups)
        every_token = 3 * hidden * shared + hidden * experts if experts else 3 * hidden * middle
        return cls(
            dense_parameters=layers * (attention + every_token) + vocab * hidden,
            kv_bytes_per_token=2 * layers * groups * width * 2,
            attention_flops=4 * layers * heads * width,
            expert_parameters=layers * 3 * hidden * expert_middle if experts else 0,
            num_experts=experts,
            experts_per_token=_first(config, "num_experts_per_tok", "num_experts_per_token") if experts else 0,
        )

    def experts_touched(self, tokens: int) -> float:
        """Expected experts of a layer that `tokens` tokens read, each choosing evenly and independently.

        Real routing is less even, and neighbouring tokens agree: fewer are touched.
        """
        if not self.num_experts:
            return 0
        return self.num_experts * (1 - (1 - self.experts_per_token / self.num_experts) ** tokens)

    def weight_bytes(self, tokens: int) -> float:
        read = self.dense_parameters + self.experts_touched(tokens) * self.expert_parameters
        return read * self.bytes_per_parameter

    def flops_per_token(self, context: int) -> float:
        active = self.dense_parameters + self.experts_per_token * self.expert_parameters
        return 2 * active + self.attention_flops * context


def _first(config: Mapping[str, Any], *names: str) -> int:
    return next((int(config[name]) for name in names if config.get(name)), 0)


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """One target on one device, its requests `context` tokens long."""

    model: ModelSize
    device: Device
    context: int = 0

    def step_s(self, batch: int, rows: int = 1) -> float:
        """Seconds of a pass over `batch` requests of `rows` tokens each, which share one reading of their cache."""
        tokens = batch * rows
        memory = self.model.weight_bytes(tokens) + batch * self.context * self.model.kv_bytes_per_token
        compute = tokens * self.model.flops_per_token(self.context)
        return max(memory / self.device.bandwidth, compute / self.device.peak)

    def compute_bound_tokens(self) -> float:
        """Tokens of a pass above which arithmetic takes longer than reading all weights; caches not counted."""
        everything = self.model.dense_parameters + self.model.num_experts * self.model.expert_parameters
        read_s = everything * self.model.bytes_per_parameter / self.device.bandwidth
        return read_s * self.device.peak / self.model.flops_per_token(self.context)
