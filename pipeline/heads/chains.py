"""Draft chains in training: which slots a step runs, what it is held against, which chains are still right.

The same for every head: slot i at step j predicts x[i+2+j] and is compared with what the target wrote there.

Shapes: T packed tokens, D hidden, U draft vocabulary, K draft steps, R rows of one step.
"""

from dataclasses import replace

import torch
from drafthead.kernels.linear_soft_ce.reference import TargetStates
from drafthead.pipeline.heads.base import DraftLMHead, FrozenTarget, HeadBatch, HeadOutput, Objective
from torch import Tensor

ROW_MULTIPLE = 16
"""oneDNN compiles a kernel for every new number of rows; with few different numbers it finds them in its cache."""


def padded_rows(index_R: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat the last index up to a multiple of `ROW_MULTIPLE`; also says which are real. No rows stay no rows.

    Measured on two CPU cores: see docs/log.md.
    """
    missing = -len(index_R) % ROW_MULTIPLE
    real_R = torch.arange(len(index_R) + missing, device=index_R.device) < len(index_R)
    return torch.cat([index_R, index_R[-1:].expand(missing)]), real_R


class Chains:
    """One draft chain from every supervised slot of a pack, scored step by step.

        chains = Chains(batch, target, objective)
        for step in range(objective.depth):
            if step:
                kept = chains.advance()      # the rows of the step before that go on
            chains.score(lm_head, out_RD)    # one row of `out` for each of chains.row_R
        return chains.output()

    Attributes:
        row_R: Slots that the present step runs, ascending; the last one is repeated as padding.
    """

    def __init__(self, batch: HeadBatch, target: FrozenTarget, objective: Objective):
        self.batch, self.target, self.objective = batch, target, objective
        depth, context_weight = objective.depth, objective.context_weight
        self.mask_KT = batch.step_masks(depth)
        self.loss_KT = batch.step_masks(depth, with_context=True) if context_weight else self.mask_KT
        self.row_R, self.real_R = padded_rows(self.loss_KT[0].nonzero().squeeze(-1))
        assert len(self.row_R), "every document has a supervised slot (MaskGate)"
        self.step = 0
        device = self.row_R.device
        self.survived_TK = torch.zeros(len(batch.tokens_T), depth, dtype=torch.bool, device=device)
        self.total = torch.zeros((), device=device)
        self.losses: list[Tensor] = []
        self.overlaps: list[Tensor] = []

    def advance(self) -> Tensor:
        """Go to the next step; returns which of the present rows take part in it [R']."""
        self.step += 1
        wanted_R = self.loss_KT[self.step, self.row_R] & self.real_R
        if self.objective.only_surviving:
            wanted_R = wanted_R & self.alive_R
        kept, self.real_R = padded_rows(wanted_R.nonzero().squeeze(-1))
        self.row_R = self.row_R[kept]
        return kept

    def score(self, lm_head: DraftLMHead, out_RD: Tensor) -> None:
        """Take the step's losses and hits; the target's distribution is computed in the dtype of `out_RD`."""
        step, row_R, objective = self.step, self.row_R, self.objective
        if step == 0:
            self._read_targets(out_RD.dtype)
        if self.target.is_restricted:  # `train.loss_vocab`: these rows of the frozen lm_head
            lm_head = DraftLMHead.of(self.target.lm_head_UD)
        predicted_R = self.lookup_T[row_R + step]
        supervised_R = self.mask_KT[step, row_R]
        weight_R = torch.where(supervised_R, 1.0, objective.context_weight) * self.real_R
        wanted = replace(self.states, state_RE=self.states.state_RE[predicted_R])
        label_R = self.label_R[predicted_R]
        loss, _, alive_R, overlap_R = lm_head(out_RD, wanted, weight_R, label_R, objective.loss)
        self.total = self.total + objective.step_weight**step * loss
        self.losses.append(loss.detach())
        self.overlaps.append(overlap_R[supervised_R & self.real_R].sum())
        self.alive_R = alive_R & self.survived_TK[row_R, step - 1] if step else alive_R
        self.survived_TK[row_R[self.real_R], step] = self.alive_R[self.real_R]

    def output(self) -> HeadOutput:
        return HeadOutput(
            loss=self.total,
            loss_K=torch.stack(self.losses),
            rows_K=self.mask_KT.sum(1),
            survived_K=(self.survived_TK & self.mask_KT.T).sum(0),
            survived_TK=self.survived_TK,
            overlap_K=torch.stack(self.overlaps),
        )

    def _read_targets(self, dtype: torch.dtype) -> None:
        """Data tokens and target distributions that the first step's slots predict, computed once for all steps.

        The later steps of a slot are the first ones of slots behind it, which are all among them.
        """
        row_R, batch = self.row_R, self.batch
        self.lookup_T = torch.full((len(batch.tokens_T),), -1, dtype=torch.long, device=row_R.device)
        self.lookup_T[row_R] = torch.arange(len(row_R), device=row_R.device)
        with torch.no_grad():
            self.states: TargetStates = self.target.distribution(batch.last_TD[row_R + 1], dtype)
        self.label_R = self.target.draft_ids_V[batch.tokens_T[row_R + 2]]
