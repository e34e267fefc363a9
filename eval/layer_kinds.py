"""What a target's layers remember, and which cached positions each kind of them sees.

A layer that slides sees its own position and the `sliding_window - 1` before it, in transformers and in vLLM alike.
What keeps a state instead of keys and values by position (Mamba, linear attention) cannot take a rejected draft token
back.

Shapes: B requests, Q new tokens of a pass, L cached positions.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

FULL, SLIDING = "full_attention", "sliding_attention"
NO_TREES = (
    "eval.tree: some of the target's layers keep a state, or see less than these prompts, which the branches of a tree "
    "do not know of; leave eval.tree out"
)


def layer_kinds(config: Any) -> frozenset[str]:
    """Names of the kinds of layers that a text configuration has, by transformers' names."""
    named = config.to_dict().get("layer_types")
    if named:
        return frozenset(named)
    return frozenset([SLIDING if window_of(config) else FULL])


def window_of(config: Any) -> int | None:
    """Positions that a sliding layer sees, its own among them."""
    window = config.to_dict().get("sliding_window")
    return int(window) if window else None


def keeps_positions(config: Any) -> bool:
    """Whether all that a model of this text configuration remembers are keys and values, one for each position."""
    known = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), ())
    # what transformers itself says: the cache of such a model cannot be rolled back
    stateful = any(kind._is_stateful for kind in (known if isinstance(known, tuple) else (known,)))
    return not stateful and layer_kinds(config) <= {FULL, SLIDING}


def runs_trees(config: Any, length: int) -> bool:
    """Whether the branches of a draft tree at the end of so many positions see all that they would see in a chain."""
    window = window_of(config) if SLIDING in layer_kinds(config) else None
    return keeps_positions(config) and (window is None or window >= length)


def attention_masks(config: Any, position_BQ: Tensor, length: int, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
    """What each new token sees of the first `length` cached positions, as a decoder takes it.

    Args:
        config: The text configuration.
        dtype: Of the model.

    Returns:
        A mask [B, 1, Q, L]; one for each kind of layer where the configuration names them and they differ.
    """
    slot_L = torch.arange(length, device=position_BQ.device)
    visible = {FULL: slot_L <= position_BQ[..., None]}
    window = window_of(config)
    if window is not None:
        visible[SLIDING] = visible[FULL] & (slot_L > position_BQ[..., None] - window)
    kinds = layer_kinds(config)
    masks = {kind: _as_taken(config, visible[kind][:, None], dtype) for kind in kinds}
    return next(iter(masks.values())) if len(masks) == 1 else masks


def _as_taken(config: Any, visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Torch's own attention takes booleans; others add the mask to the scores, where true would add 1."""
    if config._attn_implementation == "sdpa":
        return visible
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, torch.finfo(dtype).min)
