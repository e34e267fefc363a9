"""A target whose memory cannot be taken back, for the speculative loop: each pass runs the whole text again.

For models with layers that keep a state instead of keys and values by position (Mamba, linear attention, chunks), which
`HFTarget` cannot serve. Slower by about the length of a text over that of a round.

Shapes: B requests, T tokens of the texts so far, Q new tokens of a pass, L room, A captured layers, D hidden.
"""

import sys
from typing import Any

import torch
from drafthead.data.errors import InputError
from drafthead.eval.hf_target import HFTarget
from drafthead.eval.layer_kinds import NO_TREES, keeps_positions, layer_kinds
from drafthead.eval.loop_gate import check_logits, own_logits
from drafthead.eval.protocols import TargetPass
from drafthead.eval.states import StateRecorder
from torch import Tensor


class RecomputedTarget:
    """Implements `protocols.TreeTarget`, but for trees, which it refuses.

    Raises:
        GateError: When first started: see `check_logits`.
    """

    def __init__(self, model: Any, aux_layers: list[int]):
        self.model = model
        self.recorder = StateRecorder(model, aux_layers)
        self.is_checked = False

    def start(self, prompts: list[list[int]], max_length: int) -> TargetPass:
        device = self.model.device
        own_V = None if self.is_checked else own_logits(self.model, prompts[0])
        self.tokens_BL = torch.zeros(len(prompts), max_length, dtype=torch.long, device=device)
        for row_L, ids in zip(self.tokens_BL, prompts, strict=True):
            row_L[: len(ids)] = torch.tensor(ids, device=device)
        width = max(len(ids) for ids in prompts)
        last_B1 = torch.tensor([[len(ids) - 1] for ids in prompts], device=device)
        logits_B1V = self._run(width, last_B1)
        if own_V is not None:
            check_logits(self.model, logits_B1V[0, 0], own_V)
            self.is_checked = True
        return TargetPass(logits_BQV=logits_B1V, aux_BQAD=self.recorder.aux(), last_BQD=self.recorder.last())

    def step(self, tokens_BQ: Tensor, position_BQ: Tensor) -> TargetPass:
        self.tokens_BL.scatter_(1, position_BQ, tokens_BQ)
        logits_BQV = self._run(int(position_BQ.max()) + 1, position_BQ)
        whole = TargetPass(logits_BQV=logits_BQV, aux_BQAD=self.recorder.aux(), last_BQD=self.recorder.last())
        states = whole.states_at(position_BQ)
        return TargetPass(logits_BQV=logits_BQV, aux_BQAD=states.aux_BQAD, last_BQD=states.last_BQD)

    def select(self, rows: Tensor) -> None:
        self.tokens_BL = self.tokens_BL[rows]

    def step_tree(self, tokens_BM: Tensor, known_B: Tensor, visible_BMM: Tensor) -> TargetPass:
        """Raises `InputError`."""
        raise InputError(NO_TREES)

    def keep_path(self, row_BQ: Tensor, position_BQ: Tensor) -> None:
        """Raises `InputError`."""
        raise InputError(NO_TREES)

    def _run(self, length: int, position_BQ: Tensor) -> Tensor:
        """Logits [B, Q, V] at these positions; what stands behind a position it does not see."""
        with torch.inference_mode():
            ids_BT = self.tokens_BL[:, :length]
            hidden_BTD = self.recorder.decoder(input_ids=ids_BT, use_cache=False).last_hidden_state
            request_B1 = torch.arange(len(position_BQ), device=position_BQ.device)[:, None]
            logits_BQV: Tensor = self.model.lm_head(hidden_BTD[request_B1, position_BQ])
        return logits_BQV


def loop_target(model: Any, aux_layers: list[int]) -> HFTarget | RecomputedTarget:
    """The target of the speculative loop, with a cache where the model's layers allow one."""
    config = model.config.get_text_config()
    if keeps_positions(config):
        return HFTarget(model, aux_layers)
    kinds = ", ".join(sorted(layer_kinds(config)))
    print(
        f"eval: layers of this {model.config.model_type} ({kinds}) keep a state, which no rejected draft token can be "
        f"taken out of; every pass runs the whole text again, which is slow and right",
        file=sys.stderr,
    )
    return RecomputedTarget(model, aux_layers)
