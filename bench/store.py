"""Bytes a token of stored states by their type, and what each type costs a head in accept length.

    python bench/store.py [--recipe eagle3] [--folder runs/store-bench] [--dtype int8] [--json] [key=value ...]

One head is trained for each type, everything else alike; all are walked over the same held-out answers with the states
of the first type, since serving has the target's own. How to read the table: bench/README.md.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
# this folder's kernels.py bears the name of a package that transformers looks for
sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() != ROOT / "bench"]

from accelerate import Accelerator  # noqa: E402
from drafthead.data.files import read_json  # noqa: E402
from drafthead.data.shards import Store  # noqa: E402
from drafthead.pipeline.heads.build import load_head  # noqa: E402
from drafthead.pipeline.heldout import heldout_walk  # noqa: E402
from drafthead.pipeline.recipe import load_recipe  # noqa: E402
from drafthead.pipeline.run_dir import MANIFEST, Run, create_run  # noqa: E402
from drafthead.pipeline.stages import STAGES  # noqa: E402
from drafthead.pipeline.train_inputs import Inputs  # noqa: E402

DTYPES = ("bfloat16", "int8", "fp8")
SMALL = (
    "prompts.sources=[{source: 'builtin:self-written', limit: 200}]",
    "prompts.heldout=0.25",
    "prompts.heldout_limit=40",
    "train.tokens=60k",
    "train.evaluate_every=100000",
    "train.checkpoint_every=100000",
)
"""What makes a recipe a matter of minutes; the answers to these prompts come with the built-in target."""


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    runs = {dtype: train_on(dtype, options) for dtype in options.dtype or DTYPES}
    exact = next(iter(runs.values()))
    inputs = Inputs.open(exact)
    rows = [measure(dtype, run, exact, inputs) for dtype, run in runs.items()]
    report = {"recipe": options.recipe, "overrides": [*SMALL, *options.overrides], "rows": rows}
    print(json.dumps(report) if options.json else render(rows))
    return 0


def train_on(dtype: str, options: argparse.Namespace) -> Run:
    """A run up to its trained head, with states stored as `dtype`; it shares all stages before capture."""
    own = [f"run.dir={options.folder}", f"run.name={dtype}", f"capture.dtype={dtype}"]
    run = create_run(load_recipe(options.recipe, [*SMALL, *options.overrides, *own]), STAGES)
    for name in STAGES:
        run.run_stage(name)
        if name == "train":
            break
    return run


def measure(dtype: str, run: Run, exact: Run, inputs: Inputs) -> dict[str, Any]:
    counts = read_json(run.input("capture") / MANIFEST)["counts"]
    head, _ = load_head(run.folder("train"), run.target)
    walked = heldout_walk(Accelerator(cpu=True), head.float(), inputs, run.recipe)
    stored, wanted = (Store(one.input("capture") / "train") for one in (run, exact))
    return {
        "dtype": dtype,
        "bytes_per_token": counts["bytes_per_token"],
        "relative_error": relative_error(stored, wanted),
        "per_position": walked["per_position"],
        "accept_length": walked["mean_acceptance_length"],
    }


def relative_error(stored: Store, wanted: Store, rows: int = 50) -> float:
    """Median over the vectors of some rows of |stored - wanted| / |wanted|."""
    errors = []
    for row_id in list(wanted.ids())[:rows]:
        pairs = zip(stored.get(row_id)[0], wanted.get(row_id)[0], strict=True)
        errors += [(one.float() - other.float()).norm(dim=-1) / other.float().norm(dim=-1) for one, other in pairs]
    return float(torch.cat(errors).median())


def render(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| states | bytes/token on disk | of the first | relative error | walk per position | accept length |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        rates = " ".join(f"{rate:.3f}" for rate in row["per_position"])
        lines.append(
            f"| {row['dtype']} | {row['bytes_per_token']:,.0f} | "
            f"{row['bytes_per_token'] / rows[0]['bytes_per_token']:.3f} | {row['relative_error']:.4f} | {rates} | "
            f"{row['accept_length']:.3f} |"
        )
    return "\n".join(lines)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Bytes and accept length by the type of stored states.")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the recipe")
    parser.add_argument("--recipe", default="eagle3")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "store-bench", help="for the runs")
    parser.add_argument("--dtype", action="append", help="may be repeated; the others are held against the first")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    return parser.parse_intermixed_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
