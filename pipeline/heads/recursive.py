"""Heads of one decoder layer that is applied to its own output: their training-time test, cache and drafter.

EAGLE-3 and MTP layers differ in what they read and feed back (`fuse`, `enter`, `leave`); which token meets which state,
which keys a draft step sees and how a chain is scored is the same (vllm/v1/spec_decode/llm_base_proposer.py; Li et al.
2025 for the training).
"""

from abc import abstractmethod
from collections.abc import Callable

import torch
from drafthead.eval.protocols import TargetPass
from drafthead.eval.tree_search import TreeShape
from drafthead.pipeline.heads.base import FrozenTarget, Head, HeadBatch, HeadOutput, Objective, rank_with_confidence
from drafthead.pipeline.heads.blocks import Attention, cached_attention
from drafthead.pipeline.heads.chains import Chains, padded_rows
from drafthead.pipeline.heads.unroll_attention import unroll_attention
from torch import Tensor


class RecursiveHead(Head):
    """One attention layer over pairs of a token and a state; its own state is fed back at every draft step."""

    # ---- the forward pass in its parts, shared by training and decoding

    @property
    @abstractmethod
    def attention(self) -> Attention:
        """The layer's attention."""

    @abstractmethod
    def fuse(self, aux_RAD: Tensor, last_RD: Tensor, target: FrozenTarget) -> Tensor:
        """State [R, D] of each position from the target's: captured ones, and the one before the final norm."""

    @abstractmethod
    def enter(self, embedding_RD: Tensor, state_RD: Tensor, position_R: Tensor) -> tuple[Tensor, Tensor]:
        """Input of the attention [R, I], and the residual [R, D]."""

    @abstractmethod
    def leave(self, residual_RD: Tensor, attention_RD: Tensor) -> tuple[Tensor, Tensor]:
        """What the lm_head reads, and the state fed back to the next draft step."""

    def drafter(self, frozen: FrozenTarget) -> "RecursiveDrafter":
        return RecursiveDrafter(self, frozen)

    def inverse_frequencies(self) -> list[float]:
        found: list[float] = self.attention.rotary.inverse.tolist()
        return found

    # ---- training

    def forward(self, batch: HeadBatch, target: FrozenTarget, objective: Objective) -> HeadOutput:
        """Unroll `depth` draft steps from every supervised slot.

        Only slots that a loss needs run through the layer; context slots give their step-0 keys and values, as in
        serving. Every step is teacher-forced: its token is the data's.
        """
        attention, chains = self.attention, Chains(batch, target, objective)
        embedding_TD = target.embed(batch.tokens_T)
        slot_T, _ = padded_rows(torch.arange(len(batch.tokens_T), device=batch.tokens_T.device))
        fused_TD = self.fuse(batch.aux_TAD[slot_T], batch.last_TD[slot_T], target)
        position_T = batch.position_T[slot_T]
        x_TI, residual_TD = self.enter(embedding_TD.roll(-1, 0)[slot_T], fused_TD, position_T)
        base = attention.keys_values(x_TI, position_T)

        own: list[tuple[Tensor, Tensor]] = []
        state_RD = fused_TD
        x_RI, residual_RD = x_TI[chains.row_R], residual_TD[chains.row_R]
        for step in range(objective.depth):
            if step:
                kept = chains.advance()
                own = [(keys[kept], values[kept]) for keys, values in own]
                position_R = batch.position_T[chains.row_R] + step
                x_RI, residual_RD = self.enter(embedding_TD[chains.row_R + 1 + step], state_RD[kept], position_R)
                own.append(attention.keys_values(x_RI, position_R))
            query = attention.queries(x_RI, batch.position_T[chains.row_R] + step)
            mixed = unroll_attention(query, base, own, batch.documents, chains.row_R)
            out, state_RD = self.leave(residual_RD, attention.output(mixed, x_RI))
            chains.score(self.lm_head, out)
        return chains.output()


class DraftCache:
    """Keys and values of a batch of drafts, indexed by position: writing again is the roll-back."""

    def __init__(self, head: RecursiveHead, batch_size: int, max_length: int):
        attention = head.attention
        weight = attention.o_proj.weight
        shape = (batch_size, max_length, attention.num_kv_heads)
        self.keys_BLGP = weight.new_zeros(*shape, attention.head_dim)
        self.values_BLGP = weight.new_zeros(*shape, attention.value_dim)

    def write(self, position_BQ: Tensor, keys_BQGP: Tensor, values_BQGP: Tensor) -> None:
        rows = torch.arange(len(position_BQ), device=position_BQ.device)[:, None]
        self.keys_BLGP[rows, position_BQ] = keys_BQGP
        self.values_BLGP[rows, position_BQ] = values_BQGP

    def select(self, rows: Tensor) -> None:
        """Keep only these requests."""
        self.keys_BLGP, self.values_BLGP = self.keys_BLGP[rows], self.values_BLGP[rows]


def decode_step(
    head: RecursiveHead, cache: DraftCache, embedding_BQD: Tensor, state_BQD: Tensor, position_BQ: Tensor
) -> tuple[Tensor, Tensor]:
    """One forward pass over new slots, writing their keys first.

    Args:
        embedding_BQD: Embeddings of the slots' tokens.
        state_BQD: `fuse`d target states, or the fed-back states of the step before.
        position_BQ: Their positions; a slot sees all cache entries up to its own position.

    Returns:
        `out` and the fed-back state, both [B, Q, D].
    """
    attention = head.attention
    batch, queries = position_BQ.shape
    flat_position = position_BQ.flatten()
    x_RI, residual_RD = head.enter(embedding_BQD.flatten(0, 1), state_BQD.flatten(0, 1), flat_position)
    keys, values = attention.keys_values(x_RI, flat_position)
    cache.write(position_BQ, keys.unflatten(0, (batch, queries)), values.unflatten(0, (batch, queries)))
    length = int(position_BQ.max()) + 1
    visible = torch.arange(length, device=position_BQ.device) <= position_BQ[..., None]
    query = attention.queries(x_RI, flat_position).unflatten(0, (batch, queries))
    mixed = cached_attention(query, cache.keys_BLGP[:, :length], cache.values_BLGP[:, :length], visible)
    out, state = head.leave(residual_RD, attention.output(mixed.flatten(0, 1), x_RI))
    return out.unflatten(0, (batch, queries)), state.unflatten(0, (batch, queries))


class RecursiveDrafter:
    """Drafts greedily, as vLLM does by default; every observed slot is fed with the target's true state."""

    # as deep as a recipe allows; the layer itself could go on
    max_depth = 16

    def __init__(self, head: RecursiveHead, frozen: FrozenTarget):
        self.head = head
        self.frozen = frozen
        self.dtype = head.attention.o_proj.weight.dtype

    def start(self, prompts: list[list[int]], max_length: int) -> None:
        self.cache = DraftCache(self.head, len(prompts), max_length)

    def observe(self, next_BQ: Tensor, states: TargetPass, position_BQ: Tensor, count_B: Tensor) -> None:
        with torch.inference_mode():
            batch, queries = next_BQ.shape
            aux_RAD, last_RD = states.aux_BQAD.flatten(0, 1), states.last_BQD.flatten(0, 1)
            fused = self.head.fuse(aux_RAD, last_RD, self.frozen).unflatten(0, (batch, queries))
            out, state = decode_step(self.head, self.cache, self.embed(next_BQ), fused, position_BQ)
            rows, last_B = torch.arange(batch, device=next_BQ.device), count_B - 1
            self.out_BD, self.state_BD = out[rows, last_B], state[rows, last_B]
            self.position_B = position_BQ[rows, last_B]

    def draft(self, k: int) -> Tensor:
        tokens: list[Tensor] = []

        def most_likely(out_BD: Tensor) -> Tensor:
            tokens.append(self._top(out_BD, 1)[:, 0])
            return tokens[-1]

        self._unroll(k, most_likely)
        return torch.stack(tokens, 1)

    def rank_tokens(self, given_BK: Tensor, count: int) -> Tensor:
        ranked: list[Tensor] = []

        def given(out_BD: Tensor) -> Tensor:
            ranked.append(self._top(out_BD, count))
            return given_BK[:, len(ranked) - 1]

        self._unroll(given_BK.shape[1], given)
        return torch.stack(ranked, 1)

    def draft_tree(self, shape: TreeShape) -> Tensor:
        """Depth by depth: the nodes that have children are run together, each seeing its own path."""
        device = self.position_B.device
        parent_N, head_N, rank_N = (
            torch.tensor(one, device=device) for one in (shape.parents, shape.heads, shape.ranks)
        )
        batch = len(self.out_BD)
        token_BN = parent_N.new_empty(batch, shape.num_nodes)
        row_M = parent_N.new_zeros(shape.num_nodes + 1)  # of the root, then of the nodes that were run
        tree, out_BQD = RecursiveTree(self), self.out_BD[:, None]
        with torch.inference_mode():
            for head in range(shape.depth):
                node_X = (head_N == head).nonzero()[:, 0]
                above_Q, place_X = parent_N[node_X].unique(return_inverse=True)
                if head:
                    row_M[above_Q + 1] = tree.num_rows + torch.arange(len(above_Q), device=device)
                    out_BQD = tree.run(row_M[parent_N[above_Q] + 1].expand(batch, -1), token_BN[:, above_Q])
                top_BQR = self._top(out_BQD, int(rank_N[node_X].max()) + 1)
                token_BN[:, node_X] = top_BQR[:, place_X, rank_N[node_X]]
        return token_BN

    def open_tree(self) -> "RecursiveTree":
        return RecursiveTree(self)

    def _unroll(self, k: int, choose: Callable[[Tensor], Tensor]) -> None:
        """Run k draft steps; `choose` gives the token [B] of a step for what its lm_head reads [B, D]."""
        out_BD, state_BD, position_B = self.out_BD, self.state_BD, self.position_B
        with torch.inference_mode():
            for step in range(k):
                token_B = choose(out_BD)
                if step + 1 < k:
                    position_B = position_B + 1
                    embedded = self.embed(token_B[:, None])
                    out, state = decode_step(self.head, self.cache, embedded, state_BD[:, None], position_B[:, None])
                    out_BD, state_BD = out[:, 0], state[:, 0]

    def _top(self, out: Tensor, count: int) -> Tensor:
        """The most likely tokens [..., R] for what the lm_head reads, at most as many as the head can draft."""
        logits = self.head.lm_head(out)
        best = logits.argmax(-1, keepdim=True) if count == 1 else logits.topk(min(count, logits.shape[-1]), -1).indices
        return self.frozen.target_ids_U[best]

    def select(self, rows: Tensor) -> None:
        self.cache.select(rows)
        self.out_BD, self.state_BD = self.out_BD[rows], self.state_BD[rows]
        self.position_B = self.position_B[rows]

    def embed(self, tokens: Tensor) -> Tensor:
        return self.frozen.embed(tokens).to(self.dtype)


class RecursiveTree:
    """Implements `protocols.GrowingTree`: states, keys and values of its rows, beside the drafter's cache.

    Row 0 is the root: the last observed slot, whose keys the cache holds.
    """

    def __init__(self, drafter: RecursiveDrafter):
        self.drafter, self.head, self.cache = drafter, drafter.head, drafter.cache
        batch, device = len(drafter.state_BD), drafter.position_B.device
        length = int(drafter.position_B.max()) + 1
        self.cached_BL = torch.arange(length, device=device) <= drafter.position_B[:, None]
        self.state_BMD = drafter.state_BD[:, None]
        # of the rows themselves: the root is seen in the cache
        self.visible_BMM = torch.zeros(batch, 1, 1, dtype=torch.bool, device=device)
        keys_BLGP, values_BLGP = self.cache.keys_BLGP, self.cache.values_BLGP
        self.keys_BMGP = keys_BLGP.new_zeros(batch, 1, *keys_BLGP.shape[2:])
        self.values_BMGP = values_BLGP.new_zeros(batch, 1, *values_BLGP.shape[2:])

    @property
    def num_rows(self) -> int:
        return self.state_BMD.shape[1]

    def first(self, count: int) -> tuple[Tensor, Tensor]:
        return self._ranked(self.drafter.out_BD[:, None], count)

    def deeper(self, parent_BQ: Tensor, token_BQ: Tensor, count: int) -> tuple[Tensor, Tensor]:
        return self._ranked(self.run(parent_BQ, token_BQ), count)

    def run(self, parent_BQ: Tensor, token_BQ: Tensor) -> Tensor:
        """One forward pass over new rows whose parents are rows already; they become the next rows in order.

        Returns:
            What the lm_head reads [B, Q, D].
        """
        attention, (batch, queries) = self.head.attention, parent_BQ.shape
        request_B1 = torch.arange(batch, device=parent_BQ.device)[:, None]
        own_BQQ = torch.eye(queries, dtype=torch.bool, device=parent_BQ.device).expand(batch, -1, -1)
        in_tree_BQM = torch.cat([self.visible_BMM[request_B1, parent_BQ], own_BQQ], -1)
        position_R = (self.drafter.position_B[:, None] + in_tree_BQM.sum(-1)).flatten()
        with torch.inference_mode():
            embedding_RD = self.drafter.embed(token_BQ).flatten(0, 1)
            state_RD = self.state_BMD[request_B1, parent_BQ].flatten(0, 1)
            x_RI, residual_RD = self.head.enter(embedding_RD, state_RD, position_R)
            keys, values = attention.keys_values(x_RI, position_R)
            self.keys_BMGP = torch.cat([self.keys_BMGP, keys.unflatten(0, (batch, queries))], 1)
            self.values_BMGP = torch.cat([self.values_BMGP, values.unflatten(0, (batch, queries))], 1)
            length = self.cached_BL.shape[1]
            keys_BXGP = torch.cat([self.cache.keys_BLGP[:, :length], self.keys_BMGP], 1)
            values_BXGP = torch.cat([self.cache.values_BLGP[:, :length], self.values_BMGP], 1)
            visible_BQX = torch.cat([self.cached_BL[:, None].expand(-1, queries, -1), in_tree_BQM], -1)
            query = attention.queries(x_RI, position_R).unflatten(0, (batch, queries))
            mixed = cached_attention(query, keys_BXGP, values_BXGP, visible_BQX)
            out, state = self.head.leave(residual_RD, attention.output(mixed.flatten(0, 1), x_RI))
            self.state_BMD = torch.cat([self.state_BMD, state.unflatten(0, (batch, queries))], 1)
        seen_before = torch.nn.functional.pad(self.visible_BMM, (0, queries))
        self.visible_BMM = torch.cat([seen_before, in_tree_BQM], 1)
        out_BQD: Tensor = out.unflatten(0, (batch, queries))
        return out_BQD

    def _ranked(self, out_BQD: Tensor, count: int) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            logits_BQU = self.head.lm_head(out_BQD)
        return rank_with_confidence(logits_BQU, self.drafter.frozen.target_ids_U, count)
