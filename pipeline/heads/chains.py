"""Draft chains in training: which slots a step runs, what it is held against, which chains are still right.

The same for every head: slot i at step j predicts x[i+2+j] and is compared with what the target wrote there.

Shapes: T packed tokens, D hidden, U draft vocabulary, K draft steps, R rows of one step.
"""

import random

import torch
from drafthead.kernels.linear_soft_ce.reference import TargetLogits, TargetStates
from drafthead.pipeline.heads.base import DraftLMHead, FrozenTarget, HeadBatch, HeadOutput, Objective
from torch import Tensor

ROW_MULTIPLE = 16
"""oneDNN compiles a kernel for every new number of rows; with few different numbers it finds them in its cache."""

KEPT_LOGITS = 2**25
"""Target logits of a micro batch that are kept from step to step at most, in numbers: 128 MiB in fp32."""


def keeps_logits(states: TargetStates) -> bool:
    """Whether the target's logits are computed once for all steps; on CUDA a kernel makes them anew, block by block."""
    return states.state_RE.device.type == "cpu" and len(states.state_RE) * len(states.lm_head_UE) <= KEPT_LOGITS


def padded_rows(index_R: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat the last index up to a multiple of `ROW_MULTIPLE`; also says which are real. No rows stay no rows.

    Measured on two CPU cores: see docs/log.md.
    """
    missing = -len(index_R) % ROW_MULTIPLE
    real_R = torch.arange(len(index_R) + missing, device=index_R.device) < len(index_R)
    return torch.cat([index_R, index_R[-1:].expand(missing)]), real_R


STILL_RIGHT = 0.75
"""Share of the places where the first draft of a slot is right at which a later draft of an earlier slot is too."""


def round_starts(hit_T: Tensor, slot_T: Tensor, depth: int, chance: random.Random) -> Tensor:
    """Where rounds would start if serving ran over these slots: [T] bool.

    A slot within a run of accepted drafts starts none. What the later steps would draft is not known yet, so a run goes
    on with the chance `STILL_RIGHT` where the first draft of the next slot, from the target's own state, is right.

    Args:
        hit_T: Whether the first draft of each slot is right.
        slot_T: Slots that are trained on; a gap ends an answer, and the next slot starts a round again.
        depth: Drafts of a round.
    """
    hits, starts = hit_T.tolist(), []
    due, last = 0, -2
    for slot in slot_T.nonzero().squeeze(-1).tolist():
        if slot != last + 1:
            due = slot
        last = slot
        if slot == due:
            starts.append(slot)
            accepted = 0
            while accepted < depth and hits[slot + accepted] and (not accepted or chance.random() < STILL_RIGHT):
                accepted += 1
            due = slot + accepted + 1
    starts_T = torch.zeros_like(slot_T)
    starts_T[starts] = True
    return starts_T


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
        self.run: list[Tensor] = []
        self.losses: list[Tensor] = []
        self.overlaps: list[Tensor] = []

    def advance(self) -> Tensor:
        """Go to the next step; returns which of the present rows take part in it [R']."""
        if self.step == 0 and self.objective.chains == "served":
            self._keep_rounds()
        self.step += 1
        wanted_R = self.loss_KT[self.step, self.row_R] & self.real_R
        if self.objective.chains != "all":
            wanted_R = wanted_R & self.alive_R
        kept, self.real_R = padded_rows(wanted_R.nonzero().squeeze(-1))
        self.row_R = self.row_R[kept]
        return kept

    def _keep_rounds(self) -> None:
        """Later steps go on from where a round starts alone; chosen by the tokens, so that a resumed run repeats it."""
        chance = random.Random(self.batch.checksum())
        starts_T = round_starts(self.survived_TK[:, 0], self.loss_KT[0], self.objective.depth, chance)
        self.mask_KT[1:] &= starts_T
        self.loss_KT[1:] &= starts_T

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
        wanted = self.wanted.rows(predicted_R) if step else self.wanted  # the first step's are in this very order
        label_R = self.label_R[predicted_R]
        loss, _, alive_R, overlap_R = lm_head(out_RD, wanted, weight_R, label_R, objective.loss)
        self.run.append(self.real_R.sum())
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
            run_K=torch.stack(self.run),
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
            states = self.target.distribution(batch.last_TD[row_R + 1], dtype)
            self.wanted: TargetStates | TargetLogits = states.written_out() if keeps_logits(states) else states
        self.label_R = self.target.draft_ids_V[batch.tokens_T[row_R + 2]]
