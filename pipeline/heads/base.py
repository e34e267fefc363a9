"""What a head is to the rest of the pipeline: the batch it is trained on, what it gives back, how it drafts.

Shapes: T packed tokens, A captured layers, D hidden, U draft vocabulary, K unroll depth, R rows of one step.
"""

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from drafthead.data.batches import Pack
from drafthead.data.store_format import LastKept
from drafthead.eval.protocols import TreeDrafter
from drafthead.kernels.linear_soft_ce.op import linear_soft_ce
from drafthead.kernels.linear_soft_ce.reference import TargetStates
from drafthead.pipeline.heads.blocks import rms_normalize
from drafthead.pipeline.recipe import ChainsKept
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class HeadBatch(Pack):
    """A pack as heads read it: slot i pairs token x[i+1] with the state of position i."""

    opening: int = 0
    """Tokens that every document begins with alike (a default system prompt): nothing is learned from them."""

    def step_masks(self, depth: int, *, with_context: bool = False) -> Tensor:
        """Slots whose draft is supervised at each step: [depth, T] bool.

        Follows the PREDICTED token: slot i at step j predicts x[i+2+j], so the slot of the last prompt token, where
        serving starts its first round, is among them. All tokens predicted before on this chain must be supervised too.

        Args:
            with_context: Take context tokens behind the common opening for supervised as well.
        """
        wanted_T = self.supervised_T
        if with_context:
            wanted_T = wanted_T | (self.position_T >= self.opening)
        ahead = torch.stack([self._look_ahead(wanted_T, 2 + step) for step in range(depth)])
        return ahead.long().cumprod(0).bool()

    def _look_ahead(self, flag_T: Tensor, distance: int) -> Tensor:
        """[T] bool: does the flag hold for the token `distance` further on in the same document?"""
        ahead_T = torch.zeros_like(flag_T)
        for start, length in self.documents:
            if length > distance:
                ahead_T[start : start + length - distance] = flag_T[start + distance : start + length]
        return ahead_T


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What a head is trained for; the fields of `TrainConfig` with the same names."""

    depth: int
    """Draft tokens ahead."""
    loss: str = "soft_ce"
    step_weight: float = 1.0
    """Step j weighs step_weight ** j."""
    chains: ChainsKept = "all"
    """Which chains go on to the later steps: see `TrainConfig.chains`."""
    context_weight: float = 0.0
    """Weight of slots that predict a context token; they are in no count of the output."""


@dataclass(kw_only=True)
class HeadOutput:
    """Sums over the rows of a micro batch; nothing is averaged before the whole step is known.

    Attributes:
        loss: sum over steps j of step_weight ** j times the summed row losses; a scalar with a gradient.
        loss_K: The summed row losses of each step, unweighted, detached.
        rows_K: How many slots each step supervised; with `chains: served`, of those where a round starts.
        run_K: How many rows each step ran.
        survived_K: For how many of them the draft tokens up to and with this step were all right
            (over the full vocabulary: a token that the draft vocabulary lacks is a miss).
        survived_TK: The same flag of each slot.
        overlap_K: Sum over the supervised slots of sum min(p, q), with p renormalised over the draft vocabulary.
    """

    loss: Tensor
    loss_K: Tensor
    rows_K: Tensor
    run_K: Tensor
    survived_K: Tensor
    survived_TK: Tensor
    overlap_K: Tensor


class FrozenTarget(nn.Module):
    """The parts of the target that a head reads and never changes: embeddings, final norm, lm_head."""

    embedding_VD: Tensor
    norm_D: Tensor
    lm_head_UD: Tensor
    target_ids_U: Tensor
    draft_ids_V: Tensor

    def __init__(self, embedding_VD: Tensor, norm_D: Tensor, lm_head_VD: Tensor, target_ids_U: Tensor, eps: float):
        """Keep the lm_head's rows of the draft vocabulary only; `target_ids_U` says which."""
        super().__init__()
        self.eps = eps
        self.is_restricted = False
        self.register_buffer("embedding_VD", embedding_VD)
        self.register_buffer("norm_D", norm_D)
        self.register_buffer("lm_head_UD", lm_head_VD[target_ids_U])
        self.register_buffer("target_ids_U", target_ids_U)
        self.register_buffer("draft_ids_V", draft_ids(target_ids_U, len(embedding_VD)))

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding_VD[tokens]

    def restricted(self, target_ids_U: Tensor) -> "FrozenTarget":
        """The same with fewer of its draft tokens; a loss over these reads `lm_head_UD` in place of the head's."""
        rows_U = self.draft_ids_V[target_ids_U]
        assert int(rows_U.min()) >= 0, "every token can be drafted"
        fewer = copy.copy(self)
        fewer._buffers = dict(self._buffers)
        fewer.is_restricted = True
        fewer.lm_head_UD = self.lm_head_UD[rows_U]
        fewer.target_ids_U = target_ids_U
        fewer.draft_ids_V = draft_ids(target_ids_U, len(self.draft_ids_V))
        return fewer

    def distribution(self, last_RD: Tensor, dtype: torch.dtype) -> TargetStates:
        """The target's distribution behind states before the final norm, as the loss takes it, in `dtype`."""
        return TargetStates(state_RE=self.normed(last_RD).to(dtype), lm_head_UE=self.lm_head_UD.to(dtype))

    def normed(self, last_RD: Tensor) -> Tensor:
        """States behind the final norm, fp32."""
        return rms_normalize(last_RD, self.norm_D, self.eps)


def draft_ids(target_ids_U: Tensor, vocab_size: int) -> Tensor:
    """Draft id of each target id [V]; -1 where there is none."""
    draft_ids_V = torch.full((vocab_size,), -1, device=target_ids_U.device)
    draft_ids_V[target_ids_U] = torch.arange(len(target_ids_U), device=target_ids_U.device)
    return draft_ids_V


def rank_with_confidence(logits_BQU: Tensor, target_ids_U: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The most likely draft tokens [B, Q, R] as target ids, and the logarithms of their draft probabilities."""
    log_q_BQU = logits_BQU.float().log_softmax(-1)
    log_q_BQR, best_BQR = log_q_BQU.topk(min(count, log_q_BQU.shape[-1]), -1)
    return target_ids_U[best_BQR], log_q_BQR


class DraftLMHead(nn.Module):
    """The draft lm_head [U, D]; its forward pass includes the loss, so that ZeRO-3 has gathered the weight."""

    def __init__(self, vocab_size: int, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))
        nn.init.normal_(self.weight, std=0.02)

    @classmethod
    def of(cls, weight_UD: Tensor) -> "DraftLMHead":
        """One that holds this very tensor and does not train it."""
        lm_head = cls(0, weight_UD.shape[1])
        lm_head.weight = nn.Parameter(weight_UD, requires_grad=False)
        return lm_head

    def forward(
        self,
        hidden_RD: Tensor,
        target: TargetStates | None = None,
        weight_R: Tensor | None = None,
        label_R: Tensor | None = None,
        loss: str = "soft_ce",
    ) -> Any:
        """Logits [R, U], or the fields of `LossRows` when a target distribution is given.

        A plain tuple, since the hooks of ZeRO-3 find no tensor inside a dataclass.
        """
        if target is None:
            return hidden_RD @ self.weight.to(hidden_RD.dtype).T
        assert weight_R is not None
        assert label_R is not None
        rows = linear_soft_ce(hidden_RD, self.weight, target, weight_R, label_R, loss)
        return rows.total, rows.argmax_R, rows.hit_R, rows.overlap_R


class Head(nn.Module, ABC):
    """A draft head: trained by `forward`, run by its `drafter`, built again from its `options`."""

    kind: str
    """`head.type` of a recipe."""
    reads_last: LastKept = "all"
    """Positions whose last state training reads; `answer`: those that predict the supervised tokens, and one before."""
    options: Any
    """A dataclass; with the target's configuration it decides the module."""
    lm_head: DraftLMHead
    """The one projection; a Medusa head with several has none of this name, and trains them all."""

    @abstractmethod
    def forward(self, batch: HeadBatch, target: FrozenTarget, objective: Objective) -> HeadOutput:
        """Draft from every supervised slot, teacher-forced, and compare with what the target wrote."""

    @abstractmethod
    def drafter(self, frozen: FrozenTarget) -> TreeDrafter:
        """This head as the speculative loop uses it."""

    def calibrate(self, last_TD: Tensor, target: FrozenTarget) -> None:
        """Fit a new head to the size of the target's states, of which these are some (before the final norm)."""

    def inverse_frequencies(self) -> list[float]:
        """Of the rotary embedding that the head is trained with; empty where it has none."""
        return []
