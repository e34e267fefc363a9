"""Eval: the true speculative loop over held-out prompts, with the trained head and the target in transformers.

    drafthead eval runs/eagle3 --prompts spec_bench.jsonl --temperature 0.7 --k 5 --tree 63
    drafthead eval runs/eagle3 --prompts spec_bench.jsonl --k 5 --drafter ngram

A chain's numbers are the report's own; those of a tree and of typical acceptance stand under their names, so that
neither is taken for what vLLM serves.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drafthead.data.conversations import read_conversations
from drafthead.data.encoding import read_rows
from drafthead.data.errors import InputError
from drafthead.data.files import write_json
from drafthead.data.template import Template, TurnError
from drafthead.eval.acceptance import RequestRounds, summarize, summarize_tree
from drafthead.eval.context_length import by_context_length
from drafthead.eval.decode import Answer
from drafthead.eval.intervals import brief, summarize_with_intervals
from drafthead.eval.tree_accuracy import Text
from drafthead.eval.tree_dynamic import DynamicTree
from drafthead.eval.tree_search import TreeShape
from drafthead.eval.typical import Typical
from drafthead.pipeline.drafters import speculative_config
from drafthead.pipeline.loop import MAX_K, EvalOptions, Prompt, SpeculativeLoop
from drafthead.pipeline.prompts import spread
from drafthead.pipeline.recipe import TreeConfig, TypicalConfig
from drafthead.pipeline.respond import read_prompts, turn_contexts
from drafthead.pipeline.rounds import ROUNDS_FILE, write_rounds
from drafthead.pipeline.run_dir import Run

TREE_TEXTS = 64
"""Held-out answers at most that a tree is searched on."""


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """Prompts that can be served, and how many others were left out, by reason."""

    prompts: list[Prompt]
    left_out: dict[str, int]


def evaluate(run: Run) -> dict[str, Any]:
    """The stage: the recipe's evaluation on the run's held-out prompts."""
    settings = run.recipe.eval
    options = EvalOptions(
        k=settings.k,
        temperature=settings.temperature,
        temperatures=tuple(settings.temperatures),
        max_new_tokens=settings.max_new_tokens,
        limit=settings.limit,
        tree=settings.tree,
        typical=settings.typical,
    )
    chosen = load_prompts(run, None, options.limit, options.max_new_tokens)
    report = evaluate_prompts(run, chosen, options, rounds=run.folder("eval") / ROUNDS_FILE)
    write_json(run.folder("eval") / "report.json", report)
    return {name: report[name] for name in ("mean_acceptance_length", "per_position", "identical_to_plain", "drafts")}


def evaluate_prompts(run: Run, chosen: PromptSet, options: EvalOptions, rounds: Path | None = None) -> dict[str, Any]:
    """Generate speculatively and, at temperature 0, plainly; returns the object of `drafthead eval --json`.

    The rounds of the chain are written to `rounds`, where it is given.
    """
    loop = SpeculativeLoop(run, spec=options.drafter)
    prompts = chosen.prompts
    drafted = loop.generate(prompts, options, k=options.k)
    if rounds is not None:
        write_rounds(rounds, requests_of(prompts, drafted), options.k)
    report = summarize_prompts(prompts, drafted, options.k)
    plain = loop.generate(prompts, options, k=0) if options.temperature == 0 else None
    report |= {
        "identical_to_plain": identical(drafted, plain),
        "left_out": chosen.left_out,
        "temperature": options.temperature,
        "max_new_tokens": options.max_new_tokens,
        "dtype": run.recipe.eval.dtype,
        "method": "speculative loop in transformers, chain of greedy drafts, full vocabulary",
    }
    if options.drafter is not None:
        config = speculative_config(options.drafter, options.k)
        unserved = "" if config else "; vLLM cannot serve it"
        report |= {
            "drafter": str(options.drafter),
            "speculative_config": config,
            "method": f"speculative loop in transformers, chain of drafts by {options.drafter.kind}{unserved}",
        }
    if options.temperatures:
        report["by_temperature"] = [
            {"temperature": options.temperature, **brief(report)},
            *evaluate_temperatures(loop, prompts, options),
        ]
    shape = None
    if options.tree is not None:
        shape, searched = find_tree(run, loop, prompts, options.tree)
        branched = loop.generate_tree(prompts, options, shape)
        report["tree"] = {
            **summarize_tree(requests_of(prompts, branched), shape.num_nodes, shape.depth),
            "identical_to_plain": identical(branched, plain),
            "method": "speculative loop in transformers, static tree of greedy drafts, full vocabulary; not comparable "
            "with chains, nor served by vLLM",
            **searched,
        }
        if options.tree.dynamic:
            report["dynamic_tree"] = evaluate_dynamic(loop, prompts, options, options.tree, plain)
    if options.typical is not None:
        report["typical"] = evaluate_typical(loop, prompts, options, options.typical, shape)
    return report


def summarize_prompts(prompts: list[Prompt], answers: list[Answer], k: int) -> dict[str, Any]:
    """Acceptance over all, by domain and by length of the prompt, each number with its interval."""
    requests = requests_of(prompts, answers)
    lengths = [len(prompt.ids) for prompt in prompts]
    return {**summarize_with_intervals(requests, k), "by_context_length": by_context_length(requests, lengths, k)}


def evaluate_temperatures(
    loop: SpeculativeLoop, prompts: list[Prompt], options: EvalOptions
) -> Iterator[dict[str, Any]]:
    """The chain's acceptance at each further temperature."""
    for temperature in options.temperatures:
        drafted = loop.generate(prompts, replace(options, temperature=temperature, typical=None), k=options.k)
        yield {"temperature": temperature, **brief(summarize_prompts(prompts, drafted, options.k))}


def requests_of(prompts: list[Prompt], answers: list[Answer]) -> list[RequestRounds]:
    """What the rounds of each answer accepted."""
    return [
        RequestRounds(
            domain=prompt.domain,
            accepted=answer.accepted,
            num_tokens=len(answer.tokens) - 1,
            drafted=answer.drafted,
        )
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def identical(answers: list[Answer], plain: list[Answer] | None) -> str | None:
    """How many answers equal those of plain decoding; None where sampling makes them differ."""
    if plain is None:
        return None
    return f"{sum(a.tokens == b.tokens for a, b in zip(answers, plain, strict=True))}/{len(answers)}"


def find_tree(
    run: Run, loop: SpeculativeLoop, prompts: list[Prompt], config: TreeConfig
) -> tuple[TreeShape, dict[str, Any]]:
    """Search a tree on held-out answers, to other prompts than those evaluated where there are any.

    Returns:
        The tree, and for the report what it was searched from.
    """
    rows = read_rows(run.input("encode") / "heldout.parquet")
    evaluated = {tuple(prompt.ids) for prompt in prompts}
    lengths = {len(ids) for ids in evaluated}
    # later turns of a conversation begin with its first prompt
    others = [row for row in rows if not any(tuple(row.input_ids[:length]) in evaluated for length in lengths)]
    rows = others or rows
    rows = rows[:: max(1, math.ceil(len(rows) / TREE_TEXTS))]
    texts = [Text(ids=row.input_ids, context_length=row.context_length) for row in rows]
    shape, accuracy_KR = loop.search_tree(texts, config)
    whose = "to other prompts than those evaluated" if others else "to the evaluated prompts themselves"
    return shape, {
        "searched_on": f"{len(texts)} held-out answers {whose}",
        "expected_acceptance_length": shape.expected_accept_length,
        "accuracy_by_step_and_rank": [[round(share, 4) for share in row] for row in accuracy_KR.tolist()],
        "parents": list(shape.parents),
        "ranks": list(shape.ranks),
    }


def evaluate_dynamic(
    loop: SpeculativeLoop,
    prompts: list[Prompt],
    options: EvalOptions,
    config: TreeConfig,
    plain: list[Answer] | None,
) -> dict[str, Any]:
    """The same prompts with a tree that is grown anew in each round."""
    levels = min(config.depth, loop.tree_drafter.max_depth)
    shape = DynamicTree(nodes=config.nodes, levels=levels, width=config.width)
    grown = loop.generate_tree(prompts, options, shape)
    return {
        **summarize_tree(requests_of(prompts, grown), shape.num_nodes, shape.depth),
        "identical_to_plain": identical(grown, plain),
        "width": config.width,
        "method": "speculative loop in transformers, tree grown in each round by draft probabilities (EAGLE-2), full "
        "vocabulary; not comparable with chains, nor served by vLLM",
    }


def evaluate_typical(
    loop: SpeculativeLoop,
    prompts: list[Prompt],
    options: EvalOptions,
    rule: TypicalConfig,
    shape: TreeShape | None,
) -> dict[str, Any]:
    """The same loops, accepting what the target finds likely enough."""
    typical = Typical(epsilon=rule.epsilon, delta=rule.delta)
    chain = loop.generate(prompts, options, k=options.k, typical=typical)
    found: dict[str, Any] = {
        "method": "typical acceptance, NOT lossless: the text is not distributed as the target's own",
        "epsilon": rule.epsilon,
        "delta": rule.delta,
        "temperature": options.temperature,
        "chain": summarize(requests_of(prompts, chain), options.k),
    }
    if shape is not None:
        tree = loop.generate_tree(prompts, options, shape, typical=typical)
        found["tree"] = summarize_tree(requests_of(prompts, tree), shape.num_nodes, shape.depth)
    return found


def load_prompts(run: Run, path: Path | None, limit: int | None, max_new_tokens: int) -> PromptSet:
    """First turns as served prompts: of a file, or of the run's held-out set; spread over the domains.

    Raises:
        InputError: No prompt can be used.
    """
    left_out: Counter[str] = Counter()
    if path is None:
        conversations = read_prompts(run, "heldout")
    else:
        conversations, dropped = read_conversations(path, str(path))
        left_out.update(one.reason for one in dropped)
    template = Template.load(run.target.path, template_kwargs=run.recipe.encode.template_kwargs)
    # near its length limit vLLM drafts nothing useful, for the whole batch
    room = run.recipe.serve_check.max_model_len - max_new_tokens - 2 * MAX_K
    prompts = []
    for one in spread(conversations, limit):
        turns = turn_contexts(one.messages)
        try:
            ids = template.render_prompt(turns[0], one.tools) if turns else []
        except TurnError as error:
            left_out[str(error)] += 1
            continue
        if not ids or len(ids) > room:
            left_out[f"longer than {room} tokens (serve_check.max_model_len)" if ids else "no user turn"] += 1
            continue
        prompts.append(Prompt(domain=one.domain, ids=ids))
    if not prompts:
        reason = next(iter(left_out), "there are none")
        raise InputError(f"{path or 'held-out prompts'}: no prompt can be used; the first: {reason}")
    return PromptSet(prompts=prompts, left_out=dict(left_out))
