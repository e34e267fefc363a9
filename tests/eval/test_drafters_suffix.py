"""Suffix decoding: the tree against one that keeps every path, the drafter against the package that vLLM calls.

Shapes: B requests, Q new tokens, K draft tokens.
"""

import random
from collections import defaultdict
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from drafthead.data.errors import InputError
from drafthead.eval.decode import DecodeOptions, decode
from drafthead.eval.drafters.suffix import SuffixDrafter, SuffixOptions
from drafthead.eval.drafters.suffix_tree import Node, SuffixTree
from drafthead.eval.hf_target import HFTarget

from tests.eval.speculation import NO_END, tokens_of

LONG = 10_000
Path = tuple[int, ...]


class EveryPath:
    """The definition: every path of every suffix with its count, and its followers by falling count."""

    def __init__(self, depth: int):
        self.depth = depth
        self.sequences: dict[int, list[int]] = defaultdict(list)
        self.count: dict[Path, int] = defaultdict(int)
        self.followers: dict[Path, list[int]] = defaultdict(list)

    def extend(self, key: int, tokens: list[int]) -> None:
        for token in tokens:
            text = self.sequences[key]
            text.append(token)
            for start in range(max(0, len(text) - self.depth), len(text)):
                self.change(tuple(text[start:]), +1)
            self.count[()] += 1

    def remove(self, key: int) -> None:
        text = self.sequences.pop(key)
        for start in range(len(text)):
            whole = text[start : start + self.depth]
            for length in range(1, len(whole) + 1):
                self.change(tuple(whole[:length]), -1)
            self.count[()] -= 1

    def change(self, path: Path, by: int) -> None:
        """Among followers of one count a newcomer from below is the last, but one that led its own count the first."""
        ranked, token = self.followers[path[:-1]], path[-1]
        counts = {other: self.count[(*path[:-1], other)] for other in ranked}
        old = counts.get(token, 0)
        self.count[path] = old + by
        same = [other for other in ranked if counts[other] == old and other != token]
        above = [other for other in ranked if counts[other] > old]
        below = [other for other in ranked if counts[other] < old]
        if by < 0:
            ranked[:] = [*above, *same, *([token] if old > 1 else []), *below]
            return
        led = old > 0 and next(other for other in ranked if counts[other] == old) == token
        next_up = [other for other in above if counts[other] == old + 1]
        higher = [other for other in above if counts[other] > old + 1]
        ranked[:] = [*higher, *([token, *next_up] if led else [*next_up, token]), *same, *below]

    def continue_context(
        self, context: list[int], max_tokens: int, per_match: float, min_prob: float
    ) -> tuple[list[int], np.float32]:
        best: tuple[list[int], np.float32] = ([], np.float32(0))
        for length in range(1, len(context)):
            path = tuple(context[-length:])
            if not self.count[path]:
                break
            tokens: list[int] = []
            prob, score = np.float32(1), np.float32(0)
            while len(tokens) < min(max_tokens, int(length * per_match + 1e-6)) and self.followers[path]:
                token = self.followers[path][0]
                prob = prob * (np.float32(self.count[(*path, token)]) / np.float32(self.count[path]))
                if prob < np.float32(min_prob):
                    break
                tokens.append(token)
                score = score + prob
                path = (*path, token)
            if score >= best[1]:
                best = tokens, score
        return best


def repetitive(draw: random.Random, length: int, size: int) -> list[int]:
    """Text that copies pieces of itself, at times with a change."""
    text = [draw.randrange(size) for _ in range(3)]
    while len(text) < length:
        if draw.random() < 0.4:
            text.append(draw.randrange(size))
        else:
            start = draw.randrange(len(text))
            text += text[start : start + draw.randrange(1, 9)]
    return text[:length]


@pytest.mark.parametrize("depth", [1, 2, 3, 6, 24])
@pytest.mark.parametrize("size", [2, 4, 30], ids=lambda size: f"{size} tokens")
def test_the_tree_continues_as_one_that_keeps_every_path(depth: int, size: int) -> None:
    """Sequences that grow in turns and are forgotten."""
    draw = random.Random(100 * depth + size)
    tree, definition, found = SuffixTree(depth), EveryPath(depth), 0
    texts: dict[int, list[int]] = {}
    for step in range(120):
        key = draw.choice([*texts, step]) if len(texts) < 6 else draw.choice(list(texts))
        more = repetitive(draw, draw.randrange(1, 12), size)
        texts.setdefault(key, []).extend(more)
        tree.extend(key, more)
        definition.extend(key, more)
        if draw.random() < 0.15:
            gone = draw.choice(list(texts))
            del texts[gone]
            tree.remove(gone)
            definition.remove(gone)
        for text in texts.values():
            context = text[-depth:]
            limits = draw.randrange(1, 9), draw.choice([0.5, 1.0, 3.0]), draw.choice([0.0, 0.1, 0.4])
            continuation = tree.continue_context(context, *limits)
            assert (continuation.tokens, continuation.score) == definition.continue_context(context, *limits)
            found += len(continuation.tokens)
    assert found > 50 or depth < 3


def test_what_does_not_repeat_is_not_built() -> None:
    tree = SuffixTree(24)
    tree.extend(0, list(range(500)))

    def size(node: Node) -> int:
        return 1 + sum(size(child) for child in node.ranked)

    assert size(tree.root) == 501
    tree.remove(0)
    assert size(tree.root) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_tree_depth", 0), ("max_cached_requests", -1), ("max_spec_factor", -0.5), ("min_token_prob", 1.1)],
)
def test_impossible_parameters_are_refused(name: str, value: float) -> None:
    with pytest.raises(InputError, match=f"suffix_decoding_{name}={value}"):
        SuffixOptions(**{f"suffix_decoding_{name}": value})  # type: ignore[arg-type]


# ---- the drafter -----------------------------------------------------------------------------------------


def observe_all(drafter: SuffixDrafter, rows: list[list[int]]) -> None:
    width = max(map(len, rows))
    next_BQ = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    count_B = torch.tensor([len(row) for row in rows])
    drafter.observe(next_BQ, None, torch.empty(0), count_B)  # type: ignore[arg-type]


def drafts_of(drafter: SuffixDrafter, k: int) -> list[list[int]]:
    return [[token for token in row if token >= 0] for row in drafter.draft(k).tolist()]


OPTIONS = [
    SuffixOptions(),
    SuffixOptions(suffix_decoding_max_tree_depth=5, suffix_decoding_max_spec_factor=2.0),
    SuffixOptions(suffix_decoding_max_cached_requests=2, suffix_decoding_min_token_prob=0.3),
    SuffixOptions(suffix_decoding_max_cached_requests=0),
]


@pytest.mark.parametrize("options", OPTIONS, ids=["defaults", "shallow and long", "forgetful", "prompts alone"])
def test_drafts_are_those_of_the_package_that_vllm_calls(options: SuffixOptions) -> None:
    """Batches one after the other; requests end in between; each step gives some tokens of a repetitive text."""
    package = pytest.importorskip("arctic_inference.suffix_decoding", reason="arctic-inference is not installed")
    cache = package.SuffixDecodingCache(
        max_tree_depth=options.suffix_decoding_max_tree_depth,
        max_cached_requests=options.suffix_decoding_max_cached_requests,
    )
    draw, drafter, k, limit, found = random.Random(5), SuffixDrafter(options, 64), 6, 64, 0
    number = 0
    for _ in range(6):
        texts = {number + place: repetitive(draw, 90, 8) for place in range(3)}
        number += len(texts)
        known = {key: draw.randrange(2, 12) for key in texts}
        prompts = [text[: known[key]] for key, text in texts.items()]
        drafter.start(prompts, 100)
        alive, rows = list(texts), [prompt[1:] for prompt in prompts]
        while alive:
            new = [texts[key][known[key] : known[key] + draw.randrange(1, 5)] for key in alive]
            if rows:
                new = [one[:1] for one in new]  # the first comes with the prompt
            shown = [row + one for row, one in zip(rows or [[]] * len(alive), new, strict=True)]
            rows = []
            observe_all(drafter, shown)
            expected = {}
            for key, tokens in zip(alive, new, strict=True):
                known[key] += len(tokens)
                expected[key] = their_draft(cache, key, texts[key], known[key], tokens, options, min(k, limit))
            over = [key for key in alive if known[key] > 55]
            kept = [key for key in alive if key not in over]
            drafter.select(torch.tensor([alive.index(key) for key in kept], dtype=torch.long))
            alive = kept
            if alive:
                assert drafts_of(drafter, k) == [expected[key] for key in alive]
                found += sum(len(expected[key]) for key in alive)
        for key in texts:
            cache.stop_request(key)
    assert found > 200


def their_draft(
    cache: Any, key: int, text: list[int], known: int, new: list[int], options: SuffixOptions, k: int
) -> list[int]:
    """As vllm/v1/spec_decode/suffix_decoding.py calls the package."""
    if key not in cache.active_requests:
        cache.start_request(key, text[: known - len(new)])
    cache.add_active_response(key, new)
    draft = cache.speculate(
        key,
        text[max(0, known - options.suffix_decoding_max_tree_depth) : known],
        max_spec_tokens=min(k, 64 - known - 1),
        max_spec_factor=options.suffix_decoding_max_spec_factor,
        min_token_prob=options.suffix_decoding_min_token_prob,
    )
    return list(draft.token_ids)


def test_an_answer_given_before_is_drafted_and_a_forgotten_one_is_not() -> None:
    answer = [11, 12, 13, 14, 15, 16, 17, 18]
    for limit, expected in ((2, [14, 15, 16]), (1, []), (0, [])):  # at 1 the second takes its place
        drafter = SuffixDrafter(SuffixOptions(suffix_decoding_max_cached_requests=limit), LONG)
        drafter.start([[1, 2]], 50)
        observe_all(drafter, [[2, answer[0]]])
        drafter.draft(3)
        observe_all(drafter, [answer[1:]])
        drafter.select(torch.tensor([], dtype=torch.long))  # it has ended
        drafter.start([[3, 4]], 50)
        observe_all(drafter, [[4, 11]])
        drafter.draft(3)
        observe_all(drafter, [[12, 13]])
        assert drafts_of(drafter, 3) == [expected]


def test_text_stays_plain_and_copied_answers_are_kept(
    target: HFTarget, prompts: list[list[int]], texts: list[list[int]]
) -> None:
    options = DecodeOptions(max_new_tokens=17, end_ids=[NO_END])
    drafter = SuffixDrafter(SuffixOptions(), LONG)
    first, again = (decode(target, drafter, prompts, 4, options) for _ in range(2))
    plain = tokens_of(decode(target, None, prompts, 0, options))
    assert tokens_of(first) == tokens_of(again) == plain
    kept = [sum(sum(answer.accepted) for answer in answers) for answers in (first, again)]
    assert kept[1] > 1.5 * kept[0], "the same answers are remembered"
    assert {0, 1, 2} <= {count for answer in first for count in answer.drafted}
    assert max(count for answer in again for count in answer.drafted) == 4


def test_options_are_vllms_with_its_defaults() -> None:
    pytest.importorskip("vllm", reason="vllm is not installed")
    from vllm.config import SpeculativeConfig

    for name, value in asdict(SuffixOptions()).items():
        assert SpeculativeConfig.__dataclass_fields__[name].default == value
