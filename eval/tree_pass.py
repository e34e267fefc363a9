"""A pass of a transformers model over a draft tree: its attention becomes our `tree_attention`.

Registered with transformers' AttentionInterface and chosen for the duration of a pass. The rows' visibility travels as
the attention mask (4-D masks are handed on untouched), the caches and their lengths as a keyword argument, which
decoders hand on to every attention layer.

Shapes: B requests, M rows of the tree (row 0 the root), H heads, G kv heads, P head dim, L cache slots.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from drafthead.data.errors import InputError
from drafthead.kernels.tree_attention.op import tree_attention
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "drafthead_tree"
UNKNOWN = ("softcap", "s_aux", "position_bias")
"""What some families ask of their attention and `tree_attention` does not do."""


class CachedLayer(Protocol):
    """Keys and values [B, G, L, P] of one layer, by position."""

    keys: Tensor | None
    values: Tensor | None


@dataclass(frozen=True, kw_only=True)
class TreeCaches:
    """The cached prefix of a tree pass."""

    layers: Sequence[CachedLayer]
    length_B: Tensor
    """Cached positions in front of the root."""


@contextmanager
def tree_attention_in(model: Any, decoder: nn.Module) -> Iterator[None]:
    """Let a model attend as in a tree while this lasts; its passes need `tree_caches=`.

    Raises:
        InputError: The model does not look its attention up in transformers' AttentionInterface.
    """
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        config: Any = decoder.config
        if config._attn_implementation != NAME:
            raise InputError(
                f"eval.tree: the attention of {type(model).__name__} cannot be replaced (it does not use "
                f"transformers' AttentionInterface); leave eval.tree out"
            )
        yield
    finally:
        model.set_attn_implementation(before)


def attend(
    module: Any,
    query_BHMP: Tensor,
    key_BGMP: Tensor,
    value_BGMP: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    tree_caches: TreeCaches | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer; keys and values are those of the rows, the mask is [B, 1, M, M]."""
    assert tree_caches is not None, "the decoder did not hand tree_caches on"
    unknown = [name for name in UNKNOWN if kwargs.get(name) is not None]
    if unknown:
        raise InputError(f"eval.tree: the target's attention uses {unknown[0]}, which trees do not know; leave it out")
    layer = tree_caches.layers[module.layer_idx]
    assert layer.keys is not None
    assert layer.values is not None
    output_BMHP = tree_attention(
        query_BHMP.transpose(1, 2),
        (layer.keys.transpose(1, 2), layer.values.transpose(1, 2)),
        tree_caches.length_B,
        (key_BGMP.transpose(1, 2), value_BGMP.transpose(1, 2)),
        attention_mask[:, 0],
        scale=scaling,
    )
    return output_BMHP, None


AttentionInterface.register(NAME, attend)
