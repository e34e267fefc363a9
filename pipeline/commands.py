"""What each sub-command does: reads its arguments, calls the stage or check, prints, and gives the exit code.

Heavy imports wait until a command is chosen.
"""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from drafthead.data.errors import InputError


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
    from drafthead.pipeline.export.folder import typed_here
    from drafthead.pipeline.export.preflight import preflight
    from drafthead.pipeline.target import open_target

    report = preflight(arguments.export, open_target(arguments.target).path)
    lines = [f"{one['gate']}: {one['field']}: {one['message']}" for one in report.failures]
    if report.ok:
        lines.append(typed_here(report.serve_command))
    else:
        lines.append(f"{len(report.failures)} fault(s); do not serve this folder")
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
