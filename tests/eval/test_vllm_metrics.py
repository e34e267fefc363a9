"""Numbers of a running vLLM: from its log lines, which vLLM's own class writes here, and from its counters."""

import random
import re
from typing import Any

import pytest
from drafthead.data.errors import InputError
from drafthead.eval.vllm_metrics import Count, DraftCounts, read_log, read_prometheus, summarize_counts

from tests.eval.vllm_source import take

EXAMPLE = (
    "(APIServer pid=7) INFO 11-30 17:00:00 [metrics.py:101] SpecDecoding metrics: Mean acceptance length: 2.65, "
    "Accepted throughput: 82.50 tokens/s, Drafted throughput: 150.00 tokens/s, Accepted: 1650 tokens, "
    "Drafted: 3000 tokens, Per-position acceptance rate: 0.750, 0.530, 0.370, Avg Draft acceptance rate: 55.0%\n"
)
OF_TWO = (
    "SpecDecoding metrics: Mean acceptance length: 2.00, Accepted throughput: 0.30 tokens/s, "
    "Drafted throughput: 0.60 tokens/s, Accepted: 3 tokens, Drafted: 6 tokens, "
    "Per-position acceptance rate: 0.667, 0.333, Avg Draft acceptance rate: 50.0%\n"
)
METRICS = "vllm:spec_decode_num_"


def rounds_at_random(k: int, rounds: int, seed: int, short: float = 0.0) -> list[tuple[int, int]]:
    """Drafted and accepted tokens of each round; a share `short` of the drafts has fewer than k."""
    draw = random.Random(seed)
    found = []
    for _ in range(rounds):
        drafted = draw.randint(1, k) if draw.random() < short else k
        accepted = 0
        while accepted < drafted and draw.random() < 0.7:
            accepted += 1
        found.append((drafted, accepted))
    return found


def counts_of(rounds: list[tuple[int, int]], k: int) -> DraftCounts:
    return DraftCounts(
        drafts=Count.exact(len(rounds)),
        per_position=tuple(Count.exact(sum(done > place for _, done in rounds)) for place in range(k)),
        draft_tokens=sum(drafted for drafted, _ in rounds),
        accepted_tokens=sum(done for _, done in rounds),
    )


def line_of(rounds: list[tuple[int, int]], k: int) -> str:
    """The line that vLLM's own class writes for these rounds."""
    vllm = take("v1/spec_decode/metrics.py", prometheus_client=_NoClient, SpeculativeConfig=Any)
    stats = vllm["SpecDecodingStats"].new(k)
    for drafted, accepted in rounds:
        stats.observe_draft(drafted, accepted)
    log = vllm["SpecDecodingLogging"]()
    log.observe(stats)
    lines: list[str] = []
    log.log(log_fn=lambda text, *values: lines.append(text % values))
    return lines[0]


class _NoClient:
    Counter = None


def test_the_example_line_gives_k_drafts_and_length() -> None:
    counts, lines = read_log([EXAMPLE], "vllm.log")
    report = summarize_counts(counts)
    assert (lines, report["k"], report["drafts"], report["exact"]) == (1, 3, 1000, True)
    assert report["mean_acceptance_length"] == 2.65
    assert report["per_position"] == [0.75, 0.53, 0.37]
    assert report["conditional"] == pytest.approx([0.75, 530 / 750, 370 / 530])
    assert report["draft_acceptance_rate"] == 0.55


@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("rounds", [1, 2, 37, 400])
def test_small_windows_of_full_drafts_are_recovered_exactly(k: int, rounds: int) -> None:
    happened = rounds_at_random(k, rounds, seed=rounds + k)
    counts, _ = read_log([line_of(happened, k)], "vllm.log")
    truth = counts_of(happened, k)
    # nothing accepted, and the number of drafts could be anything from D / k on
    if truth.accepted_tokens:
        assert counts == truth
    else:
        assert counts.drafts.value == rounds


@pytest.mark.parametrize("short", [0.0, 0.3], ids=["full", "short"])
@pytest.mark.parametrize("rounds", [5, 900, 20_000])
def test_what_happened_lies_in_the_intervals(rounds: int, short: float) -> None:
    k = 5
    happened = rounds_at_random(k, rounds, seed=rounds, short=short)
    truth = counts_of(happened, k)
    counts, _ = read_log([line_of(happened, k)], "vllm.log")
    assert counts.drafts.low <= truth.drafts.value <= counts.drafts.high
    for found, true in zip(counts.per_position, truth.per_position, strict=True):
        assert found.low <= true.value <= found.high
        assert found.low <= found.value <= found.high
    assert sum(count.value for count in counts.per_position) == counts.accepted_tokens == truth.accepted_tokens
    values = [count.value for count in counts.per_position]
    assert values == sorted(values, reverse=True)
    if rounds == 20_000:
        assert not counts.is_exact
        assert counts.drafts.high - counts.drafts.low < 0.01 * rounds
    elif short == 0.0:
        assert counts.is_exact


def test_lines_are_pooled_by_their_counts() -> None:
    """A window of 10 drafts must not weigh as much as one of 400."""
    few, many = [(3, 3)] * 10, rounds_at_random(3, 400, seed=1)
    pooled, lines = read_log(["noise\n", line_of(few, 3), line_of(many, 3)], "vllm.log")
    assert lines == 2
    assert pooled == counts_of(few + many, 3)
    assert pooled.since(counts_of(few, 3)) == counts_of(many, 3)


def test_counters_that_fall_are_those_of_a_new_server() -> None:
    before, after = counts_of([(3, 2)] * 9, 3), counts_of([(3, 1)] * 4, 3)
    assert after.since(before) == after


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "no whole line with 'SpecDecoding metrics:'"),
        ([EXAMPLE[:150]], "no whole line"),
        (["INFO DiffusionDecoding metrics: Committed token throughput: 1.00 tokens/s"], "diffusion"),
        ([EXAMPLE.replace("0.750, 0.530", "0.250, 0.530")], "vllm.log:1: its rates, 1650 accepted and 3000"),
        ([EXAMPLE.replace("Accepted: 1650", "Accepted: 1600")], "contradict each other"),
        ([EXAMPLE, OF_TWO], "vllm.log:2: drafts of 2 tokens, lines before it have 3"),
    ],
    ids=["empty", "torn", "diffusion", "rising rates", "wrong sum", "another k"],
)
def test_logs_that_say_nothing_are_named(lines: list[str], said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        read_log(lines, "vllm.log")


# ---- Prometheus ------------------------------------------------------------------------------------------


def exposed(engines: dict[int, list[tuple[int, int]]], k: int) -> str:
    """What `/metrics` gives after these rounds, written by vLLM's own class."""
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()

    def counter(**settings: Any) -> Any:
        return client.Counter(**settings, registry=registry)

    vllm = take(
        "v1/spec_decode/metrics.py",
        prometheus_client=client,
        SpeculativeConfig=Any,
        create_metric_per_engine=take("v1/metrics/utils.py", PromMetric=Any)["create_metric_per_engine"],
    )
    vllm["SpecDecodingProm"]._counter_cls = staticmethod(counter)

    class Config:
        num_speculative_tokens = k

    values = {engine: ["a model", str(engine)] for engine in engines}
    prometheus = vllm["SpecDecodingProm"](Config(), ["model_name", "engine"], values)
    for engine, rounds in engines.items():
        stats = vllm["SpecDecodingStats"].new(k)
        for drafted, accepted in rounds:
            stats.observe_draft(drafted, accepted)
        prometheus.observe(stats, engine)
    text: str = client.generate_latest(registry).decode()
    return text


def test_counters_are_summed_over_engines() -> None:
    one, other = rounds_at_random(11, 2500, seed=1), rounds_at_random(11, 300, seed=2, short=0.5)
    counts = read_prometheus(exposed({0: one, 1: other}, 11), "url")
    assert counts == counts_of(one + other, 11)
    assert counts.is_exact
    report = summarize_counts(counts)
    assert report["draft_acceptance_rate"] == counts.accepted_tokens / counts.draft_tokens
    assert 10 < report["mean_draft_length"] < 11


def test_a_server_that_drafted_nothing_yet() -> None:
    report = summarize_counts(read_prometheus(exposed({0: []}, 3), "url"))
    assert (report["k"], report["drafts"], report["per_position"]) == (3, 0, [None] * 3)
    assert report["intervals"] == {"drafts": [0, 0], "per_position": [None] * 3, "mean_acceptance_length": None}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "started with --speculative-config"),
        ("<html>hello</html>", "started with --speculative-config"),
        (f"{METRICS}drafts_total 3.0", "started with --speculative-config"),
        (f"{METRICS}drafts_total NaN", "is 'NaN', no count"),
        (
            "".join(
                f'{METRICS}{what}_total{{model_name="{model}",position="0"}} 1.0\n'
                for what in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
                for model in "ab"
            ),
            "several models (a, b)",
        ),
    ],
    ids=["empty", "a page", "a part", "NaN", "two models"],
)
def test_pages_without_the_counters_are_named(text: str, said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        read_prometheus(text, "url")
