"""A target in transformers for the speculative loop, with a cache that is indexed by position.

Shapes: B requests, Q new tokens of a pass, M rows of a draft tree, G kv heads, L cache slots, P head dim.
"""

from typing import Any

import torch
from drafthead.data.errors import InputError
from drafthead.eval.layer_kinds import NO_TREES, attention_masks, keeps_positions, layer_kinds, runs_trees
from drafthead.eval.loop_gate import check_logits, own_logits
from drafthead.eval.protocols import TargetPass
from drafthead.eval.states import StateRecorder
from drafthead.eval.tree_pass import TreeCaches, tree_attention_in
from drafthead.kernels.verify_tree.structure import tree_depth
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin


class PositionedLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is not followed
    """Keys and values [B, G, L, P] written at given positions of each request; those of a tree pass beside them."""

    def __init__(self, max_length: int):
        super().__init__()
        self.max_length = max_length
        self.position_BQ = torch.empty(0)
        self.used = 0
        self.in_tree = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch, groups, _, _ = key_states.shape
        self.keys = key_states.new_zeros(batch, groups, self.max_length, key_states.shape[-1])
        self.values = value_states.new_zeros(batch, groups, self.max_length, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.in_tree:
            self.tree = key_states, value_states
            return self.tree
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._write(key_states.transpose(1, 2), value_states.transpose(1, 2), self.position_BQ)
        assert self.keys is not None
        assert self.values is not None
        return self.keys[:, :, : self.used], self.values[:, :, : self.used]

    def keep(self, row_BQ: Tensor, position_BQ: Tensor) -> None:
        """Write rows of the latest tree pass at their positions."""
        request_B1 = torch.arange(len(row_BQ), device=row_BQ.device)[:, None]
        keys_BQGP, values_BQGP = (part.transpose(1, 2)[request_B1, row_BQ] for part in self.tree)
        self._write(keys_BQGP, values_BQGP, position_BQ)

    def _write(self, keys_BQGP: Tensor, values_BQGP: Tensor, position_BQ: Tensor) -> None:
        assert self.keys is not None
        assert self.values is not None
        request_B1 = torch.arange(len(position_BQ), device=position_BQ.device)[:, None]
        self.keys[request_B1, :, position_BQ] = keys_BQGP
        self.values[request_B1, :, position_BQ] = values_BQGP

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.used, 0

    def get_seq_length(self) -> int:
        return self.used

    def get_max_length(self) -> int:
        return self.max_length


class HFTarget:
    """Implements `protocols.TreeTarget` for a causal language model whose layers attend, to all or through a window.

    Raises:
        InputError: A layer of the model keeps a state instead, which no rejected draft token can be taken out of.
        GateError: When first started: see `check_logits`.
    """

    def __init__(self, model: Any, aux_layers: list[int], role: str = "target"):
        """`role`: what the model is called in errors."""
        self.config = model.config.get_text_config()
        if not keeps_positions(self.config):
            kinds = ", ".join(sorted(layer_kinds(self.config)))
            raise InputError(
                f"{role}: a {model.config.model_type} ({kinds}) keeps a state instead of keys and values by position; "
                f"this loop cannot take rejected draft tokens back from it"
            )
        self.model = model
        self.recorder = StateRecorder(model, aux_layers)
        self.layers: list[PositionedLayer] = []
        self.is_checked = False

    def start(self, prompts: list[list[int]], max_length: int) -> TargetPass:
        device = self.model.device
        # before the prompts run: this pass leaves states of its own
        longest = max(range(len(prompts)), key=lambda number: len(prompts[number]))
        own_V = None if self.is_checked else own_logits(self.model, prompts[longest])
        self.reserve(max_length)
        width = max(len(ids) for ids in prompts)
        tokens_BQ = torch.tensor([ids + [0] * (width - len(ids)) for ids in prompts], device=device)
        position_BQ = torch.arange(width, device=device).expand(len(prompts), -1)
        last_B = torch.tensor([len(ids) - 1 for ids in prompts], device=device)
        logits_B1V = self.run(tokens_BQ, position_BQ, row_B=last_B)
        if own_V is not None:
            check_logits(self.model, logits_B1V[longest, 0], own_V)
            self.is_checked = True
        return self._with_states(logits_B1V)

    def step(self, tokens_BQ: Tensor, position_BQ: Tensor) -> TargetPass:
        return self._with_states(self.run(tokens_BQ, position_BQ))

    def reserve(self, max_length: int) -> None:
        """Forget everything and make room for requests of so many tokens."""
        self.layers = [PositionedLayer(max_length) for _ in range(self.recorder.last_id)]
        self.cache = Cache(layers=list(self.layers))

    def run(
        self, tokens_BQ: Tensor, position_BQ: Tensor, row_B: Tensor | None = None, decoder: nn.Module | None = None
    ) -> Tensor:
        """Run tokens at the given positions, writing the cache there.

        Args:
            tokens_BQ: Token ids.
            position_BQ: Their positions; a token sees all of the cache up to its own.
            row_B: The one token of each request whose logits are wanted; None for all.
            decoder: Run this stack over the same cache, such as one with fewer layers.

        Returns:
            Logits [B, Q, V]; [B, 1, V] with `row_B`.
        """
        used = int(position_BQ.max()) + 1
        for layer in self.layers:
            layer.position_BQ, layer.used = position_BQ, used
        masks = attention_masks(self.config, position_BQ, used, self.model.dtype)
        return self._logits(tokens_BQ, position_BQ, masks, row_B, decoder)

    def select(self, rows: Tensor) -> None:
        for layer in self.layers:
            assert layer.keys is not None
            assert layer.values is not None
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]

    def step_tree(self, tokens_BM: Tensor, known_B: Tensor, visible_BMM: Tensor) -> TargetPass:
        for layer in self.layers:
            layer.in_tree = True
        position_BM = known_B[:, None] + tree_depth(visible_BMM)
        if not runs_trees(self.config, int(position_BM.max()) + 1):
            raise InputError(NO_TREES)
        caches = TreeCaches(layers=self.layers, length_B=known_B)
        try:
            with tree_attention_in(self.model, self.recorder.decoder):
                logits_BMV = self._logits(tokens_BM, position_BM, visible_BMM[:, None], tree_caches=caches)
                return self._with_states(logits_BMV)
        finally:
            for layer in self.layers:
                layer.in_tree = False

    def keep_path(self, row_BQ: Tensor, position_BQ: Tensor) -> None:
        with torch.inference_mode():
            for layer in self.layers:
                layer.keep(row_BQ, position_BQ)

    def _with_states(self, logits_BQV: Tensor) -> TargetPass:
        return TargetPass(logits_BQV=logits_BQV, aux_BQAD=self.recorder.aux(), last_BQD=self.recorder.last())

    def _logits(
        self,
        tokens_BQ: Tensor,
        position_BQ: Tensor,
        mask: Tensor | dict[str, Tensor],
        row_B: Tensor | None = None,
        decoder: nn.Module | None = None,
        **kwargs: Any,
    ) -> Tensor:
        run = self.recorder.decoder if decoder is None else decoder
        with torch.inference_mode():
            hidden_BQD = run(
                input_ids=tokens_BQ,
                position_ids=position_BQ,
                attention_mask=mask,
                past_key_values=self.cache,
                use_cache=True,
                **kwargs,
            ).last_hidden_state
            if row_B is not None:
                hidden_BQD = hidden_BQD[torch.arange(len(row_B)), row_B][:, None]
            logits_BQV: Tensor = self.model.lm_head(hidden_BQD)
        return logits_BQV
