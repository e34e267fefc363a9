"""The target drafts for itself with some of its middle layers left out (self-speculative decoding).

No weights and no cache of its own (Zhang et al. 2023, "Draft & Verify"): the layers that stay read the target's cache,
so what is verified is seen through all layers, and the keys that they write for drafts are overwritten when the
target runs these. vLLM 0.32 cannot serve it.

Shapes: B requests, Q new tokens of a pass, K draft tokens.
"""

import copy
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from drafthead.data.errors import InputError
from drafthead.eval.hf_target import HFTarget
from drafthead.eval.protocols import TargetPass
from drafthead.eval.states import find_decoder
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class SkipLayersOptions:
    """Which layers a draft step leaves out."""

    layers: str
    """Ids from 0 on, and ranges of them with both ends, for instance 8-20 or 3+8-20."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\d+(-\d+)?(\+\d+(-\d+)?)*", self.layers):
            raise InputError(f"layers={self.layers}: layer ids and ranges joined by +, for instance 3+8-20")
        if not all(self._ranges()):
            raise InputError(f"layers={self.layers}: a range ends before it begins")

    @property
    def ids(self) -> frozenset[int]:
        return frozenset(layer for some in self._ranges() for layer in some)

    def _ranges(self) -> list[range]:
        parts = [[int(end) for end in part.split("-")] for part in self.layers.split("+")]
        return [range(ends[0], ends[-1] + 1) for ends in parts]


class SkipLayers:
    """Implements `protocols.Drafter` over the target of the same loop.

    Raises:
        InputError: A layer that the target does not have, or none is left.
    """

    def __init__(self, target: HFTarget, skipped: Collection[int]):
        self.target = target
        self.decoder = without_layers(target.model, skipped)

    def start(self, prompts: list[list[int]], max_length: int) -> None:
        pass

    def observe(self, next_BQ: Tensor, states: TargetPass, position_BQ: Tensor, count_B: Tensor) -> None:
        rows = torch.arange(len(next_BQ), device=next_BQ.device)
        self.token_B = next_BQ[rows, count_B - 1]
        self.position_B = position_BQ[rows, count_B - 1] + 1

    def draft(self, k: int) -> Tensor:
        tokens = [self.token_B]
        for step in range(k):
            position_B1 = self.position_B[:, None] + step
            logits_B1V = self.target.run(tokens[-1][:, None], position_B1, decoder=self.decoder)
            tokens.append(logits_B1V[:, 0].argmax(-1))
        return torch.stack(tokens[1:], 1)

    def select(self, rows: Tensor) -> None:
        """The cache is the target's, which selects for itself."""
        self.token_B, self.position_B = self.token_B[rows], self.position_B[rows]


def without_layers(model: Any, skipped: Collection[int]) -> nn.Module:
    """A model's decoder stack without some layers; the modules are the model's own.

    Raises:
        InputError: As `SkipLayers`.
    """
    decoder, blocks, _ = find_decoder(model)
    unknown = sorted(layer for layer in skipped if not 0 <= layer < len(blocks))
    if unknown:
        raise InputError(f"skip-layers: the target has no layer {unknown[0]}; its layers are 0 to {len(blocks) - 1}")
    kept = [block for layer, block in enumerate(blocks) if layer not in skipped]
    if not kept:
        raise InputError(f"skip-layers: all {len(blocks)} layers are skipped; leave some to draft with")
    thinner: Any = copy.copy(decoder)
    thinner.config = copy.deepcopy(decoder.config)
    thinner.config.num_hidden_layers = len(kept)
    if kinds := thinner.config.to_dict().get("layer_types"):  # which mask each layer is given
        thinner.config.layer_types = [kind for layer, kind in enumerate(kinds) if layer not in skipped]
    (name,) = (name for name, child in decoder.named_children() if child is blocks)
    thinner._modules = {**decoder._modules, name: nn.ModuleList(kept)}
    assert isinstance(thinner, nn.Module)
    return thinner
