"""Suffix decoding (Oliaro et al. 2024): continues as earlier text did, the request's own or that of earlier answers.

The longest match need not win: of all suffixes of the context the one whose continuation is the likeliest by counts
does, and a draft is as long as its match and these counts allow. Proposes token for token what vLLM 0.32's method
`suffix` does (v1/spec_decode/suffix_decoding.py with arctic-inference 0.1.1), if requests come in the same order.

Shapes: B requests, Q new tokens of a pass, K draft tokens.
"""

from dataclasses import dataclass

from drafthead.data.errors import InputError
from drafthead.eval.drafters.ragged import pad_drafts
from drafthead.eval.drafters.suffix_tree import SuffixTree
from drafthead.eval.protocols import TargetPass
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SuffixOptions:
    """vLLM's parameters, with its defaults."""

    suffix_decoding_max_tree_depth: int = 24
    """Tokens of the longest path in a tree: a match and its continuation together."""
    suffix_decoding_max_cached_requests: int = 10000
    """Answers to remember, the oldest is forgotten first; 0 remembers none."""
    suffix_decoding_max_spec_factor: float = 1.0
    """Draft tokens at most for each token matched."""
    suffix_decoding_min_token_prob: float = 0.1
    """A draft ends where counts say that it is less likely than this."""

    def __post_init__(self) -> None:
        for name, value, fits, wanted in (
            ("max_tree_depth", self.suffix_decoding_max_tree_depth, lambda x: x >= 1, "from 1 on"),
            ("max_cached_requests", self.suffix_decoding_max_cached_requests, lambda x: x >= 0, "from 0 on"),
            ("max_spec_factor", self.suffix_decoding_max_spec_factor, lambda x: x >= 0, "from 0 on"),
            ("min_token_prob", self.suffix_decoding_min_token_prob, lambda x: 0 <= x <= 1, "from 0 to 1"),
        ):
            if not fits(value):
                raise InputError(f"suffix_decoding_{name}={value}: {wanted}")


class Request:
    """One request: its text, the tree over it, and the key of its answer among the remembered ones."""

    def __init__(self, prompt: list[int], max_depth: int):
        self.tokens = list(prompt)
        self.tree = SuffixTree(max_depth)
        self.tree.extend(0, prompt)
        self.key: int | None = None
        self.draft: list[int] = []


class AnswerMemory:
    """The tree over answers, finished or not; the oldest are forgotten."""

    def __init__(self, options: SuffixOptions):
        self.tree = SuffixTree(options.suffix_decoding_max_tree_depth)
        self.limit = options.suffix_decoding_max_cached_requests
        self.count = 0

    def begin(self) -> int:
        """Key of a new answer; makes room for it."""
        self.count += 1
        forgotten = self.count - self.limit
        if forgotten in self.tree.sequences:
            self.tree.remove(forgotten)
        return self.count

    def extend(self, key: int, tokens: list[int]) -> None:
        """Let an answer go on, unless it is forgotten by now."""
        if key > self.count - self.limit:
            self.tree.extend(key, tokens)


class SuffixDrafter:
    """Implements `protocols.Drafter`; reads no states, and remembers answers from one `start` to the next."""

    def __init__(self, options: SuffixOptions, max_model_len: int):
        """`max_model_len`: the server's, whose last place is never drafted for."""
        self.options = options
        self.max_model_len = max_model_len
        self.memory = AnswerMemory(options)
        self.requests: list[Request] = []
        self.unread: list[tuple[Request, list[int]]] = []
        """Tokens that were observed since the last draft. A server takes in a request's tokens and drafts for it before
        it turns to the next request, and takes in those of requests that have just ended as well."""

    def start(self, prompts: list[list[int]], max_length: int) -> None:
        self._read(0)
        depth = self.options.suffix_decoding_max_tree_depth
        self.requests = [Request(ids, depth) for ids in prompts]
        self.has_prompts = False

    def observe(self, next_BQ: Tensor, states: TargetPass, position_BQ: Tensor, count_B: Tensor) -> None:
        self.device = next_BQ.device
        rows = [row[:count] for row, count in zip(next_BQ.tolist(), count_B.tolist(), strict=True)]
        if not self.has_prompts:  # these slots are the prompts' own; the last of each holds the first answer token
            rows, self.has_prompts = [row[-1:] for row in rows], True
        self.unread += zip(self.requests, rows, strict=True)

    def draft(self, k: int) -> Tensor:
        self._read(k)
        return pad_drafts([request.draft for request in self.requests], self.device)

    def select(self, rows: Tensor) -> None:
        self.requests = [self.requests[row] for row in rows.tolist()]

    def _read(self, k: int) -> None:
        for request, tokens in self.unread:
            request.tokens += tokens
            request.tree.extend(0, tokens)
            if request.key is None:
                request.key = self.memory.begin()
            self.memory.extend(request.key, tokens)
            request.draft = self._continue(request, k)
        self.unread = []

    def _continue(self, request: Request, k: int) -> list[int]:
        options = self.options
        context = request.tokens[-options.suffix_decoding_max_tree_depth :]
        own, others = (
            tree.continue_context(
                context,
                min(k, self.max_model_len - len(request.tokens) - 1),
                options.suffix_decoding_max_spec_factor,
                options.suffix_decoding_min_token_prob,
            )
            for tree in (request.tree, self.memory.tree)
        )
        return own.tokens if own.score >= others.score else others.tokens
