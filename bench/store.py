"""Bytes a token of stored states by their type, and what each type costs a head in accept length.

    python bench/store.py [--recipe eagle3] [--folder runs/store-bench] [--dtype int8] [--seeds 2] [--serve 64]
                          [--whole] [--json] [key=value ...]

One head is trained for each type, everything else alike; all are walked over the same held-out answers with the states
of the first type, since serving has the target's own. How to read the table: bench/README.md.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
# this folder's kernels.py bears the name of a package that transformers looks for
sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() != ROOT / "bench"]

from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from drafthead.data.encoding import Row, read_rows  # noqa: E402
from drafthead.data.files import read_json  # noqa: E402
from drafthead.data.quantize import CODES  # noqa: E402
from drafthead.data.shards import ShardWriter, Store  # noqa: E402
from drafthead.eval.acceptance import RequestRounds, summarize  # noqa: E402
from drafthead.eval.bootstrap import difference_error  # noqa: E402
from drafthead.eval.intervals import pooled_length  # noqa: E402
from drafthead.pipeline.capture import length_batches, store_info  # noqa: E402
from drafthead.pipeline.cli import quiet_libraries  # noqa: E402
from drafthead.pipeline.cores import keep_freed_memory  # noqa: E402
from drafthead.pipeline.evaluate import load_prompts  # noqa: E402
from drafthead.pipeline.heads.build import load_head  # noqa: E402
from drafthead.pipeline.heldout import heldout_requests  # noqa: E402
from drafthead.pipeline.recipe import Recipe, load_recipe  # noqa: E402
from drafthead.pipeline.respond import SPLITS  # noqa: E402
from drafthead.pipeline.run_dir import MANIFEST, Run, Stage, create_run  # noqa: E402
from drafthead.pipeline.stages import STAGES  # noqa: E402
from drafthead.pipeline.train import work  # noqa: E402
from drafthead.pipeline.train_inputs import Inputs  # noqa: E402

sys.path.append(str(ROOT / "bench"))
from side_by_side.serving import serve_head, show_rates  # noqa: E402

sys.path.remove(str(ROOT / "bench"))

DTYPES = ("bfloat16", "int8", "fp8")
SMALL = (
    "prompts.sources=[{source: 'builtin:self-written', limit: 200}]",
    "prompts.heldout=0.25",
    "prompts.heldout_limit=40",
    "train.tokens=60k",
)
"""What makes a recipe a matter of minutes; the answers to these prompts come with the built-in target."""
ALWAYS = ("train.evaluate_every=1000000", "train.checkpoint_every=1000000", "eval.limit=1", "eval.max_new_tokens=8")
"""An export wants an evaluation before it; here walk and server say what a head is worth."""


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    quiet_libraries()
    keep_freed_memory()
    dtypes = options.dtype or list(DTYPES)
    exact = make_run(dtypes[0], 0, options, None)
    inputs = Inputs.open(exact)
    rows = []
    for seed in range(options.seeds):
        first: dict[str, RequestRounds] = {}
        for dtype in dtypes:
            run = make_run(dtype, seed, options, exact)
            row, requests = measure(dtype, run, exact, inputs, options)
            first = first or requests
            difference, error = compare_walks(first, requests)
            rows.append({**row, "seed": seed, "difference": difference, "standard_error": error})
    report = {"recipe": options.recipe, "overrides": options.overrides, "rows": rows}
    print(json.dumps(report) if options.json else render(rows))
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Bytes and accept length by the type of stored states.")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the recipe")
    parser.add_argument("--recipe", default="eagle3")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "store-bench", help="for the runs")
    parser.add_argument("--dtype", action="append", help="may be repeated; the others are held against the first")
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each type")
    parser.add_argument("--serve", type=int, default=0, metavar="N", help="also serve N held-out prompts with vLLM")
    parser.add_argument("--whole", action="store_true", help="the recipe's own prompts and tokens, not a few")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    return parser.parse_intermixed_args(argv)


# ---- runs that differ in the type of their states, or in the seed of their training ----------------------


def make_run(dtype: str, seed: int, options: argparse.Namespace, exact: Run | None) -> Run:
    """A run up to its trained head, exported if it is to be served; finished stages are kept."""
    own = [f"run.dir={options.folder}", f"run.name={dtype}-{seed}", f"capture.dtype={dtype}"]
    recipe = load_recipe(options.recipe, [*([] if options.whole else SMALL), *ALWAYS, *options.overrides, *own])
    reseeded = with_seed(recipe, recipe.run.seed + seed)
    run = create_run(reseeded, stages_of(recipe.run.seed, exact if dtype in CODES else None))
    last = "export" if options.serve else "train"
    for name in STAGES:
        run.run_stage(name)
        if name == last:
            break
    return run


def with_seed(recipe: Recipe, seed: int) -> Recipe:
    return recipe.model_copy(update={"run": recipe.run.model_copy(update={"seed": seed})})


def stages_of(seed: int, exact: Run | None) -> dict[str, Stage]:
    """The stages, of which those before training keep one seed, and states are taken from `exact` where they can."""

    def keeps_seed(stage: Stage) -> Stage:
        return replace(stage, settings=lambda recipe: stage.settings(with_seed(recipe, seed)))

    stages = {name: keeps_seed(stage) if stage.shared else stage for name, stage in STAGES.items()}
    stages["train"] = replace(stages["train"], work=train_here)
    if exact is not None and exact.recipe.capture.dtype == "bfloat16":
        stages["capture"] = replace(stages["capture"], work=lambda run: code_again(exact, run))
    return stages


def train_here(run: Run) -> dict[str, Any]:
    """As the stage, in this process: the stage's worker would look for states of its own seed."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    work(run)
    report: dict[str, Any] = read_json(run.folder("train") / "report.json")
    return report


def code_again(exact: Run, run: Run) -> dict[str, Any]:
    """Write the store that capture would, from one of the same rows in bf16.

    That is the type in which capture has states of one byte a value before it codes them, in the same order of rows, so
    the files are equal (tests/test_bench_store.py).
    """
    settings = run.recipe.capture
    info = store_info(run.recipe, run.target)
    tokens = 0
    for split in SPLITS:
        rows: list[Row] = read_rows(run.input("encode") / f"{split}.parquet")
        store = Store(exact.input("capture") / split)
        writer = ShardWriter(run.folder("capture") / split, info, settings.shard_tokens)
        for batch in length_batches(rows, settings.batch_tokens):
            for row in batch:
                tokens += len(row.input_ids)
                if row.key not in writer.done and row.key in store.where:
                    writer.add(row, *store.get(row.key))
        writer.finish()
    size = sum(path.stat().st_size for path in run.folder("capture").rglob("shard-*"))
    return {"layer_ids": info.layer_ids, "bytes_per_token": round(size / max(1, tokens), 1)}


# ---- what they are worth ---------------------------------------------------------------------------------


def measure(
    dtype: str, run: Run, exact: Run, inputs: Inputs, options: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, RequestRounds]]:
    """The line of the table, and the rounds of each held-out answer."""
    counts = read_json(run.input("capture") / MANIFEST)["counts"]
    head, _ = load_head(run.folder("train"), run.target)
    requests = heldout_requests(Accelerator(cpu=True), head.float(), inputs, run.recipe)
    stored, wanted = (Store(one.input("capture") / "train") for one in (run, exact))
    row = {
        "dtype": dtype,
        "bytes_per_token": counts["bytes_per_token"],
        "relative_error": relative_error(stored, wanted),
        "walk": summarize(list(requests.values()), run.recipe.eval.k),
        "served": None,
    }
    if options.serve:
        chosen = load_prompts(run, None, options.serve, run.recipe.serve_check.max_new_tokens)
        row["served"] = serve_head(
            run.target.path,
            run.folder("export"),
            chosen.prompts,
            run.recipe.serve_check.max_new_tokens,
            run.path / f"served-{len(chosen.prompts)}.json",
        )["served"]
    return row, requests


def relative_error(stored: Store, wanted: Store, rows: int = 50) -> float:
    """Median over the vectors of some rows of |stored - wanted| / |wanted|."""
    errors = []
    for row_id in list(wanted.ids())[:rows]:
        pairs = zip(stored.get(row_id)[0], wanted.get(row_id)[0], strict=True)
        errors += [(one.float() - other.float()).norm(dim=-1) / other.float().norm(dim=-1) for one, other in pairs]
    return float(torch.cat(errors).median())


def compare_walks(first: dict[str, RequestRounds], other: dict[str, RequestRounds]) -> tuple[float, float]:
    """Accept length of `other` less that of `first` over the same answers, and its standard error by resampling."""
    everyone = sorted(first)
    before, after = (pooled_length([requests[key] for key in everyone]) for requests in (first, other))
    error = difference_error(after, before)
    assert before.value is not None
    assert after.value is not None
    assert error is not None, "two answers at least"
    return after.value - before.value, error


def render(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| states | seed | bytes/token on disk | of the first | relative error | walk per position | accept length | "
        "less the first's | served per position | accept length |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        walk, served = row["walk"], row["served"]
        shown = f"{show_rates(served['per_position'])} | {served['mean_acceptance_length']:.3f}" if served else "- | -"
        lines.append(
            f"| {row['dtype']} | {row['seed']} | {row['bytes_per_token']:,.0f} | "
            f"{row['bytes_per_token'] / rows[0]['bytes_per_token']:.3f} | {row['relative_error']:.4f} | "
            f"{show_rates(walk['per_position'])} | {walk['mean_acceptance_length']:.3f} | "
            f"{row['difference']:+.4f} ± {row['standard_error']:.4f} | {shown} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
