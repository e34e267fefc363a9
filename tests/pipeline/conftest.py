"""A run that was served too, without a server: the tiny run with a served check whose numbers are made up."""

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from drafthead.data.files import write_json
from drafthead.eval.acceptance import RequestRounds, from_counters, summarize
from drafthead.pipeline.publish import publish
from drafthead.pipeline.run_dir import Run, open_run
from drafthead.pipeline.stages import STAGES

from tests.conftest import set_environment

DOMAINS = ("code", "self-written", "translation")
SERVED_K = (3, 2)


def made_up_check(run: Run) -> dict[str, Any]:
    """A report as `serve_check.check_prompts` writes it."""
    draw = random.Random(3)
    by_k = {}
    for k in SERVED_K:
        predicted, walk = (
            summarize(
                [
                    RequestRounds(domain=one, accepted=[draw.randint(0, k) for _ in range(9)], num_tokens=30)
                    for one in DOMAINS
                ],
                k,
            )
            for _ in range(2)
        )
        counts = [round(rate * walk["drafts"]) for rate in walk["per_position"]]
        served = from_counters(walk["drafts"], counts) | {"by_domain": walk["by_domain"]}
        by_k[str(k)] = {
            "ok": True,
            "failures": [],
            "k": k,
            "predicted": predicted,
            "walk": walk,
            "served": served,
            "identical_to_plain": "3/3",
            "ms_per_token": 20.5 + k,
            "speedup_batch_1": 31.25 / (20.5 + k),
        }
    first = by_k[str(SERVED_K[0])]
    report = {
        "ok": True,
        "failures": [],
        "prompts": 3,
        "left_out": {},
        **{name: first[name] for name in ("k", "predicted", "served", "walk", "identical_to_plain", "speedup_batch_1")},
        "plain_ms_per_token": 31.25,
        "speculative_ms_per_token": first["ms_per_token"],
        "dtype": "float32",
        "max_new_tokens": 24,
        "by_k": by_k,
    }
    write_json(run.folder("serve-check") / "report.json", report)
    return {}


@pytest.fixture(scope="session")
def served_run(tiny_run: Run, cache_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run, its card written and its W&B files complete; tests must not change its files."""
    folder = tmp_path_factory.mktemp("served") / "tiny"
    shutil.copytree(tiny_run.path, folder, symlinks=True)
    shutil.rmtree(folder / "export")  # which names its own path
    stages = {**STAGES, "serve-check": replace(STAGES["serve-check"], work=made_up_check)}
    with pytest.MonkeyPatch.context() as patch:
        set_environment(patch, cache_folder)
        run = open_run(folder, stages, [])
        for name in ("export", "serve-check"):
            run.run_stage(name)
        publish(run)
    return run
