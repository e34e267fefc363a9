"""Reading a target's hidden states while it runs, by hooks.

Id i is the residual stream entering layer i; the number of layers stands for the stream before the final norm.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from drafthead.data.errors import InputError
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

DECODER_PARTS = (("layers", "norm"), ("h", "ln_f"), ("layers", "norm_f"), ("layers", "final_layernorm"))
"""Names of the layer list and of the final norm, by family."""


@dataclass(frozen=True, kw_only=True)
class Opening:
    """The tokens that all rows begin with, run once: P of them, L layers, G key heads."""

    ids: list[int]
    keys_values: list[tuple[Tensor, Tensor]]
    """Of each layer, both [1, G, P, head_dim]."""
    aux_PAD: Tensor
    last_PD: Tensor

    def cache(self, batch_size: int) -> DynamicCache:
        """A cache of its own for a batch of rows that begin so."""
        shape = (batch_size, -1, -1, -1)
        return DynamicCache([(keys.expand(shape), values.expand(shape)) for keys, values in self.keys_values])


class StateRecorder:
    """Run the decoder and keep the states that enter the chosen layers and the final norm, for each thread its own.

    Its hooks leave the model with it: several recorders may read one model after another.
    """

    def __init__(self, model: nn.Module, layers: list[int], *, detach: bool = True):
        """`detach`: keep states without the graph that a gradient would need."""
        self.decoder, blocks, self.norm = find_decoder(model)
        self.layers = layers
        self.local = threading.local()
        self.opening: Opening | None = None
        count = len(blocks)
        for layer in {*layers, count}:
            module = self.norm if layer == count else blocks[layer]
            hook = module.register_forward_pre_hook(_keep(self.local, layer, detach=detach), with_kwargs=True)
            weakref.finalize(self, hook.remove)
        self.last_id = count

    def share_opening(self, ids: list[int]) -> None:
        """Run what all rows to come begin with; `record` then runs only what follows it.

        A target that keeps less than every key and value (a sliding window, a recurrent state) shares nothing.
        """
        self.opening = None
        if not ids:
            return
        with torch.inference_mode():
            output = self.decoder(input_ids=self._batch([ids]), use_cache=True)
        cache = getattr(output, "past_key_values", None)  # recurrent families name theirs otherwise
        if isinstance(cache, DynamicCache) and all(type(layer) is DynamicLayer for layer in cache.layers):
            keys_values = [(layer.keys, layer.values) for layer in cache.layers]
            self.opening = Opening(ids=ids, keys_values=keys_values, aux_PAD=self.aux()[0], last_PD=self.last()[0])

    def forward(self, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        """States of a right-padded batch behind the shared opening: aux [B, T, A, D] and last [B, T, D]."""
        past = {} if self.opening is None else {"past_key_values": self.opening.cache(len(ids_BT))}
        with torch.inference_mode():
            self.decoder(input_ids=ids_BT, use_cache=bool(past), **past)
        return self.aux(), self.last()

    def _batch(self, rows: list[list[int]]) -> Tensor:
        """Right-padded ids [B, T] on the decoder's device."""
        width = max(len(ids) for ids in rows)
        padded = torch.tensor([ids + [0] * (width - len(ids)) for ids in rows])
        return padded.to(next(self.decoder.parameters()).device)

    def aux(self) -> Tensor:
        """Captured states of this thread's latest pass: [B, T, A, D], with A = 0 where no layer is captured."""
        if not self.layers:
            batch, length, size = self.last().shape
            return self.last().new_empty(batch, length, 0, size)
        states = _states(self.local)
        return torch.stack([states[layer] for layer in self.layers], 2)

    def last(self) -> Tensor:
        """State before the final norm of this thread's latest pass: [B, T, D]."""
        return _states(self.local)[self.last_id]

    def record(self, rows: list[list[int]], stored: torch.dtype | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Run token id rows as one batch; yield aux [T, A, D] and last [T, D] of each, on the CPU, as `stored`.

        Raises:
            ValueError: A row does not go on behind the shared opening.
        """
        opening = [] if self.opening is None else self.opening.ids
        shared = len(opening)
        if any(len(ids) <= shared or ids[:shared] != opening for ids in rows):
            raise ValueError(f"a row does not go on behind the {shared} tokens that all were said to begin with")
        aux, last = self.forward(self._batch([ids[shared:] for ids in rows]))
        aux, last = aux.to("cpu", stored), last.to("cpu", stored)
        for number, ids in enumerate(rows):
            end = len(ids) - shared
            if self.opening is None:
                yield aux[number, :end].clone(), last[number, :end].clone()
            else:
                yield (
                    torch.cat([self.opening.aux_PAD.to(aux), aux[number, :end]]),
                    torch.cat([self.opening.last_PD.to(last), last[number, :end]]),
                )


def _states(local: threading.local) -> dict[int, Tensor]:
    """States of this thread's latest pass, by layer."""
    states: dict[int, Tensor] = local.__dict__.setdefault("states", {})
    return states


def _keep(local: threading.local, layer: int, *, detach: bool) -> Callable[..., None]:
    """A hook that holds on to the states alone, not to their recorder, which would never end then."""

    def hook(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        state = args[0] if args else kwargs["hidden_states"]
        _states(local)[layer] = state.detach() if detach else state

    return hook


def find_decoder(model: nn.Module) -> tuple[nn.Module, nn.ModuleList, nn.Module]:
    """The decoder stack of a causal language model, its layers and its final norm.

    Raises:
        InputError: The model's parts have other names; the message lists what is there.
    """
    inner: Any = model
    for name in ("model", "transformer", "backbone", "language_model"):
        inner = getattr(inner, name, inner)
    for layers_name, norm_name in DECODER_PARTS:
        if hasattr(inner, layers_name) and hasattr(inner, norm_name):
            return inner, getattr(inner, layers_name), getattr(inner, norm_name)
    parts = ", ".join(name for name, _ in inner.named_children())
    raise InputError(
        f"target: cannot find the decoder layers and final norm of {type(model).__name__} (parts: {parts})"
    )
