"""Every acceptance number under its own name, and the walk that predicts what a server will count.

A **round** is one pass of the target over up to k draft tokens: `accepted` of them (0 to k) are kept and the target
adds one token of its own. The token after the prompt comes from the prefill and belongs to no round. A drafter without
a trained head may propose fewer than k tokens, or none: vLLM counts no round without a draft
(v1/core/sched/scheduler.py, `update_from_output`), nor is it one here; only `tokens_per_pass` knows of those passes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from drafthead.data.errors import InputError
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RequestRounds:
    """What one answer's rounds accepted."""

    domain: str
    accepted: list[int]
    """Draft tokens kept, round by round, each from 0 to k."""
    num_tokens: int
    """Answer tokens that the rounds gave: all but the first, which the prefill gives."""
    drafted: list[int] | None = None
    """Draft tokens proposed, pass by pass, and none in some; k each unless given. `accepted` has as many entries."""

    @property
    def rounds(self) -> int:
        """Passes that had a draft."""
        return len(self.accepted) if self.drafted is None else sum(count > 0 for count in self.drafted)

    @property
    def tokens_of_rounds(self) -> int:
        """`num_tokens` without those of the passes that had no draft, which gave one each."""
        return self.num_tokens - (len(self.accepted) - self.rounds)


def summarize(requests: Sequence[RequestRounds], k: int) -> dict[str, Any]:
    """Compute the numbers of `drafthead eval --json`, over all requests and by domain.

    Returns:
        `k`; `drafts`, the number of rounds, which are those that had a draft;
        `per_position`, share of rounds whose first i + 1 drafts were all kept (vLLM's, unconditional);
        `conditional`, the same among rounds that kept the first i;
        `mean_acceptance_length`, 1 + accepted / rounds, pooled over requests;
        `mean_of_requests_acceptance_length`, the mean over requests of tokens / rounds;
        `draft_acceptance_rate`, accepted / draft tokens (k * rounds, unless requests say what was drafted);
        `by_domain`, the same keys by domain. A number whose denominator is zero is None.
        Where the requests say what was drafted, also `draft_tokens`; `passes` of the target after the prompts', with a
        draft or without; and `tokens_per_pass`, tokens of the answers over these passes: what drafting is worth.

    Raises:
        InputError: k is below 1, or a round accepted fewer than 0 tokens or more than it drafted, at most k.
    """
    summary = _summarize(requests, k)
    domains = sorted({request.domain for request in requests})
    summary["by_domain"] = {
        domain: _summarize([request for request in requests if request.domain == domain], k) for domain in domains
    }
    return summary


def summarize_tree(requests: Sequence[RequestRounds], nodes: int, depth: int) -> dict[str, Any]:
    """The numbers of rounds that drafted a tree, under names of their own: a chain's must not stand beside them.

    Returns:
        `drafts`: "tree"; `nodes` and `depth` of the tree; `rounds`; `per_depth`, share of rounds whose accepted path
        reached depth i + 1; `mean_acceptance_length`, 1 + accepted / rounds, pooled;
        `mean_of_requests_acceptance_length`; `accepted_share_of_nodes`; `by_domain`, rounds and accept length of each.

    Raises:
        InputError: As `summarize`.
    """
    whole = summarize(requests, depth)
    accepted = sum(count for request in requests for count in request.accepted)
    return {
        "drafts": "tree",
        "nodes": nodes,
        "depth": depth,
        "rounds": whole["drafts"],
        "per_depth": whole["per_position"],
        **{name: whole[name] for name in ("mean_acceptance_length", "mean_of_requests_acceptance_length")},
        "accepted_share_of_nodes": _ratio(accepted, nodes * whole["drafts"]),
        "by_domain": {
            domain: {"rounds": one["drafts"], "mean_acceptance_length": one["mean_acceptance_length"]}
            for domain, one in whole["by_domain"].items()
        },
    }


def from_counters(
    num_drafts: int,
    num_accepted_tokens_per_pos: Sequence[int],
    *,
    num_draft_tokens: int | None = None,
    mean_of_requests: float | None = None,
) -> dict[str, Any]:
    """Compute the same object from vLLM's `spec_decode` counters; k is the length of the list.

    The counters know neither requests nor domains, so `by_domain` is empty and the mean of requests is what
    the caller measured, if anything. Near the model's length limit vLLM drafts less than k;
    `num_draft_tokens` is what it counted, k * num_drafts unless given.
    """
    drafted = num_drafts * len(num_accepted_tokens_per_pos) if num_draft_tokens is None else num_draft_tokens
    summary = _rates(num_drafts, num_accepted_tokens_per_pos, drafted)
    summary["mean_of_requests_acceptance_length"] = mean_of_requests
    return {**summary, "by_domain": {}}


def walk(hits_TK: Tensor, first: int, last: int, text_last: int | None = None) -> list[int]:
    """Replay the rounds that serving would run over a text that the target wrote greedily.

    The round of slot i has token i + 1 sampled and drafts tokens i + 2 ... i + 1 + K. It keeps the leading
    hits n, the target adds one token, and the next round is that of slot i + n + 1. The last round is the
    last one that starts before the answer's end: once token `last` is sampled, none follows.

    How vLLM 0.32 counts the end of an answer (v1/core/sched/scheduler.py):
    - `update_from_output` counts a round's accepted drafts before `_update_request_with_output` trims the new
      tokens at the end-of-turn token or at max_tokens. So drafts of the last round that lie BEHIND the
      answer's end count as accepted whenever they equal what the target would have gone on to write.
    - `schedule` clips drafts to the model's length limit and never to max_tokens, so the last round drafts
      K tokens like any other, and `num_drafts` counts it once.
    - a request that a stop ends is drafted for once more, but that round is never scheduled nor counted.

    Drafts behind the end can only be judged where the text goes on. `text_last` says how far the target's
    own greedy text is known (an answer evaluated at fewer tokens than it was written with); with K tokens
    known behind `last` the walk equals vLLM's counters exactly. Drafts behind `text_last` are taken as
    missed: the number of rounds and position 0 are exact even so, and each later position can lack at
    most one acceptance per answer, and only where the last round's drafts all hit up to the end.
    Within K tokens of max_model_len vLLM drafts nothing useful (v1/worker/gpu_model_runner.py,
    `_input_fits_in_drafter`), for the whole batch: keep prompt + answer + K below it.

    Args:
        hits_TK: Whether the draft of slot i at step j equals token i + 2 + j of the text.
        first: First slot, context_length - 1.
        last: Index of the answer's last token.
        text_last: Index of the last token known to be the target's greedy text; `last` unless given.

    Returns:
        Accepted drafts of each round, in order.

    Raises:
        InputError: The slots do not lie in `hits_TK`, or `text_last` lies before `last`.
    """
    num_slots = hits_TK.shape[0]
    known = last if text_last is None else text_last
    if first < 0 or known < last or last - 2 >= num_slots:
        raise InputError(f"walk: first={first}, last={last}, text_last={known} do not fit {num_slots} slots")
    leading_T = hits_TK.long().cumprod(dim=1).sum(dim=1).tolist()
    accepted = []
    slot = first
    while slot + 1 < last:
        accepted.append(min(leading_T[slot], known - slot - 1))
        slot += accepted[-1] + 1
    return accepted


def _summarize(requests: Sequence[RequestRounds], k: int) -> dict[str, Any]:
    kept = [count for one in requests for count in one.accepted]
    proposed = [
        count for one in requests for count in ([k] * len(one.accepted) if one.drafted is None else one.drafted)
    ]
    if k < 1 or not all(0 <= a <= b <= k for a, b in zip(kept, proposed, strict=True)):
        raise InputError(f"k={k}: rounds accept between 0 and k draft tokens, these {_extremes(kept)}")
    per_pos = [sum(count > position for count in kept) for position in range(k)]
    summary = _rates(sum(one.rounds for one in requests), per_pos, sum(proposed))
    lengths = [one.tokens_of_rounds / one.rounds for one in requests if one.rounds]
    summary["mean_of_requests_acceptance_length"] = _ratio(sum(lengths), len(lengths))
    if any(request.drafted is not None for request in requests):
        tokens = sum(request.num_tokens for request in requests)
        summary |= {
            "draft_tokens": sum(proposed),
            "passes": len(proposed),
            "tokens_per_pass": _ratio(tokens, len(proposed)),
        }
    return summary


def _rates(drafts: int, per_pos: Sequence[int], drafted: int) -> dict[str, Any]:
    accepted = sum(per_pos)
    return {
        "k": len(per_pos),
        "drafts": drafts,
        "per_position": [_ratio(count, drafts) for count in per_pos],
        "conditional": [_ratio(count, before) for count, before in zip(per_pos, [drafts, *per_pos], strict=False)],
        "mean_acceptance_length": 1 + accepted / drafts if drafts else None,
        "mean_of_requests_acceptance_length": None,
        "draft_acceptance_rate": _ratio(accepted, drafted),
    }


def _ratio(count: float, total: float) -> float | None:
    return count / total if total else None


def _extremes(rounds: Iterable[int]) -> str:
    values = list(rounds)
    return f"{min(values)} to {max(values)}" if values else "none"
