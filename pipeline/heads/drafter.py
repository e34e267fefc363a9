"""A trained EAGLE-3 head as a `Drafter` of the speculative loop (vllm/v1/spec_decode/llm_base_proposer.py)."""

import torch
from drafthead.pipeline.heads.base import FrozenTarget
from drafthead.pipeline.heads.eagle3 import Eagle3, Eagle3Cache, decode_step
from torch import Tensor


class Eagle3Drafter:
    """Drafts greedily, as vLLM does by default; every observed slot is fed with the target's true state."""

    def __init__(self, head: Eagle3, frozen: FrozenTarget):
        self.head = head
        self.frozen = frozen
        self.dtype = head.fc.weight.dtype

    def start(self, batch_size: int, max_length: int) -> None:
        self.cache = Eagle3Cache(self.head, batch_size, max_length)

    def observe(self, next_BQ: Tensor, aux_BQAD: Tensor, position_BQ: Tensor, count_B: Tensor) -> None:
        with torch.inference_mode():
            batch, queries = next_BQ.shape
            fused = self.head.fuse(aux_BQAD.flatten(0, 1).to(self.dtype)).unflatten(0, (batch, queries))
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
