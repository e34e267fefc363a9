"""A drafter that is watched in a loop over one request: which text each round drafted from, and what.

Shapes: B requests, Q new tokens of a pass, K draft tokens.
"""

from drafthead.eval.protocols import Drafter, TargetPass
from torch import Tensor


class Watched:
    def __init__(self, drafter: Drafter):
        self.drafter = drafter

    def start(self, prompts: list[list[int]], max_length: int) -> None:
        self.text = prompts[0][:1]
        self.rounds: list[tuple[list[int], list[int]]] = []
        self.drafter.start(prompts, max_length)

    def observe(self, next_BQ: Tensor, states: TargetPass, position_BQ: Tensor, count_B: Tensor) -> None:
        self.text = self.text + next_BQ[0, : int(count_B[0])].tolist()
        self.drafter.observe(next_BQ, states, position_BQ, count_B)

    def draft(self, k: int) -> Tensor:
        draft_BK = self.drafter.draft(k)
        self.rounds.append((self.text, draft_BK[0].tolist()))
        return draft_BK

    def select(self, rows: Tensor) -> None:
        self.drafter.select(rows)
