"""Compare: the same prompts through the speculative loops of several runs and drafters, in one process.

    drafthead compare runs/eagle3 runs/medusa runs/mtp --prompts spec_bench.jsonl --k 3
    drafthead compare runs/eagle3 --drafter ngram --drafter suffix --temperature 0,0.7,1

Nothing is taken from the runs' own evaluations: every number here was measured side by side, with one copy of the
target. Every number has its interval, and a winner is named only where the prompts tell it from all others.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drafthead.data.files import write_json, write_text
from drafthead.eval.acceptance import RequestRounds
from drafthead.eval.bootstrap import DRAWINGS, LEVEL, METHOD, interval, listed
from drafthead.eval.intervals import tokens_per_pass
from drafthead.pipeline.compare_contestants import (
    CompareOptions,
    Contestant,
    Settings,
    check_comparable,
    common_prompts,
    open_contestants,
)
from drafthead.pipeline.compare_plot import render_svg
from drafthead.pipeline.compare_times import Times, cost_of, describe_times, measure_times, ms_per_token
from drafthead.pipeline.compare_verdict import find_winner
from drafthead.pipeline.evaluate import identical, requests_of, summarize_prompts
from drafthead.pipeline.loop import EvalOptions, Prompt
from drafthead.pipeline.run_dir import Run

PLAIN = "plain decoding"


def compare(runs: Sequence[Run], options: CompareOptions, out: Path) -> dict[str, Any]:
    """Measure the contestants side by side; write `compare.json` and a plot for each temperature below `out`.

    Returns:
        The object of `drafthead compare --json`: what was measured with, and under `temperatures` a section for each
        (`measure`); the first one's fields stand at the top as well.

    Raises:
        InputError: The runs cannot be compared; names what differs and both values.
    """
    settings = check_comparable(runs, options)
    chosen = common_prompts(runs, options.prompts, settings)
    contestants = open_contestants(runs, options, settings)
    sections = [measure(contestants, chosen.prompts, settings, one) for one in options.temperatures]
    described = {
        "target": str(runs[0].served_target.path),
        "prompts_file": None if options.prompts is None else str(options.prompts),
        "prompts": len(chosen.prompts),
        "left_out": chosen.left_out,
        "k": settings.k,
        "max_new_tokens": settings.max_new_tokens,
        "dtype": settings.dtype,
        "method": "speculative loops in transformers, chains of greedy drafts, full vocabulary; times at batch 1",
        "intervals": {"level": LEVEL, "drawings": DRAWINGS, "method": METHOD},
        "context_length": "tokens of the prompt, in buckets by powers of two",
    }
    for place, section in enumerate(sections):
        plot = out / (f"compare-temperature-{section['temperature']:g}.svg" if place else "compare.svg")
        write_text(plot, render_svg({**described, **section}))
        section["plot"] = str(plot.resolve())
    report = {**described, **sections[0], "temperatures": sections}
    write_json(out / "compare.json", report)
    return report


def measure(
    contestants: Sequence[Contestant], prompts: list[Prompt], settings: Settings, temperature: float
) -> dict[str, Any]:
    """All numbers at one temperature.

    Returns:
        `temperature`; `timed_prompts`, how many; of the target alone `plain_ms_per_token`, a median, and
        `mean_plain_ms_per_token` with its interval, over which each `mean_speedup` stands; under `runs`, in the
        order given, each contestant's numbers (`summarize_prompts`, `describe_times`); `winners`, by `tokens_per_pass`
        and by `decode_time`, in which plain decoding takes part (`find_winner`).
    """
    evaluation = EvalOptions(k=settings.k, temperature=temperature, max_new_tokens=settings.max_new_tokens, limit=None)
    # sampled texts differ by what was drafted: the verifier keeps their distribution, not the text
    plain = contestants[0].loop.generate(prompts, evaluation, k=0) if temperature == 0 else None
    answers = [one.loop.generate(prompts, evaluation, k=settings.k) for one in contestants]
    times = measure_times(contestants, prompts, settings, temperature)
    alone = ms_per_token(times.plain)
    return {
        "temperature": temperature,
        "timed_prompts": len(times.plain),
        "plain_ms_per_token": cost_of(times.plain).ms_per_token,
        "mean_plain_ms_per_token": alone.value,
        "mean_plain_ms_per_token_interval": listed(interval(alone)),
        "runs": [
            {
                "name": one.name,
                **one.about,
                **summarize_prompts(prompts, some, settings.k),
                "identical_to_plain": identical(some, plain),
                **describe_times(taken, times.plain),
            }
            for one, some, taken in zip(contestants, answers, times.drafted, strict=True)
        ],
        "winners": find_winners(contestants, [requests_of(prompts, some) for some in answers], times),
    }


def find_winners(
    contestants: Sequence[Contestant], requests: list[list[RequestRounds]], times: Times
) -> dict[str, dict[str, Any]]:
    names = [one.name for one in contestants]
    lengths = dict(zip(names, map(tokens_per_pass, requests), strict=True))
    seconds = dict(zip([PLAIN, *names], map(ms_per_token, [times.plain, *times.drafted]), strict=True))
    return {
        "tokens_per_pass": find_winner(lengths, more_wins=True, what="tokens per pass"),
        "decode_time": find_winner(seconds, more_wins=False, what="decode time (ms per token, batch 1)"),
    }
