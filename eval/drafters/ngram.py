"""Prompt lookup: the last tokens are searched for in the request's own text, and what followed them is proposed.

Proposes token for token what vLLM 0.32's method `ngram` does (v1/spec_decode/ngram_proposer.py): of the suffixes of
`prompt_lookup_min` to `prompt_lookup_max` tokens the longest that occurs earlier counts, where it occurs first; the two
may overlap. Everything up to the newest token may be proposed, so a draft can be shorter than k, or there is none.

Shapes: B requests, Q new tokens of a pass, K draft tokens.
"""

from dataclasses import dataclass

from drafthead.data.errors import InputError
from drafthead.eval.drafters.ragged import pad_drafts
from drafthead.eval.protocols import TargetPass
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class NgramOptions:
    """Lengths of the suffix that is searched for; one given alone stands for both, none for 5 (vLLM's rule)."""

    prompt_lookup_min: int | None = None
    """Tokens of the shortest suffix that counts."""
    prompt_lookup_max: int | None = None
    """Tokens of the longest."""

    def __post_init__(self) -> None:
        low = self.prompt_lookup_min or self.prompt_lookup_max or 5
        high = self.prompt_lookup_max or low
        given = self.prompt_lookup_min, self.prompt_lookup_max
        if any(value is not None and value < 1 for value in given) or low > high:
            raise InputError(
                f"prompt_lookup_min={given[0]}, prompt_lookup_max={given[1]}: from 1 on, and min not above max"
            )
        object.__setattr__(self, "prompt_lookup_min", low)
        object.__setattr__(self, "prompt_lookup_max", high)

    @property
    def lengths(self) -> range:
        """The lengths that are tried, the longest first."""
        assert self.prompt_lookup_min is not None
        assert self.prompt_lookup_max is not None
        return range(self.prompt_lookup_max, self.prompt_lookup_min - 1, -1)


class NgramIndex:
    """One request's text, and where each n-gram that something follows occurs first."""

    def __init__(self, options: NgramOptions):
        self.lengths = options.lengths
        self.tokens: list[int] = []
        self.end_of: dict[tuple[int, ...], int] = {}
        """Index of the token that follows an n-gram's first occurrence."""

    def append(self, token: int) -> None:
        """Take the next token of the text."""
        end = len(self.tokens)
        for length in self.lengths:
            if length <= end:
                self.end_of.setdefault(tuple(self.tokens[end - length :]), end)
        self.tokens.append(token)

    def propose(self, k: int) -> list[int]:
        """At most k tokens to continue the text with."""
        for length in self.lengths:
            if length <= len(self.tokens) and (end := self.end_of.get(tuple(self.tokens[-length:]))) is not None:
                return self.tokens[end : end + max(k, 0)]
        return []


class NgramDrafter:
    """Implements `protocols.Drafter`; reads no states of the target."""

    def __init__(self, options: NgramOptions, max_model_len: int):
        """`max_model_len`: the server's, whose scheduler drafts no further than the token before its last place."""
        self.options = options
        self.max_model_len = max_model_len
        self.indices: list[NgramIndex] = []

    def start(self, prompts: list[list[int]], max_length: int) -> None:
        self.indices = [NgramIndex(self.options) for _ in prompts]
        for index, ids in zip(self.indices, prompts, strict=True):
            index.append(ids[0])  # the slots to come hold the tokens behind it

    def observe(self, next_BQ: Tensor, states: TargetPass, position_BQ: Tensor, count_B: Tensor) -> None:
        self.device = next_BQ.device
        for index, row, count in zip(self.indices, next_BQ.tolist(), count_B.tolist(), strict=True):
            for token in row[:count]:
                index.append(token)

    def draft(self, k: int) -> Tensor:
        drafts = [index.propose(min(k, self.max_model_len - len(index.tokens) - 1)) for index in self.indices]
        return pad_drafts(drafts, self.device)

    def select(self, rows: Tensor) -> None:
        self.indices = [self.indices[row] for row in rows.tolist()]
