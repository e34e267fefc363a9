"""Medusa heads: each draft token has a head of its own, and all read the same state (Cai et al. 2024).

The arithmetic is that of vllm/model_executor/models/medusa.py, the state that of v1/worker/gpu_model_runner.py: the one
behind the target's final norm, of the position whose next token was just sampled:

    x        = final_norm(last[i])
    x        = x + SiLU(W[j, l] x)               for each layer l of head j
    logits_j = lm_head(x)                        drafts x[i+2+j]; x[i+1] is the target's own

No head sees another's draft, so a later head is right mostly where few words can follow.
Parameters are named as vLLM names them.

Shapes: B requests, K draft steps, D hidden, U draft vocabulary, R rows of one step.
"""

from dataclasses import dataclass
from typing import Any

import torch
from drafthead.data.errors import InputError
from drafthead.eval.protocols import TargetPass
from drafthead.eval.tree_search import TreeShape
from drafthead.pipeline.heads.base import (
    DraftLMHead,
    FrozenTarget,
    Head,
    HeadBatch,
    HeadOutput,
    Objective,
    rank_with_confidence,
)
from drafthead.pipeline.heads.chains import Chains
from drafthead.pipeline.recipe import MedusaConfig
from drafthead.pipeline.target import Target
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class MedusaOptions:
    """What the exported configuration must repeat."""

    num_heads: int
    num_layers: int
    draft_vocab_size: int
    shared_lm_head: bool = True
    bias: bool = False


class ResidualBlock(nn.Module):
    """x + SiLU(W x), layer by layer; begun at W = 0, where it hands the state on."""

    def __init__(self, size: int, num_layers: int, bias: bool):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size, bias=bias) for _ in range(num_layers))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x_RD: Tensor) -> Tensor:
        for layer in self.layers:
            change_RD = F.silu(layer(x_RD))
            x_RD = x_RD.to(change_RD.dtype) + change_RD
        return x_RD


class Medusa(Head):
    """Medusa heads for any target; only its hidden size is read from `config`."""

    kind = "medusa"
    # no slot reads another one's state
    reads_last = "answer"
    options: MedusaOptions

    def __init__(self, config: Any, options: MedusaOptions):
        super().__init__()
        size = int(config.hidden_size)
        self.options = options
        self.blocks = nn.ModuleList(
            ResidualBlock(size, options.num_layers, options.bias) for _ in range(options.num_heads)
        )
        if options.shared_lm_head:
            self.lm_head = DraftLMHead(options.draft_vocab_size, size)
        else:
            self.lm_heads = nn.ModuleList(DraftLMHead(options.draft_vocab_size, size) for _ in range(options.num_heads))

    @classmethod
    def fresh(cls, config: MedusaConfig, target: Target, frozen: FrozenTarget, num_aux: int) -> "Medusa":
        """New heads that all draft the target's own next token again.

        Raises:
            InputError: See `check_lm_heads`.
        """
        size = len(frozen.target_ids_U)
        check_lm_heads(config, size, target.vocab_size)
        options = MedusaOptions(
            num_heads=config.num_heads,
            num_layers=config.num_layers,
            draft_vocab_size=size,
            shared_lm_head=config.shared_lm_head,
            bias=config.bias,
        )
        head = cls(target.config, options)
        with torch.no_grad():
            for step in range(config.num_heads):
                head.projection(step).weight.copy_(frozen.lm_head_UD)
        return head

    def forward(self, batch: HeadBatch, target: FrozenTarget, objective: Objective) -> HeadOutput:
        """Draft `depth` tokens from every supervised slot with as many heads."""
        self.check_depth(objective.depth)
        chains = Chains(batch, target, objective)
        state_RD = self.read(batch.last_TD[chains.row_R], target)
        for step in range(objective.depth):
            if step:
                state_RD = state_RD[chains.advance()]
            chains.score(self.projection(step), self.blocks[step](state_RD))
        return chains.output()

    def drafter(self, frozen: FrozenTarget) -> "MedusaDrafter":
        return MedusaDrafter(self, frozen)

    def read(self, last_RD: Tensor, target: FrozenTarget) -> Tensor:
        """What the blocks are given for states before the target's final norm."""
        return target.normed(last_RD).to(next(self.blocks.parameters()).dtype)

    def projection(self, step: int) -> DraftLMHead:
        """The lm_head of draft token `step`."""
        if self.options.shared_lm_head:
            return self.lm_head
        lm_head = self.lm_heads[step]
        assert isinstance(lm_head, DraftLMHead)
        return lm_head

    def check_depth(self, k: int) -> None:
        """Refuse more draft tokens than there are heads.

        Raises:
            InputError: Naming both.
        """
        if k > self.options.num_heads:
            raise InputError(f"k={k}: this Medusa head drafts at most head.num_heads={self.options.num_heads} tokens")


def check_lm_heads(config: MedusaConfig, draft_vocab: int, vocab_size: int) -> None:
    """Refuse separate lm_heads over a part of the vocabulary, which vLLM cannot serve.

    Raises:
        InputError: Naming the two settings that do not go together.
    """
    if not config.shared_lm_head and draft_vocab != vocab_size:
        raise InputError(
            f"head.shared_lm_head=false with a draft vocabulary of {draft_vocab}: vLLM serves separate lm_heads over "
            f"the full vocabulary only; set draft_vocab.size={vocab_size} or head.shared_lm_head=true"
        )


class MedusaDrafter:
    """Each head's most likely token, as vLLM drafts (v1/spec_decode/medusa.py); nothing but one state is kept."""

    def __init__(self, head: Medusa, frozen: FrozenTarget):
        self.head = head
        self.frozen = frozen
        self.max_depth = head.options.num_heads

    def start(self, prompts: list[list[int]], max_length: int) -> None:
        pass

    def observe(self, next_BQ: Tensor, states: TargetPass, position_BQ: Tensor, count_B: Tensor) -> None:
        rows = torch.arange(len(next_BQ), device=next_BQ.device)
        with torch.inference_mode():
            self.state_BD = self.head.read(states.last_BQD[rows, count_B - 1], self.frozen)

    def draft(self, k: int) -> Tensor:
        self.head.check_depth(k)
        with torch.inference_mode():
            best = [self.logits(step).argmax(-1) for step in range(k)]
            return self.frozen.target_ids_U[torch.stack(best, 1)]

    def top_tokens(self, count: int) -> Tensor:
        """The `count` most likely tokens of every head, as target ids, the likeliest first: [B, num_heads, count]."""
        with torch.inference_mode():
            best = [self.logits(step).topk(count, -1).indices for step in range(self.head.options.num_heads)]
            return self.frozen.target_ids_U[torch.stack(best, 1)]

    def draft_tree(self, shape: TreeShape) -> Tensor:
        """No head sees the path, so all nodes of a depth with the same rank hold the same token."""
        top_BKR = self.top_tokens(1 + max(shape.ranks))
        return top_BKR[:, list(shape.heads), list(shape.ranks)]

    def rank_tokens(self, given_BK: Tensor, count: int) -> Tensor:
        self.head.check_depth(given_BK.shape[1])
        return self.top_tokens(min(count, self.head.options.draft_vocab_size))[:, : given_BK.shape[1]]

    def open_tree(self) -> "MedusaTree":
        return MedusaTree(self)

    def select(self, rows: Tensor) -> None:
        self.state_BD = self.state_BD[rows]

    def logits(self, step: int) -> Tensor:
        """[B, U] of the head of draft token `step`."""
        logits_BU: Tensor = self.head.projection(step)(self.head.blocks[step](self.state_BD))
        return logits_BU


class MedusaTree:
    """Implements `protocols.GrowingTree`: all nodes of a level are followed by the same tokens."""

    def __init__(self, drafter: MedusaDrafter):
        self.drafter = drafter
        self.step = 0

    def first(self, count: int) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            logits_BU = self.drafter.logits(self.step)
        return rank_with_confidence(logits_BU[:, None], self.drafter.frozen.target_ids_U, count)

    def deeper(self, parent_BQ: Tensor, token_BQ: Tensor, count: int) -> tuple[Tensor, Tensor]:
        self.step += 1
        token_B1R, log_q_B1R = self.first(count)
        queries = token_BQ.shape[1]
        return token_B1R.expand(-1, queries, -1), log_q_B1R.expand(-1, queries, -1)
