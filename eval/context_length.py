"""Acceptance by the length of the prompt: is a head as good behind a long context as behind a short one?

Buckets are the same for every evaluation, so that two can be held against each other: below 32 tokens, then a bucket
for each doubling (32 to 63, 64 to 127, ...).
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from drafthead.eval.acceptance import RequestRounds
from drafthead.eval.intervals import brief, summarize_with_intervals

FIRST_END = 32


def bucket_of(length: int) -> tuple[int, int]:
    """The shortest and the longest prompt of the bucket that a prompt of `length` tokens lies in."""
    start, end = 0, FIRST_END
    while length >= end:
        start, end = end, 2 * end
    return start, end - 1


def by_context_length(requests: Sequence[RequestRounds], lengths: Sequence[int], k: int) -> list[dict[str, Any]]:
    """The numbers of each bucket that has prompts, the shortest first.

    Args:
        requests: What the rounds of each answer accepted.
        lengths: Tokens of each request's prompt, as a server sees it.
        k: Draft tokens per round at most.

    Returns:
        `from` and `to`, tokens of the shortest and the longest prompt that the bucket takes; `prompts`; `drafts`,
        the number of rounds; accept length, tokens per pass (with intervals) and rates by position, as `summarize`.
    """
    buckets: dict[tuple[int, int], list[RequestRounds]] = defaultdict(list)
    for request, length in zip(requests, lengths, strict=True):
        buckets[bucket_of(length)].append(request)
    found = []
    for (start, end), inside in sorted(buckets.items()):
        found.append({"from": start, "to": end, **brief(summarize_with_intervals(inside, k))})
    return found
