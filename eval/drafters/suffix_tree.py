"""A suffix tree over token sequences that grow and are forgotten, and the likeliest continuation of a context in it.

Every suffix of every sequence is a path from the root, cut at `max_depth` tokens; a node counts the suffixes that run
through it. A path that only one suffix has taken is not built: its last node names the suffix, whose sequence holds the
rest. So memory and time go with what repeats.

Counts, scores and the order of equally frequent tokens are those of arctic-inference 0.1.1, which vLLM 0.32 calls for
its method `suffix` (csrc/suffix_decoding/suffix_tree.cc), single precision included.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

ZERO, ONE = np.float32(0), np.float32(1)


class Suffix:
    """A suffix of a sequence, from `start` on, and the node that it has reached; `end` is where the depth cuts it."""

    __slots__ = ("end", "node", "start", "tokens")

    def __init__(self, tokens: list[int], start: int, max_depth: int, node: "Node"):
        self.tokens = tokens
        self.start = start
        self.end = start + max_depth
        self.node = node


class Node:
    """What follows after the tokens of the path to here, the most frequent first."""

    __slots__ = ("children", "count", "depth", "only", "ranked", "token")

    def __init__(self, token: int, depth: int, only: Suffix | None):
        self.token = token
        self.depth = depth
        self.count = 1
        self.only = only
        """The one suffix that runs through here, whose path is not built below."""
        self.children: dict[int, Node] = {}
        self.ranked: list[Node] = []
        """The children by falling count."""

    def add(self, child: "Node") -> None:
        self.children[child.token] = child
        self.ranked.append(child)

    def raise_count(self, child: "Node") -> None:
        """One more: a child that led those of its count becomes the first of the next ones, another the last."""
        ranked, place = self.ranked, self.ranked.index(child)
        before = ranked[place - 1].count if place else None
        child.count += 1
        if before in (child.count - 1, child.count):
            first = place
            while first and ranked[first - 1].count == before:
                first -= 1
            ranked.insert(first, ranked.pop(place))

    def lower_count(self, child: "Node") -> None:
        """One less: it goes behind the others that have the count it had."""
        ranked, place = self.ranked, self.ranked.index(child)
        last = place
        while last + 1 < len(ranked) and ranked[last + 1].count == child.count:
            last += 1
        ranked.insert(last, ranked.pop(place))
        child.count -= 1

    def remove(self, child: "Node") -> None:
        del self.children[child.token]
        self.ranked.remove(child)


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """Tokens that may follow a context."""

    tokens: list[int] = field(default_factory=list)
    score: np.float32 = ZERO
    """Sum over the tokens of the estimated probability that all up to there follow."""


class SuffixTree:
    """The suffixes of some sequences, which are told apart by a key."""

    def __init__(self, max_depth: int):
        self.max_depth = max_depth
        self.root = Node(-1, 0, None)
        self.sequences: dict[int, list[int]] = {}
        self.growing: dict[int, deque[Suffix]] = {}
        """The suffixes of each sequence that the depth does not cut yet, the longest first."""

    def extend(self, key: int, tokens: list[int]) -> None:
        """Let a sequence, new or known, go on with these tokens."""
        sequence = self.sequences.setdefault(key, [])
        growing = self.growing.setdefault(key, deque(maxlen=self.max_depth))
        for token in tokens:
            growing.append(Suffix(sequence, len(sequence), self.max_depth, self.root))
            sequence.append(token)
            for suffix in growing:
                if suffix.node.only is not suffix:
                    self._step(suffix, token)

    def _step(self, suffix: Suffix, token: int) -> None:
        """Move a suffix to the child that stands for its next token."""
        parent = suffix.node
        child = parent.children.get(token)
        if child is None:
            child = Node(token, parent.depth + 1, suffix)
            parent.add(child)
        else:
            if child.only is not None:
                self._build_below(child, child.only)
            parent.raise_count(child)
        suffix.node = child

    @staticmethod
    def _build_below(node: Node, only: Suffix) -> None:
        """Build one more node of the path of a node's only suffix, for another is about to run through it."""
        node.only = None
        place = only.start + node.depth
        if place < min(len(only.tokens), only.end):
            below = Node(only.tokens[place], node.depth + 1, only)
            node.add(below)
            only.node = below

    def remove(self, key: int) -> None:
        """Forget a sequence."""
        tokens = self.sequences.pop(key)
        del self.growing[key]
        for start in range(len(tokens)):
            node = self.root
            for token in tokens[start : start + self.max_depth]:
                child = node.children.get(token)
                if child is None:
                    break
                if child.count == 1:
                    node.remove(child)
                    break
                node.lower_count(child)
                node = child

    def continue_context(
        self, context: list[int], max_tokens: int, tokens_per_match: float, min_prob: float
    ) -> Continuation:
        """The best continuation over all suffixes of the context that occur, the longer one where scores are equal.

        Args:
            context: The newest tokens; at most all but one of them are matched.
            max_tokens: Tokens of the continuation at most.
            tokens_per_match: The same for each token matched.
            min_prob: A continuation ends before the token up to which it is less likely than this.
        """
        best = Continuation()
        for length in range(1, len(context)):
            node = self._find(context[len(context) - length :])
            if node is None:
                break
            # as in single precision, then rounded down with a hair's room
            allowed = int(float(np.float32(length) * np.float32(tokens_per_match)) + 1e-6)
            found = self._follow(*node, max(min(max_tokens, allowed), 0), np.float32(min_prob))
            if found.score >= best.score:
                best = found
        return best

    def _find(self, context: list[int]) -> tuple[Node, int] | None:
        """The node that a context leads to, and how many of its tokens lie on that node's unbuilt path below."""
        node = self.root
        for place, token in enumerate(context):
            if node.only is not None:
                first = node.only.start + node.depth
                rest, known = context[place:], node.only.tokens[first : node.only.end]
                return (node, len(rest)) if known[: len(rest)] == rest else None
            child = node.children.get(token)
            if child is None:
                return None
            node = child
        return node, 0

    def _follow(self, node: Node, below: int, max_tokens: int, min_prob: np.float32) -> Continuation:
        """Take the most frequent token, again and again."""
        tokens: list[int] = []
        prob, score = ONE, ZERO
        while len(tokens) < max_tokens and prob >= min_prob:
            if node.only is not None:
                first = node.only.start + node.depth + below
                rest = node.only.tokens[first : node.only.end][: max_tokens - len(tokens)]
                for token in rest:
                    tokens.append(token)
                    score += prob
                break
            if not node.ranked:
                break
            child = node.ranked[0]
            prob = prob * (np.float32(child.count) / np.float32(node.count))
            node = child
            if prob >= min_prob:
                tokens.append(child.token)
                score += prob
        return Continuation(tokens=tokens, score=score)
