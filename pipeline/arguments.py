"""What can be said on the command line: sub-commands, their options, and the values that options take."""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from drafthead.pipeline.commands import (
    run_compare,
    run_cost,
    run_doctor,
    run_inspect,
    run_metrics,
    run_plan,
    run_preflight,
    run_push,
    run_recipe,
    run_report,
    run_stage,
    run_verify,
    run_vocab_check,
    run_workspace,
)

STAGE_HELP = {
    "prompts": "collect prompts and hold some out",
    "respond": "let the target write every assistant turn",
    "encode": "make token rows with loss masks",
    "draft-vocab": "choose the draft vocabulary",
    "capture": "store the target's hidden states",
    "train": "train the head",
    "eval": "run the speculative loop over held-out or given prompts",
    "export": "write what vLLM loads (or: export preflight DIR --target DIR, export push RUN_DIR --repo OWNER/NAME)",
    "serve-check": "serve with real vLLM and compare with the prediction",
}

PLAN_EXAMPLES = """\
A round over k draft tokens costs 1 + k * (draft-cost + row-cost) plain target steps. k = 0 in the answer: do not
speculate. (What a run would do is `drafthead run RECIPE --plan`.)

  drafthead plan --conditional 0.8,0.6,0.5 --draft-cost 0.1 --row-cost 0.35
  drafthead cost runs/eagle3 && drafthead plan runs/eagle3
  drafthead plan runs/eagle3 --draft-cost 0.05 --row-cost-by-batch 1:0.02,8:0.1,64:0.6
  drafthead plan runs/eagle3 --draft-cost 0.05 --device h100-sxm
"""


DRAFTER_HELP = "draft without the trained head, for instance ngram:prompt_lookup_min=2,prompt_lookup_max=4"


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, as every other error here is said, and where the options are explained."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"drafthead: {message}; `{self.prog} --help` lists what can be given\n")


def parse(argv: list[str]) -> argparse.Namespace:
    if argv[:2] in (["export", "preflight"], ["export", "push"]):  # `export` itself takes a run
        argv = ["-".join(argv[:2]), *argv[2:]]
    if argv[:1] == ["plan"]:  # argparse takes -0.1,0.5 for an option; it is a value that we refuse ourselves
        argv = re.sub(r"\0(?=-[\d.])", "=", "\0".join(argv)).split("\0")
    if argv[:1] == ["run"]:  # argparse takes no overrides after an option
        argv = ["run", *sorted(argv[1:], key=lambda word: not word.startswith("-"))]
    parser = OneLineParser(
        prog="drafthead", description="Draft heads for speculative decoding: train, evaluate, export, check."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    run = _add(commands, "run", "run a recipe from prompts to the served check", run_recipe)
    run.add_argument("recipe", help="a name below recipes/ or a YAML file")
    run.add_argument("overrides", nargs="*", metavar="key=value", help="for instance train.tokens=2M")
    run.add_argument("--plan", action="store_true", help="print stages, sizes, disk and time; run nothing")

    for name, text in STAGE_HELP.items():
        stage = _add(commands, name, text, run_stage)
        stage.add_argument("run_dir", type=Path, metavar="RUN_DIR")
        stage.set_defaults(stage=name)
        if name in ("eval", "serve-check"):
            _add_prompt_options(stage)
            stage.add_argument("--drafter", metavar="SPEC", help=DRAFTER_HELP)
        if name == "eval":
            stage.add_argument("--temperature", type=_temperatures, metavar="T,T,...", help="0 is greedy")
            stage.add_argument("--tree", type=_positive, metavar="N", help="also draft a tree of at most N nodes")
            stage.add_argument(
                "--dynamic", action="store_const", const=True, help="also grow such a tree in each round (EAGLE-2)"
            )
            stage.add_argument(
                "--typical", action="store_const", const=True, help="also accept typically (not lossless)"
            )

    compare = _add(commands, "compare", "the same prompts through heads and drafters, side by side", run_compare)
    compare.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR")
    compare.add_argument("--drafter", action="append", default=[], metavar="SPEC", help=f"also {DRAFTER_HELP}")
    _add_prompt_options(compare)
    compare.add_argument("--temperature", type=_temperatures, default=(0.0,), metavar="T,T,...", help="0 is greedy")
    compare.add_argument("--out", type=Path, metavar="DIR", help="for compare.json and the plot; runs/compare")

    _add_cost(commands)
    _add_plan(commands)

    report = _add(commands, "report", "write report.html of a run, finished or not", run_report)
    report.add_argument("run_dir", type=Path, metavar="RUN_DIR")

    preflight = _add(commands, "export-preflight", "check an export as `drafthead export preflight`", run_preflight)
    preflight.add_argument("export", type=Path, metavar="DIR")
    preflight.add_argument("--target", required=True)

    push = _add(commands, "export-push", "upload an export to Hugging Face as `drafthead export push`", run_push)
    push.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    push.add_argument("--repo", required=True, metavar="OWNER/NAME")
    push.add_argument("--private", action="store_const", const=True, help="make a new repository private")
    push.add_argument("--dry-run", action="store_true", help="files, sizes and metadata; sends nothing")

    inspect = _add(commands, "inspect", "show which tokens of conversations are supervised", run_inspect)
    inspect.add_argument("run_dir", nargs="?", type=Path, metavar="RUN_DIR", help="the rows of a run, or:")
    inspect.add_argument("--split", choices=("train", "heldout"), default="train", help="which rows of the run")
    inspect.add_argument("--target")
    inspect.add_argument("--conversations", type=Path)
    inspect.add_argument("--chat-template", type=Path)
    inspect.add_argument("--template-kwargs", type=_json_object, default={})
    inspect.add_argument("--max-length", type=_positive, default=2048)
    inspect.add_argument("--turns", choices=("all", "last"), default="all", help="assistant turns to train on")
    inspect.add_argument("--row", type=int, metavar="N", help="this row of the file alone, counted from 0")

    store = commands.add_parser("store", help="check stored states (store verify DIR)")
    verify = _add(store.add_subparsers(metavar="ACTION", required=True), "verify", "name every bad row", run_verify)
    verify.add_argument("store", type=Path, metavar="DIR", help="a store, a capture folder, or a run")
    verify.add_argument("--target", help="also hold the states against this target")

    _add_metrics(commands)
    _add_workspace(commands)
    _add_vocab_check(commands)
    _add(commands, "doctor", "examine this machine and the installation", run_doctor)
    return parser.parse_args(argv)


def _add(commands: Any, name: str, text: str, command: Callable[[argparse.Namespace], int]) -> Any:
    parser = commands.add_parser(name, help=text, description=text)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.set_defaults(command=command)
    return parser


def _add_cost(commands: Any) -> None:
    cost = _add(commands, "cost", "what drafting and verification cost here, by batch size and k", run_cost)
    cost.epilog = "example: drafthead cost runs/eagle3 --batches 1,8,32 --k 1,2,3,5"
    cost.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    cost.add_argument("--batches", type=_whole_numbers, metavar="B,B,...", help="requests of a round (1,2,4,8,16,32)")
    cost.add_argument("--k", type=_whole_numbers, metavar="K,K,...", help="draft tokens of a round (1,2,3,5)")
    cost.add_argument(
        "--context", type=_positive, metavar="N", help="tokens of each request before the first round (256)"
    )
    cost.add_argument("--drafter", metavar="SPEC", help=DRAFTER_HELP)
    cost.add_argument(
        "--serve",
        type=_whole_numbers,
        nargs="?",
        const=(),
        metavar="B,B,...",
        help="time vLLM too, plain and with each k, at these batch sizes (1,4,16); minutes",
    )


def _add_plan(commands: Any) -> None:
    plan = _add(
        commands, "plan", "how many draft tokens to serve with, by batch size, or that it does not pay", run_plan
    )
    plan.formatter_class = argparse.RawDescriptionHelpFormatter
    plan.epilog = PLAN_EXAMPLES
    plan.add_argument("run_dir", nargs="?", type=Path, metavar="RUN_DIR", help="take its measured rates and costs, or:")
    plan.add_argument("--conditional", metavar="R,R,...", help="share kept of each draft position that was reached")
    plan.add_argument("--draft-cost", metavar="C", help="of proposing one token, in plain target steps")
    plan.add_argument("--row-cost", metavar="C", help="of one more token in the target's pass, in plain target steps")
    plan.add_argument("--row-cost-by-batch", metavar="B:C,...", help="the same at several batch sizes")
    plan.add_argument("--device", metavar="NAME", help="or by the roofline model, for instance h100-sxm")
    plan.add_argument("--target", metavar="DIR", help="whose passes --device runs, where no run is given")
    plan.add_argument("--context", metavar="N", help="tokens of a request, whose cache --device reads (1024)")
    plan.add_argument(
        "--max-k", metavar="N", help="largest k to consider; behind the given rates the last is held, and marked so"
    )
    plan.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help='replay an adaptive k on these rounds instead of the evaluation; JSONL of {"k": 5, "accepted": [3, 0]}',
    )


def _add_metrics(commands: Any) -> None:
    metrics = _add(commands, "metrics", "what a running vLLM accepts, from its counters or its log", run_metrics)
    metrics.epilog = "example: drafthead metrics --url http://host:8000/metrics --expect runs/eagle3"
    source = metrics.add_mutually_exclusive_group()
    source.add_argument("--url", help="a server's metrics; http://localhost:8000/metrics unless given")
    source.add_argument("--log", type=Path, metavar="FILE", help="its log instead, all lines pooled by counts")
    held = metrics.add_mutually_exclusive_group()
    held.add_argument("--expect", type=Path, metavar="DIR", help="exit 1 on drift from this run's or export's rates")
    looks = "rates since the last look (every 5 s), until Ctrl-C"
    held.add_argument("--watch", type=_seconds, nargs="?", const=5.0, metavar="SECONDS", help=looks)
    metrics.add_argument("--tolerance", type=_share, default=0.05, help="smaller differences are no drift (0.05)")


def _add_workspace(commands: Any) -> None:
    workspace = _add(commands, "workspace", "make a W&B workspace that shows what runs log", run_workspace)
    workspace.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="whose metrics and W&B project it shows")
    workspace.add_argument("--entity", help="W&B team or user; WANDB_ENTITY, else the login's own")
    workspace.add_argument("--project", help="another W&B project than the run's")
    workspace.add_argument("--dry-run", action="store_true", help="sections and panels; sends nothing")


def _add_vocab_check(commands: Any) -> None:
    check = _add(commands, "vocab-check", "can this draft model serve this target, by its vocabulary?", run_vocab_check)
    check.epilog = "example: drafthead vocab-check --target /models/Qwen3-8B --draft /models/Qwen3-0.6B"
    check.add_argument("--target", required=True, metavar="DIR", help="the target's folder")
    check.add_argument("--draft", required=True, metavar="DIR", help="the draft model's folder")


def _add_prompt_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=Path, help="JSONL with messages, prompt or turns a line")
    parser.add_argument("--k", type=_positive, help="draft tokens per round")
    parser.add_argument("--max-new-tokens", type=_positive)
    parser.add_argument("--limit", type=_positive, help="at most so many prompts, spread over the domains")


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number from 1 on")
    return int(text)


def _whole_numbers(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


def _temperature(text: str) -> float:
    return _number(text, "a number from 0 on (0 is greedy)", lambda value: 0 <= value < float("inf"))


def _temperatures(text: str) -> tuple[float, ...]:
    values = tuple(_temperature(part) for part in text.split(","))
    if len(set(values)) < len(values):
        raise argparse.ArgumentTypeError(f"{text!r}: give each temperature once")
    return values


def _seconds(text: str) -> float:
    return _number(text, "a number of seconds above 0", lambda value: 0 < value < float("inf"))


def _share(text: str) -> float:
    return _number(text, "a number from 0 to below 1", lambda value: 0 <= value < 1)


def _number(text: str, what: str, is_good: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")  # which is never good
    if not is_good(value):
        raise argparse.ArgumentTypeError(f"{text!r}: {what}")
    return value


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError('a JSON object, for instance {"enable_thinking": false}')
    return value
