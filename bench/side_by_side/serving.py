"""Exported heads behind a real vLLM: what its counters say of them on given prompts, greedy and in fp32."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drafthead.data.files import read_json, write_json
from drafthead.eval.engine import EngineConfig, Request
from drafthead.eval.served import measure
from drafthead.pipeline.loop import Prompt

K = 3


def serve_head(
    target: Path, head: Path, prompts: Sequence[Prompt], max_new_tokens: int, report: Path, k: int = K
) -> dict[str, Any]:
    """Serve the target with an EAGLE-3 head, or read what an earlier call left in `report`.

    Returns:
        `served`, an object of `acceptance.from_counters`, `texts`, the ids of each answer, and `accepted`, the draft
        tokens kept in each of its rounds.
    """
    if not report.is_file():
        config = EngineConfig(
            model=str(target.resolve()),
            dtype="float32",
            max_num_seqs=64,
            speculative_config={"method": "eagle3", "model": str(head.resolve()), "num_speculative_tokens": k},
        )
        requests = [
            Request(key=str(number), prompt_ids=prompt.ids, max_new_tokens=max_new_tokens)
            for number, prompt in enumerate(prompts)
        ]
        found = measure(config, requests, [], report.with_suffix(".log"))
        results = [found.results[str(number)] for number in range(len(prompts))]
        texts, accepted = [one.token_ids for one in results], [one.accepted for one in results]
        write_json(report, {"served": found.rates(), "texts": texts, "accepted": accepted})
    value: dict[str, Any] = read_json(report)
    return value


def show_rates(rates: Sequence[float | None]) -> str:
    return " ".join("-" if rate is None else f"{rate:.3f}" for rate in rates)
