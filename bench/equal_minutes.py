"""Equal minutes on equal states: an EAGLE-3 head trained by drafthead and one by speculators, both served by vLLM.

    python bench/equal_minutes.py runs/eagle3 --speculators /path/to/its/environment/bin/python \
        --prompts spec_bench.jsonl [--theirs runs/other] [--minutes 6] [--k 3] [--only ours] [--json]

Every piece (ours, speculators, served) leaves its numbers in the folder and is not done again. How to read the table:
bench/README.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
# this folder's kernels.py bears the name of a package that transformers looks for
sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() != ROOT / "bench"]

from accelerate import Accelerator  # noqa: E402
from drafthead.data.batches import Pack, stream_packs  # noqa: E402
from drafthead.data.conversations import read_conversations  # noqa: E402
from drafthead.data.errors import InputError  # noqa: E402
from drafthead.data.files import read_json, read_jsonl, write_json, write_jsonl  # noqa: E402
from drafthead.eval.acceptance import RequestRounds  # noqa: E402
from drafthead.eval.bootstrap import listed, ratio_interval  # noqa: E402
from drafthead.eval.intervals import pooled_length  # noqa: E402
from drafthead.pipeline.cli import quiet_libraries  # noqa: E402
from drafthead.pipeline.cores import keep_freed_memory  # noqa: E402
from drafthead.pipeline.evaluate import PromptSet, load_prompts  # noqa: E402
from drafthead.pipeline.heads.build import build_head, load_head  # noqa: E402
from drafthead.pipeline.heads.warm_start import PUBLISHED, Checkpoint, load_warm_start  # noqa: E402
from drafthead.pipeline.heldout import heldout_walk  # noqa: E402
from drafthead.pipeline.recipe import Eagle3Config, load_recipe  # noqa: E402
from drafthead.pipeline.run_dir import Run, create_run, open_run  # noqa: E402
from drafthead.pipeline.stages import STAGES  # noqa: E402
from drafthead.pipeline.train_inputs import Inputs, loader_of  # noqa: E402

sys.path.append(str(ROOT / "bench"))
from side_by_side.packs import write_packs  # noqa: E402
from side_by_side.serving import K, serve_head, show_rates  # noqa: E402

sys.path.remove(str(ROOT / "bench"))

PEER = ROOT / "bench" / "side_by_side" / "speculators_train.py"
BAR = 1.2
"""Times speculators' served accept length that ours has to reach."""
TRIAL_TOKENS = 60_000
LATER = 0.95
"""Speed of a whole training of ours relative to that of its beginning: more drafts survive, and are trained, later."""
PEER_TOKENS_PER_S = 1_500
"""Tokens laid ready for each second of speculators' training; if it takes more, it reads them again."""
SHORT_EVAL = ("eval.limit=1", "eval.max_new_tokens=8")
"""An export wants an evaluation before it; here the server says what a head is worth."""
MAX_CHARS = 2_500
"""Longer first turns are left out."""
MAX_NEW_TOKENS = 96


def main(argv: Sequence[str] | None = None) -> int:
    if argv is None and len(sys.argv) == 1:  # `make bench`
        print(f"{Path(__file__).name}: takes 20 minutes and a run; see bench/README.md", file=sys.stderr)
        return 0
    options = _options(argv)
    os.environ.setdefault("WANDB_MODE", "disabled")
    quiet_libraries()
    keep_freed_memory()  # of both: children inherit it
    base = open_run(options.run, STAGES, [])
    if not isinstance(base.recipe.head, Eagle3Config):
        raise InputError(f"{options.run}: a {base.recipe.head.type} head; the comparison is of EAGLE-3 heads")
    options.folder.mkdir(parents=True, exist_ok=True)
    for piece in [options.only] if options.only else PIECES:
        PIECES[piece](base, options)
    report = read_report(options.folder, options.k)
    print(json.dumps(report, indent=1) if options.json else render(report))
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Served accept length after equal minutes on equal states.")
    parser.add_argument("run", type=Path, help="an EAGLE-3 run whose states and draft vocabulary are used")
    parser.add_argument("--speculators", help="the Python interpreter of an environment with speculators")
    parser.add_argument(
        "--theirs", type=Path, help="a run of the same states, whose draft vocabulary speculators gets; RUN's if not"
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "equal-minutes", help="for what is made")
    parser.add_argument("--minutes", type=float, default=6.0, help="of pure training, each")
    parser.add_argument("--step-tokens", type=int, help="of speculators; those of our step unless given")
    parser.add_argument("--prompts", type=Path, help="a file of prompts; the run's held-out ones unless given")
    parser.add_argument("--k", type=int, default=K, help="draft tokens of a served round")
    parser.add_argument("--limit", type=int, default=48, help="prompts that are served, the domains in turn")
    parser.add_argument("--only", choices=PIECES, help="one piece; the others another time")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    return parser.parse_args(argv)


# ---- ours ------------------------------------------------------------------------------------------------


def train_ours(base: Run, options: argparse.Namespace) -> None:
    """Train by the run's own recipe, with as many tokens as fit into the minutes by a short trial; export."""
    path = options.folder / "ours.json"
    if path.is_file():
        return
    trial = through(base, options.folder, "trial", TRIAL_TOKENS, "train")
    tokens, seconds = trained(trial)
    run = through(base, options.folder, "ours", int(tokens / seconds * LATER * 60 * options.minutes), "export")
    tokens, seconds = trained(run)
    log = read_jsonl(run.path / "train" / "log.jsonl")
    head, _ = load_head(run.folder("train"), run.target)
    found = {
        "tokens": tokens,
        "seconds": seconds,
        "steps": run.report("train")["steps"],
        "loss": [row["loss"] for row in log if "loss" in row][-1],
        "walk": heldout_walk(Accelerator(cpu=True), head.float(), Inputs.open(run), run.recipe),
        "checkpoint": str(run.folder("export").resolve()),
    }
    write_json(path, found)


def through(base: Run, folder: Path, name: str, tokens: int, last: str) -> Run:
    """A run like `base` whose training sees so many tokens, done up to a stage; it takes base's states."""
    own = [f"run.dir={folder}", f"run.name={name}", f"train.tokens={tokens}"]
    quiet = ["train.evaluate_every=1000000", "train.checkpoint_every=1000000", *SHORT_EVAL]
    run = create_run(load_recipe(str(base.path / "recipe.yaml"), [*own, *quiet]), STAGES)
    for stage in STAGES:
        if STAGES[stage].shared and run.key(stage) != base.key(stage):
            raise InputError(f"{base.path}: stage {stage} was made by another version; run it again")
        run.run_stage(stage)
        if stage == last:
            break
    return run


def trained(run: Run) -> tuple[int, float]:
    """Tokens that a finished training has seen, and the seconds that its steps took, walks left out."""
    rows = [row for row in read_jsonl(run.path / "train" / "log.jsonl") if "tokens_per_s" in row]
    before = [0, *(row["tokens"] for row in rows)]
    seconds = sum((row["tokens"] - last) / row["tokens_per_s"] for row, last in zip(rows, before, strict=False))
    return rows[-1]["tokens"], seconds


# ---- speculators -----------------------------------------------------------------------------------------


def train_peer(base: Run, options: argparse.Namespace) -> None:
    """Train speculators' model on the same rows in the same order, for as many seconds as ours took."""
    path = options.folder / "speculators.json"
    if path.is_file():
        return
    base = same_states(base, options.theirs)
    if not options.speculators:
        raise InputError("--speculators: give the Python interpreter of an environment with speculators")
    seconds = read_json(options.folder / "ours.json")["seconds"]
    inputs = Inputs.open(base)
    checkpoint = options.folder / "speculators"
    with tempfile.TemporaryDirectory(dir=options.folder) as laid_out:
        packs = whole_steps(base, inputs, options.step_tokens, int(seconds * PEER_TOKENS_PER_S))
        more = {"seconds": seconds, "out": str(checkpoint.resolve()), "seed": base.recipe.run.seed}
        write_packs(Path(laid_out), base, packs, **more)
        subprocess.run([options.speculators, str(PEER), laid_out], check=True)
        found = read_json(Path(laid_out) / "report.json")
    write_json(path, {**found, "walk": walk_peer(base, inputs, checkpoint), "checkpoint": str(checkpoint.resolve())})


def same_states(base: Run, other: Path | None) -> Run:
    """The run whose draft vocabulary speculators gets: another one over the same rows and states, or `base`.

    Raises:
        InputError: Its rows or states are others.
    """
    if other is None:
        return base
    run = open_run(other, STAGES, [])
    for stage in ("encode", "capture"):
        if run.key(stage) != base.key(stage):
            raise InputError(
                f"--theirs {other}: stage {stage} is not that of {base.path}; give a run of the same states"
            )
    return run


def whole_steps(base: Run, inputs: Inputs, step_tokens: int | None, tokens: int) -> Iterator[Pack]:
    """Packs of the size of an optimiser step until so many tokens are dealt: a pack is a step of speculators'."""
    lengths = [len(row.input_ids) for row in inputs.rows]
    capacity = step_tokens or base.recipe.train.batch_tokens * base.recipe.train.accumulation
    load = loader_of(inputs.store)
    for numbers in stream_packs(lengths, capacity, base.recipe.run.seed):
        if tokens <= 0:
            return
        tokens -= sum(lengths[number] for number in numbers)
        yield load([inputs.rows[number] for number in numbers])


def walk_peer(base: Run, inputs: Inputs, checkpoint: Path) -> dict[str, Any]:
    """The held-out walk of speculators' head in our module, which computes what vLLM would."""
    opened = Checkpoint.open(str(checkpoint))
    settings = PUBLISHED["eagle3"].settings(opened, base.target)
    norms = {name.removeprefix("head."): value for name, value in settings.items() if name.startswith("head.")}
    head_config = base.recipe.head.model_copy(update={**norms, "train_lm_head": True, "init_from_target": False})
    train = base.recipe.train.model_copy(update={"init_from": str(checkpoint)})
    recipe = base.recipe.model_copy(update={"head": head_config, "train": train})
    head = build_head(head_config, base.target, inputs.frozen, len(inputs.store.info.layer_ids), 0)
    load_warm_start(head, recipe, base.target, inputs.frozen)
    with torch.no_grad():
        return heldout_walk(Accelerator(cpu=True), head.float(), inputs, recipe)


# ---- served ----------------------------------------------------------------------------------------------


def serve_both(base: Run, options: argparse.Namespace) -> None:
    chosen = choose_prompts(base, options)
    for name in ("ours", "speculators"):
        head = Path(read_json(options.folder / f"{name}.json")["checkpoint"])
        report = options.folder / f"served-{name}-k{options.k}.json"
        serve_head(base.target.path, head, chosen.prompts, MAX_NEW_TOKENS, report, options.k)


def choose_prompts(base: Run, options: argparse.Namespace) -> PromptSet:
    """First turns of less than `MAX_CHARS` characters, of all domains in turn."""
    if options.prompts is None:
        return load_prompts(base, None, options.limit, MAX_NEW_TOKENS)
    kept = [
        {"id": str(number), "domain": one.domain, "messages": one.messages[:1]}
        for number, one in enumerate(read_conversations(options.prompts, str(options.prompts))[0])
        if len(one.messages[0]["content"]) < MAX_CHARS
    ]
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        write_jsonl(Path(file.name), kept)
        return load_prompts(base, Path(file.name), options.limit, MAX_NEW_TOKENS)


PIECES: dict[str, Callable[[Run, argparse.Namespace], None]] = {
    "ours": train_ours,
    "speculators": train_peer,
    "served": serve_both,
}


# ---- the table -------------------------------------------------------------------------------------------


def read_report(folder: Path, k: int) -> dict[str, Any]:
    """What there is of each contender, and the ratio of their served accept lengths once both are served."""
    rows: dict[str, Any] = {}
    texts, lengths = {}, {}
    for name in ("ours", "speculators"):
        if (folder / f"{name}.json").is_file():
            rows[name] = read_json(folder / f"{name}.json")
        if (folder / f"served-{name}-k{k}.json").is_file():
            served = read_json(folder / f"served-{name}-k{k}.json")
            rows[name]["served"], texts[name] = served["served"], served["texts"]
            answers = zip(served["accepted"], served["texts"], strict=True)
            lengths[name] = pooled_length(
                [RequestRounds(domain="", accepted=rounds, num_tokens=len(text) - 1) for rounds, text in answers]
            )
    report: dict[str, Any] = {"threads": torch.get_num_threads(), "k": k, "rows": rows}
    if len(texts) == 2:
        ours, theirs = (rows[name]["served"]["mean_acceptance_length"] for name in ("ours", "speculators"))
        same = sum(one == other for one, other in zip(*texts.values(), strict=True))
        found = listed(ratio_interval(lengths["ours"], lengths["speculators"]))
        report |= {"ratio": ours / theirs, "interval": found, "equal_texts": f"{same}/{len(texts['ours'])}"}
    return report


def render(report: dict[str, Any]) -> str:
    lines = [
        "| trainer | minutes | steps | tokens | tokens/s | last loss | walk on held-out answers | accept length | "
        f"served, k = {report['k']} | accept length |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in report["rows"].items():
        walk, served = row["walk"], row.get("served")
        shown = f"{show_rates(served['per_position'])} | {served['mean_acceptance_length']:.3f}" if served else "- | -"
        lines.append(
            f"| {name} | {row['seconds'] / 60:.1f} | {row['steps']:,} | {row['tokens']:,} | "
            f"{row['tokens'] / row['seconds']:,.0f} | {row['loss']:.3f} | {show_rates(walk['per_position'])} | "
            f"{walk['mean_acceptance_length']:.3f} | {shown} |"
        )
    if "ratio" in report:
        found = report["interval"]
        within = f"{found[0]:.3f} to {found[1]:.3f} by the choice of prompts, 95 %; " if found else ""
        line = f"ours / speculators: {report['ratio']:.3f} ({within}bar: {BAR}); equal texts: {report['equal_texts']}"
        lines += ["", line]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
