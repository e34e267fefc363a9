"""The EAGLE-3 head: vLLM's forward pass, and its training-time test (Li et al. 2025).

The arithmetic is that of vllm/model_executor/models/llama_eagle3.py, the pairing of tokens and states that of
vllm/v1/spec_decode/llm_base_proposer.py:

    g   = fc(cat(aux))                                              once per target token
    n   = hidden_norm(g);  res = n if norm_before_residual else g
    a   = Attention(cat[input_layernorm(embed(x[i+1])), n])
    pre = res + a + MLP(post_attention_layernorm(res + a));  out = norm(pre)
    logits = lm_head(out);  the next step's g is pre (out if norm_output)

Parameters are named as vLLM's plain checkpoint layout names them.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from drafthead.kernels.linear_soft_ce.reference import TargetStates
from drafthead.pipeline.heads.base import DraftLMHead, FrozenTarget, HeadBatch, HeadOutput
from drafthead.pipeline.heads.blocks import Attention, GatedMLP, RMSNorm, cached_attention, unroll_attention
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Eagle3Options:
    """What the exported configuration must repeat."""

    num_aux: int
    draft_vocab_size: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


class Eagle3Layer(nn.Module):
    """The one decoder layer; its attention reads token and state side by side."""

    def __init__(self, config: Any):
        super().__init__()
        size, eps = int(config.hidden_size), float(config.rms_norm_eps)
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = Attention(config, 2 * size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = GatedMLP(size, int(config.intermediate_size))


class Eagle3(nn.Module):
    """An EAGLE-3 head for a Llama-shaped target configuration."""

    def __init__(self, config: Any, options: Eagle3Options):
        super().__init__()
        size, eps = int(config.hidden_size), float(config.rms_norm_eps)
        self.options = options
        if options.norm_before_fc:
            self.input_norm = RMSNorm(options.num_aux * size, eps)
        if options.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(size, eps) for _ in range(options.num_aux))
        self.fc = nn.Linear(options.num_aux * size, size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(size, eps)
        self.lm_head = DraftLMHead(options.draft_vocab_size, size)

    # ---- the forward pass in three parts, shared by training and decoding

    def fuse(self, aux_RAD: Tensor) -> Tensor:
        """g of each position from its captured states."""
        x = aux_RAD.flatten(1)
        if self.options.norm_before_fc:
            x = self.input_norm(x)
        if self.options.fc_norm:
            chunks = x.chunk(self.options.num_aux, -1)
            x = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], -1)
        fused: Tensor = self.fc(x)
        return fused

    def enter(self, embedding_RD: Tensor, state_RD: Tensor) -> tuple[Tensor, Tensor]:
        """Input of the attention [R, 2D], and the residual [R, D]."""
        normed = self.midlayer.hidden_norm(state_RD)
        residual = normed if self.options.norm_before_residual else state_RD
        return torch.cat([self.midlayer.input_layernorm(embedding_RD).to(normed.dtype), normed], -1), residual

    def leave(self, residual_RD: Tensor, attention_RX: Tensor) -> tuple[Tensor, Tensor]:
        """`out` (for the logits) and the state fed back to the next draft step."""
        layer = self.midlayer
        middle = residual_RD + layer.self_attn.o_proj(attention_RX)
        pre = middle + layer.mlp(layer.post_attention_layernorm(middle))
        out = self.norm(pre)
        return out, out if self.options.norm_output else pre

    # ---- training

    def forward(
        self,
        batch: HeadBatch,
        target: FrozenTarget,
        *,
        depth: int,
        loss: str,
        step_weight: float,
        only_surviving: bool = False,
        context_weight: float = 0.0,
    ) -> HeadOutput:
        """Unroll `depth` draft steps from every supervised slot.

        Only slots that a loss needs run through the layer; context slots give their step-0 keys and values, as in
        serving. Every step is teacher-forced: its token is the data's.

        Args:
            only_surviving: Drop a slot from the later steps once its chain has missed, as serving does.
            context_weight: Weight of slots that predict a context token; they are in no count of the output.
        """
        attention = self.midlayer.self_attn
        embedding_TD = target.embed(batch.tokens_T)
        slot_T, _ = padded_rows(torch.arange(len(batch.tokens_T), device=batch.tokens_T.device))
        fused_TD = self.fuse(batch.aux_TAD[slot_T].to(self.fc.weight.dtype))
        x_TI, residual_TD = self.enter(embedding_TD.roll(-1, 0)[slot_T], fused_TD)
        base = attention.keys_values(x_TI, batch.position_T[slot_T])

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
                if only_surviving and alive_R is not None:
                    wanted_R = wanted_R & alive_R
                kept, real_R = padded_rows(wanted_R.nonzero().squeeze(-1))
                row_R, state_RD = row_R[kept], state_RD[kept]  # type: ignore[index]
                own = [(keys[kept], values[kept]) for keys, values in own]
                x_RI, residual_RD = self.enter(embedding_TD[row_R + 1 + step], state_RD)
                own.append(attention.keys_values(x_RI, batch.position_T[row_R] + step))
            query = attention.queries(x_RI, batch.position_T[row_R] + step)
            mixed = unroll_attention(query, base, own, batch.documents, row_R)
            out, state_RD = self.leave(residual_RD, mixed)
            predicted = lookup_T[row_R + step]
            weight_R = torch.where(mask_KT[step, row_R], 1.0, context_weight) * real_R
            wanted = replace(states, state_RE=states.state_RE[predicted])
            step_loss, _, alive_R, overlap_R = self.lm_head(out, wanted, weight_R, label_R[predicted], loss)
            total = total + step_weight**step * step_loss
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


class Eagle3Cache:
    """Keys and values of a batch of drafts, indexed by position: writing again is the roll-back."""

    def __init__(self, head: Eagle3, batch_size: int, max_length: int):
        attention = head.midlayer.self_attn
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
    head: Eagle3, cache: Eagle3Cache, embedding_BQD: Tensor, state_BQD: Tensor, position_BQ: Tensor
) -> tuple[Tensor, Tensor]:
    """One forward pass over new slots, writing their keys first.

    Args:
        embedding_BQD: Embeddings of the slots' tokens.
        state_BQD: `fuse`d target states, or the fed-back states of the step before.
        position_BQ: Their positions; a slot sees all cache entries up to its own position.

    Returns:
        `out` and the fed-back state, both [B, Q, D].
    """
    attention = head.midlayer.self_attn
    batch, queries = position_BQ.shape
    flat_position = position_BQ.flatten()
    x_RI, residual_RD = head.enter(embedding_BQD.flatten(0, 1), state_BQD.flatten(0, 1))
    keys, values = attention.keys_values(x_RI, flat_position)
    cache.write(position_BQ, keys.unflatten(0, (batch, queries)), values.unflatten(0, (batch, queries)))
    length = int(position_BQ.max()) + 1
    visible = torch.arange(length, device=position_BQ.device) <= position_BQ[..., None]
    query = attention.queries(x_RI, flat_position).unflatten(0, (batch, queries))
    mixed = cached_attention(query, cache.keys_BLGP[:, :length], cache.values_BLGP[:, :length], visible)
    out, state = head.leave(residual_RD, mixed.flatten(0, 1))
    return out.unflatten(0, (batch, queries)), state.unflatten(0, (batch, queries))


# ---- initialisation --------------------------------------------------------------------------------------

EMBEDDING_SHARE = 0.5


def initialise_from_target(head: Eagle3, last_layer: dict[str, Tensor], norm_D: Tensor, lm_head_UD: Tensor) -> None:
    """Start from the target's last layer, final norm and lm_head rows; fc passes the last aux state through.

    The half of q/k/v that reads the token's embedding starts at half of what reads the state; at zero the head is
    slower to use the token (docs/log.md).
    """
    size = head.fc.out_features
    layer = head.midlayer
    with torch.no_grad():
        head.fc.weight.zero_()
        head.fc.weight[:, -size:].copy_(torch.eye(size))
        for name, parameter in layer.named_parameters():
            if name in ("input_layernorm.weight", "hidden_norm.weight"):
                parameter.copy_(last_layer["input_layernorm.weight"])
            elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                parameter[:, :size].copy_(last_layer[name]).mul_(EMBEDDING_SHARE)
                parameter[:, size:].copy_(last_layer[name])
            elif name in last_layer:
                parameter.copy_(last_layer[name])
        head.norm.weight.copy_(norm_D)
        head.lm_head.weight.copy_(lm_head_UD)
