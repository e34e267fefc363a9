"""The command line: `drafthead run RECIPE`, one sub-command per stage, and the checks.

Every command takes `--json` for one object on stdout; everything else goes to stderr. Exit codes: 0 what was asked
holds, 1 a check or gate failed, 2 bad input.
"""

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from drafthead.data.errors import GateError, InputError
from drafthead.pipeline.cores import keep_freed_memory
from safetensors import SafetensorError

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


def main() -> None:
    quiet_libraries()
    keep_freed_memory()
    arguments = parse(sys.argv[1:])
    with report_errors():
        code = arguments.command(arguments)
        sys.exit(code)


@contextlib.contextmanager
def report_errors() -> Iterator[None]:
    """Turn errors that a user can mend into one line and an exit code."""
    try:
        yield
    except GateError as error:
        _stop(str(error), 1)
    except InputError as error:
        _stop(str(error), 2)
    except BrokenPipeError:
        os._exit(1)  # the reader of our output left; nothing to say to anyone
    except OSError as error:
        if error.errno is None:
            raise
        # of two files (a link, a rename) the second is the one that is written
        where = error.filename2 or error.filename or "a file"
        _stop(f"{where}: {error.strerror}; mend that and run the same command again, finished work is kept", 2)
    except SafetensorError as error:  # a full disk or a torn file; its own type, without the file's name
        _stop(f"tensors could not be read or written ({error}); mend that and run the same command again", 2)
    except KeyboardInterrupt:
        _stop("interrupted; the same command goes on from here", 130)


def _stop(message: str, code: int) -> None:
    print(f"drafthead: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


def quiet_libraries() -> None:
    """Keep third parties' start-up lines out of our output; users' own settings win."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("DS_LOG_LEVEL", "ERROR")
    if not Path("/dev/nvidiactl").exists():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


# ---- arguments -------------------------------------------------------------------------------------------


def parse(argv: list[str]) -> argparse.Namespace:
    if argv[:2] in (["export", "preflight"], ["export", "push"]):  # `export` itself takes a run
        argv = ["-".join(argv[:2]), *argv[2:]]
    if argv[:1] == ["plan"]:  # argparse takes -0.1,0.5 for an option; it is a value that we refuse ourselves
        argv = re.sub(r"\0(?=-[\d.])", "=", "\0".join(argv)).split("\0")
    if argv[:1] == ["run"]:  # argparse takes no overrides after an option
        argv = ["run", *sorted(argv[1:], key=lambda word: not word.startswith("-"))]
    parser = argparse.ArgumentParser(
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


# ---- commands; heavy imports wait until one is chosen ----------------------------------------------------


def run_recipe(arguments: argparse.Namespace) -> int:
    from drafthead.pipeline.export.layouts import check_export_path
    from drafthead.pipeline.plan import check_head, check_states, make_plan, name_tensors, render_plan
    from drafthead.pipeline.recipe import load_recipe
    from drafthead.pipeline.report.page import write_report
    from drafthead.pipeline.run_dir import create_run
    from drafthead.pipeline.stages import STAGES
    from drafthead.pipeline.summary import render_summary, summarize_run
    from drafthead.pipeline.target import open_target

    recipe = load_recipe(arguments.recipe, arguments.overrides)
    check_export_path(recipe.head.type, Path(recipe.run.dir) / str(recipe.run.name) / "export")
    if arguments.plan:
        plan = make_plan(recipe)
        _print(arguments, plan, render_plan(plan))
        return 0
    target = open_target(recipe.target)
    check_head(recipe, target)
    check_states(recipe, target)
    print(f"target {target.path}: {name_tensors(target.tensor_names)}", file=sys.stderr)
    run = create_run(recipe, STAGES)
    with _output_of_stages_to_stderr():
        for name in STAGES:
            _run_one(run, name)
    summary = summarize_run(run) | {"report_path": str(write_report(run).resolve())}
    _print(arguments, summary, render_summary(summary))
    return 0 if summary["ok"] else 1


def run_stage(arguments: argparse.Namespace) -> int:
    from drafthead.pipeline.run_dir import open_run
    from drafthead.pipeline.stages import STAGES

    run = open_run(arguments.run_dir, STAGES, [])
    custom = {"prompts", "k", "max_new_tokens", "limit", "temperature", "tree", "dynamic", "typical", "drafter"}
    if any(getattr(arguments, name, None) is not None for name in custom):
        return _run_custom(arguments, run)
    with _output_of_stages_to_stderr():
        _run_one(run, arguments.stage)
    folder = run.folder(arguments.stage)
    has_report = (folder / "report.json").is_file()
    report = run.report(arguments.stage) if has_report else {"stage": arguments.stage, "path": str(folder)}
    _print(arguments, report, json.dumps(report, indent=2))
    return 0 if report.get("ok", True) else 1


def _run_custom(arguments: argparse.Namespace, run: Any) -> int:
    """`eval` or `serve-check` with other prompts or settings than the recipe's; the run's files stay as they are."""
    from drafthead.pipeline.drafters import parse_drafter
    from drafthead.pipeline.evaluate import evaluate_prompts, load_prompts
    from drafthead.pipeline.loop import MAX_K, EvalOptions
    from drafthead.pipeline.recipe import TreeConfig, TypicalConfig, load_recipe
    from drafthead.pipeline.serve_check import check_prompts

    spec = parse_drafter(arguments.drafter) if arguments.drafter else None
    if arguments.k and spec is None:  # as a recipe with it would be
        load_recipe(str(run.path / "recipe.yaml"), [f"eval.k={arguments.k}"])
    elif arguments.k and arguments.k > MAX_K:
        raise InputError(f"--k {arguments.k}: at most {MAX_K} draft tokens")
    settings = run.recipe.eval if arguments.stage == "eval" else run.recipe.serve_check
    new_tokens = arguments.max_new_tokens or settings.max_new_tokens
    limit = arguments.limit or (None if arguments.prompts else settings.limit)
    chosen = load_prompts(run, arguments.prompts, limit, new_tokens)
    if chosen.left_out:
        reasons = "; ".join(f"{reason} ({count})" for reason, count in chosen.left_out.items())
        print(f"{sum(chosen.left_out.values())} prompts left out: {reasons}", file=sys.stderr)
    with _output_of_stages_to_stderr():
        if arguments.stage == "eval":
            temperature, *others = arguments.temperature or (settings.temperature, *settings.temperatures)
            tree = settings.tree if spec is None else None
            asked = {"nodes": arguments.tree, "dynamic": arguments.dynamic}
            if any(asked.values()):
                given = {name: value for name, value in asked.items() if value is not None}
                tree = (tree or TreeConfig()).model_copy(update=given)
            typical = settings.typical if temperature > 0 else None
            if arguments.typical:
                typical = settings.typical or TypicalConfig()
            options = EvalOptions(
                k=arguments.k or settings.k,
                temperature=temperature,
                temperatures=tuple(others),
                max_new_tokens=new_tokens,
                limit=limit,
                tree=tree,
                typical=typical,
                drafter=spec,
            )
            report = evaluate_prompts(run, chosen, options)
        else:
            depths = [arguments.k] if arguments.k else settings.k
            report = check_prompts(run, chosen, depths, new_tokens, spec)
    _print(arguments, report, json.dumps(report, indent=2))
    return 0 if report.get("ok", True) else 1


def _run_one(run: Any, name: str) -> None:
    from drafthead.pipeline.publish import publish

    if run.run_stage(name):
        seconds = run.record["stages"][name]["seconds"]
        print(f"{name}: done in {seconds:.0f} s", file=sys.stderr)
    else:
        print(f"{name}: already there, {run.folder(name)}", file=sys.stderr)
    if name in ("eval", "export", "serve-check"):
        publish(run)


def run_compare(arguments: argparse.Namespace) -> int:
    from drafthead.pipeline.compare import compare
    from drafthead.pipeline.compare_contestants import CompareOptions
    from drafthead.pipeline.compare_table import render_comparison
    from drafthead.pipeline.run_dir import open_run
    from drafthead.pipeline.stages import STAGES

    runs = [open_run(path, STAGES, []) for path in arguments.run_dirs]
    options = CompareOptions(
        prompts=arguments.prompts,
        k=arguments.k,
        max_new_tokens=arguments.max_new_tokens,
        limit=arguments.limit,
        drafters=tuple(arguments.drafter),
        temperatures=arguments.temperature,
    )
    out = arguments.out or runs[0].path.resolve().parent / "compare"
    with _output_of_stages_to_stderr():
        report = compare(runs, options, out)
    _print(arguments, report, render_comparison(report))
    return 0


def run_cost(arguments: argparse.Namespace) -> int:
    from drafthead.pipeline.cost import CostOptions, measure_cost
    from drafthead.pipeline.cost_table import render_cost
    from drafthead.pipeline.publish import publish
    from drafthead.pipeline.run_dir import open_run
    from drafthead.pipeline.stages import STAGES

    run = open_run(arguments.run_dir, STAGES, [])
    asked = {one.name: getattr(arguments, one.name) for one in fields(CostOptions)}
    options = CostOptions(**{name: value for name, value in asked.items() if value is not None})
    with _output_of_stages_to_stderr():
        report = measure_cost(run, options)
        publish(run)  # the card says which k pays
    _print(arguments, report, render_cost(report))
    return 0


def run_plan(arguments: argparse.Namespace) -> int:
    from drafthead.pipeline.advise import AdviceOptions, advise
    from drafthead.pipeline.advise_table import render_advice
    from drafthead.pipeline.run_dir import open_run
    from drafthead.pipeline.stages import STAGES

    run = None if arguments.run_dir is None else open_run(arguments.run_dir, STAGES, [])
    options = AdviceOptions(**{one.name: getattr(arguments, one.name) for one in fields(AdviceOptions)})
    with _output_of_stages_to_stderr():
        advice = advise(options, run)
    _print(arguments, advice, render_advice(advice))
    return 0


def run_report(arguments: argparse.Namespace) -> int:
    from drafthead.pipeline.report.page import write_report
    from drafthead.pipeline.run_dir import open_run
    from drafthead.pipeline.stages import STAGES

    path = write_report(open_run(arguments.run_dir, STAGES, []))
    _print(arguments, {"report_path": str(path.resolve())}, str(path))
    return 0


def run_preflight(arguments: argparse.Namespace) -> int:
    from drafthead.pipeline.export.preflight import preflight
    from drafthead.pipeline.target import open_target

    report = preflight(arguments.export, open_target(arguments.target).path)
    lines = [f"{one['gate']}: {one['field']}: {one['message']}" for one in report.failures]
    lines.append(report.serve_command if report.ok else f"{len(report.failures)} fault(s); do not serve this folder")
    _print(arguments, asdict(report), "\n".join(lines))
    return 0 if report.ok else 1


def run_push(arguments: argparse.Namespace) -> int:
    from drafthead.pipeline.export.push import Upload, render_upload
    from drafthead.pipeline.run_dir import open_run
    from drafthead.pipeline.stages import STAGES

    upload = Upload(open_run(arguments.run_dir, STAGES, []), arguments.repo, arguments.private)
    described = upload.describe()
    if arguments.dry_run:
        _print(arguments, described, f"{render_upload(described)}\nnothing was sent")
        return 0
    print(render_upload(described), file=sys.stderr)  # before gigabytes are on their way
    url = upload.send()
    _print(arguments, {**described, "url": url}, url)
    return 0


def run_verify(arguments: argparse.Namespace) -> int:
    from drafthead.pipeline.store_verify import render, verify
    from drafthead.pipeline.target import open_target

    report = verify(arguments.store, None if arguments.target is None else open_target(arguments.target))
    _print(arguments, report, render(report))
    return 1 if report["bad"] else 0


def run_inspect(arguments: argparse.Namespace) -> int:
    given = [value is not None for value in (arguments.run_dir, arguments.target, arguments.conversations)]
    if given not in ([True, False, False], [False, True, True]):
        raise InputError("inspect: give a run directory, or --target and --conversations")
    from drafthead.data.inspection import print_inspection

    inspect = _inspect_run if arguments.run_dir else _inspect_file
    template, inspection = inspect(arguments)
    if arguments.json:
        print(json.dumps(inspection.as_json(template), ensure_ascii=False))
    else:
        print_inspection(template, inspection, sys.stdout, os.environ)
    inspection.require_samples()
    return 0


def _inspect_run(arguments: argparse.Namespace) -> tuple[Any, Any]:
    from drafthead.data.inspection import Inspection
    from drafthead.data.template import Template
    from drafthead.pipeline.run_dir import open_run
    from drafthead.pipeline.stages import STAGES

    run = open_run(arguments.run_dir, STAGES, [])
    path = run.input("encode") / f"{arguments.split}.parquet"
    dropped = run.report("encode")[arguments.split]["dropped"]
    template = Template.load(run.target.path, template_kwargs=run.recipe.encode.template_kwargs)
    return template, Inspection.of_rows(path, dropped=dropped, only=arguments.row)


def _inspect_file(arguments: argparse.Namespace) -> tuple[Any, Any]:
    from drafthead.data.inspection import Inspection
    from drafthead.data.template import Template
    from drafthead.pipeline.target import open_target

    template = Template.load(
        open_target(arguments.target).path,
        chat_template=arguments.chat_template,
        template_kwargs=arguments.template_kwargs,
    )
    inspection = Inspection.of(
        template,
        arguments.conversations,
        max_length=arguments.max_length,
        turns=arguments.turns,
        only=arguments.row,
    )
    return template, inspection


def run_metrics(arguments: argparse.Namespace) -> int:
    from drafthead.pipeline.metrics import measure, open_source, render, render_look, watch

    source = open_source(arguments.url, arguments.log)
    if arguments.watch:
        # Ctrl-C is how a watch ends
        with contextlib.suppress(KeyboardInterrupt):
            for look in watch(source, arguments.watch):
                _print(arguments, look, render_look(look))
                sys.stdout.flush()
        return 0
    report = measure(source, arguments.expect, arguments.tolerance)
    _print(arguments, report, render(report))
    return 0 if report.get("ok", True) else 1


def run_workspace(arguments: argparse.Namespace) -> int:
    from drafthead.pipeline.run_dir import open_run
    from drafthead.pipeline.stages import STAGES
    from drafthead.pipeline.workspace import make_workspace, render_workspace

    run = open_run(arguments.run_dir, STAGES, [])
    with _output_of_stages_to_stderr():
        made = make_workspace(run, arguments.entity, arguments.project, dry_run=arguments.dry_run)
    _print(arguments, made, render_workspace(made))
    return 0


def run_vocab_check(arguments: argparse.Namespace) -> int:
    from drafthead.pipeline.vocab_check import check_vocabularies, render

    report = check_vocabularies(arguments.target, arguments.draft)
    _print(arguments, report, render(report))
    return 0 if report["ok"] else 1


def run_doctor(arguments: argparse.Namespace) -> int:
    from drafthead.pipeline.doctor import examine, render

    findings = examine()
    _print(arguments, findings, render(findings))
    return 0 if findings["ok"] else 1


def _print(arguments: argparse.Namespace, value: Any, text: str) -> None:
    print(json.dumps(value, ensure_ascii=False) if arguments.json else text)


@contextlib.contextmanager
def _output_of_stages_to_stderr() -> Iterator[None]:
    """Libraries print; stdout holds nothing but the result."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


if __name__ == "__main__":
    main()
