"""Heads of one decoder layer that is applied to its own output: their training-time test, cache and drafter.

EAGLE-3 and MTP layers differ in what they read and feed back (`fuse`, `enter`, `leave`); which token meets which state,
which keys a draft step sees and how a chain is scored is the same (vllm/v1/spec_decode/llm_base_proposer.py; Li et al.
2025 for the training).
"""

from abc import abstractmethod
from dataclasses import replace

import torch
from drafthead.eval.protocols import TargetPass
from drafthead.kernels.linear_soft_ce.reference import TargetStates
from drafthead.pipeline.heads.base import FrozenTarget, Head, HeadBatch, HeadOutput, Objective
from drafthead.pipeline.heads.blocks import Attention, cached_attention, unroll_attention
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
        attention, depth, context_weight = self.attention, objective.depth, objective.context_weight
        embedding_TD = target.embed(batch.tokens_T)
        slot_T, _ = padded_rows(torch.arange(len(batch.tokens_T), device=batch.tokens_T.device))
        fused_TD = self.fuse(batch.aux_TAD[slot_T], batch.last_TD[slot_T], target)
        position_T = batch.position_T[slot_T]
        x_TI, residual_TD = self.enter(embedding_TD.roll(-1, 0)[slot_T], fused_TD, position_T)
        base = attention.keys_values(x_TI, position_T)

        mask_KT = batch.step_masks(depth)
        loss_KT = batch.step_masks(depth, with_context=True) if context_weight else mask_KT
        row_R, real_R = padded_rows(loss_KT[0].nonzero().squeeze(-1))
        assert len(row_R), "every document has a supervised slot (MaskGate)"
        label_R, states, lookup_T = self._targets(batch, target, row_R, fused_TD.dtype)
        survived_TK = torch.zeros(len(batch.tokens_T), depth, dtype=torch.bool, device=row_R.device)
        sums: list[Tensor] = []
        overlaps: list[Tensor] = []
        total = torch.zeros((), device=row_R.device)
        own: list[tuple[Tensor, Tensor]] = []
        state_RD = alive_R = None
        x_RI, residual_RD = x_TI[row_R], residual_TD[row_R]
        for step in range(depth):
            if step:
                wanted_R = loss_KT[step, row_R] & real_R
                if objective.only_surviving and alive_R is not None:
                    wanted_R = wanted_R & alive_R
                kept, real_R = padded_rows(wanted_R.nonzero().squeeze(-1))
                row_R, state_RD = row_R[kept], state_RD[kept]  # type: ignore[index]
                own = [(keys[kept], values[kept]) for keys, values in own]
                position_R = batch.position_T[row_R] + step
                x_RI, residual_RD = self.enter(embedding_TD[row_R + 1 + step], state_RD, position_R)
                own.append(attention.keys_values(x_RI, position_R))
            query = attention.queries(x_RI, batch.position_T[row_R] + step)
            mixed = unroll_attention(query, base, own, batch.documents, row_R)
            out, state_RD = self.leave(residual_RD, attention.output(mixed, x_RI))
            predicted = lookup_T[row_R + step]
            weight_R = torch.where(mask_KT[step, row_R], 1.0, context_weight) * real_R
            wanted = replace(states, state_RE=states.state_RE[predicted])
            step_loss, _, alive_R, overlap_R = self.lm_head(out, wanted, weight_R, label_R[predicted], objective.loss)
            total = total + objective.step_weight**step * step_loss
            sums.append(step_loss.detach())
            overlaps.append(overlap_R[mask_KT[step, row_R] & real_R].sum())
            if step:
                alive_R = alive_R & survived_TK[row_R, step - 1]
            survived_TK[row_R[real_R], step] = alive_R[real_R]
        return HeadOutput(
            loss=total,
            loss_K=torch.stack(sums),
            rows_K=mask_KT.sum(1),
            survived_K=(survived_TK & mask_KT.T).sum(0),
            survived_TK=survived_TK,
            overlap_K=torch.stack(overlaps),
        )

    def _targets(
        self, batch: HeadBatch, target: FrozenTarget, row_R: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, TargetStates, Tensor]:
        """Data tokens and target distributions that the supervised slots predict, computed once for all steps.

        Returns:
            The draft id of token x[i+2] (-1 where there is none) and its distribution for every slot i of `row_R`, and
            a table from slot to row.
        """
        lookup_T = torch.full((len(batch.tokens_T),), -1, dtype=torch.long, device=row_R.device)
        lookup_T[row_R] = torch.arange(len(row_R), device=row_R.device)
        with torch.no_grad():
            states = target.distribution(batch.last_TD[row_R + 1], dtype)
        return target.draft_ids_V[batch.tokens_T[row_R + 2]], states, lookup_T


ROW_MULTIPLE = 32
"""oneDNN compiles a kernel for every new number of rows; with few different numbers it finds them in its cache."""


def padded_rows(index_R: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat the last index up to a multiple of `ROW_MULTIPLE`; also says which are real. No rows stay no rows.

    Measured on two CPU cores: see docs/log.md.
    """
    missing = -len(index_R) % ROW_MULTIPLE
    real_R = torch.arange(len(index_R) + missing, device=index_R.device) < len(index_R)
    return torch.cat([index_R, index_R[-1:].expand(missing)]), real_R


class DraftCache:
    """Keys and values of a batch of drafts, indexed by position: writing again is the roll-back."""

    def __init__(self, head: RecursiveHead, batch_size: int, max_length: int):
        attention = head.attention
        weight = attention.k_proj.weight
        shape = (batch_size, max_length, attention.num_kv_heads, attention.head_dim)
        self.keys_BLGP = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self.values_BLGP = torch.zeros_like(self.keys_BLGP)

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

    def __init__(self, head: RecursiveHead, frozen: FrozenTarget):
        self.head = head
        self.frozen = frozen
        self.dtype = head.attention.k_proj.weight.dtype

    def start(self, batch_size: int, max_length: int) -> None:
        self.cache = DraftCache(self.head, batch_size, max_length)

    def observe(self, next_BQ: Tensor, states: TargetPass, position_BQ: Tensor, count_B: Tensor) -> None:
        with torch.inference_mode():
            batch, queries = next_BQ.shape
            aux_RAD, last_RD = states.aux_BQAD.flatten(0, 1), states.last_BQD.flatten(0, 1)
            fused = self.head.fuse(aux_RAD, last_RD, self.frozen).unflatten(0, (batch, queries))
            out, state = decode_step(self.head, self.cache, self._embed(next_BQ), fused, position_BQ)
            rows, last_B = torch.arange(batch, device=next_BQ.device), count_B - 1
            self.out_BD, self.state_BD = out[rows, last_B], state[rows, last_B]
            self.position_B = position_BQ[rows, last_B]

    def draft(self, k: int) -> Tensor:
        tokens = []
        out_BD, state_BD, position_B = self.out_BD, self.state_BD, self.position_B
        with torch.inference_mode():
            for step in range(k):
                token_B = self.frozen.target_ids_U[self.head.lm_head(out_BD).argmax(-1)]
                tokens.append(token_B)
                if step + 1 < k:
                    position_B = position_B + 1
                    embedded = self._embed(token_B[:, None])
                    out, state = decode_step(self.head, self.cache, embedded, state_BD[:, None], position_B[:, None])
                    out_BD, state_BD = out[:, 0], state[:, 0]
        return torch.stack(tokens, 1)

    def select(self, rows: Tensor) -> None:
        self.cache.select(rows)
        self.out_BD, self.state_BD = self.out_BD[rows], self.state_BD[rows]
        self.position_B = self.position_B[rows]

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.frozen.embed(tokens).to(self.dtype)
