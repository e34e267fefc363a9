"""How far the answers that a head is trained on are from what the target would write, by source.

A head drafts for the target's own text; trained on somebody else's, it is good at that and slow in serving. The states
that `capture` stored give the target's distribution at every answer position for one product with its lm_head, so a
sample of them costs seconds. Whether answers are the target's own does not depend on how they were sampled:

    gap = mean of log p(token) - E_p[log p]

is zero for text that the target sampled at temperature 1, above zero for greedy text, and below it for the text of
others, which surprises the target more than its own would.

Shapes: R answer positions, V target vocabulary, D hidden.
"""

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from drafthead.data.encoding import Row
from drafthead.data.files import digest
from drafthead.data.shards import Store
from drafthead.pipeline.state_logits import StateLogits
from drafthead.pipeline.target import Target
from torch import Tensor

TOKENS_PER_SOURCE = 2048
CHUNK = 256
"""Answer positions whose logits are held at a time."""
MAX_GAP = 0.2
"""Nats a token by which answers may surprise the target more than its own text would."""
LEAST_ERRORS = 3
"""A gap counts from so many standard errors on."""


def measure_on_policy(
    target: Target, rows: list[Row], store: Store, *, tokens_per_source: int = TOKENS_PER_SOURCE
) -> dict[str, Any]:
    """Measure a sample of each source's answers; rows without states are left out.

    Returns:
        `sources`: by name `rows`, `tokens` (both of the sample), `mean_logprob`, `expected_logprob` (what text that the
        target samples would have), `gap` and its standard error `gap_error` (all nats a token), `top1_agreement`;
        `warnings`: a line for each source whose answers are not the target's.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits = StateLogits(target, device)
    sources: dict[str, dict[str, float]] = {}
    for source, sample in _samples(rows, store, tokens_per_source):
        scores = [
            _score(logits(states_RD), tokens_R)
            for row in sample
            for states_RD, tokens_R in _answer_states(row, store, device)
        ]
        sources[source] = {"rows": len(sample), **_summary(torch.cat(scores, dim=1))}
    return {"sources": sources, "warnings": list(_warnings(sources))}


def show_on_policy(measured: dict[str, Any]) -> None:
    """Print the measure to stderr, a line for each source, warnings last."""
    for source, found in measured["sources"].items():
        print(
            f"on-policy: {source}: mean log-probability {found['mean_logprob']:.3f} (the target's own "
            f"text: {found['expected_logprob']:.3f}), top-1 agreement {found['top1_agreement']:.1%}, "
            f"{found['tokens']:,} tokens",
            file=sys.stderr,
        )
    for warning in measured["warnings"]:
        print(f"WARNING: {warning}", file=sys.stderr)


# ---- a sample and its scores -----------------------------------------------------------------------------


def _samples(rows: list[Row], store: Store, tokens_per_source: int) -> Iterator[tuple[str, list[Row]]]:
    """Rows of each source in an order that their names decide, up to so many answer tokens."""
    by_source: dict[str, list[Row]] = defaultdict(list)
    stored = set(store.ids())
    for row in sorted(rows, key=lambda row: digest(row.key)):
        if row.key in stored and row.context_length > 0:
            by_source[row.source].append(row)
    for source in sorted(by_source):
        sample: list[Row] = []
        tokens = 0
        for row in by_source[source]:
            if tokens >= tokens_per_source:
                break
            sample.append(row)
            tokens += len(row.input_ids) - row.context_length
        yield source, sample


def _answer_states(row: Row, store: Store, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """The states before the final norm that predict the answer's tokens [R, D], and these tokens [R], in chunks."""
    first, _ = store.last_window(row.key)
    last = store.kept_last(row.key)[row.context_length - 1 - first : len(row.input_ids) - 1 - first]
    tokens = torch.tensor(row.input_ids[row.context_length :])
    assert len(last) == len(tokens), row.key
    for start in range(0, len(tokens), CHUNK):
        chunk = slice(start, start + CHUNK)
        yield last[chunk].to(device), tokens[chunk].to(device)


def _score(logits_RV: Tensor, tokens_R: Tensor) -> Tensor:
    """[3, R] fp64 of the tokens: their log-probability, its expectation, whether they are the most likely ones."""
    logprob_RV = logits_RV.log_softmax(-1)
    own_R = logprob_RV.gather(-1, tokens_R[:, None])[:, 0]
    expected_R = (logprob_RV.exp() * logprob_RV).sum(-1)
    return torch.stack([own_R, expected_R, (logits_RV.argmax(-1) == tokens_R).float()]).double().cpu()


def _summary(scores_3R: Tensor) -> dict[str, float]:
    own, expected, agreed = scores_3R.mean(1).tolist()
    gap_R = scores_3R[0] - scores_3R[1]
    count = len(gap_R)
    return {
        "tokens": count,
        "mean_logprob": own,
        "expected_logprob": expected,
        "gap": own - expected,
        "gap_error": float(gap_R.std(correction=0)) / count**0.5,
        "top1_agreement": agreed,
    }


def _warnings(sources: dict[str, dict[str, float]]) -> Iterable[str]:
    for source, found in sources.items():
        gap, error = found["gap"], found["gap_error"]
        if not (gap >= -MAX_GAP or gap >= -LEAST_ERRORS * error):  # NaN is no pass
            yield (
                f"{source}: these answers are not what the target writes: mean log-probability "
                f"{found['mean_logprob']:.3f} where its own text has {found['expected_logprob']:.3f}, top-1 agreement "
                f"{found['top1_agreement']:.1%}; let the target answer (respond.engine=vllm), or expect fewer accepted "
                f"tokens in serving than in training"
            )
