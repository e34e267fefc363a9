"""Served check: the same prompts through a real vLLM, with and without the head, held against what was predicted.

    drafthead serve-check runs/eagle3 --prompts spec_bench.jsonl --k 3
    drafthead serve-check runs/eagle3 --prompts spec_bench.jsonl --k 5 --drafter ngram

Two predictions are compared with vLLM's counters: our own speculative loop over the same prompts, and the walk over the
texts that vLLM itself wrote. The plain run writes a few tokens more than the others, because vLLM counts draft tokens
that lie behind an answer's end. A drafter without a trained head is held against the loop alone.
"""

import importlib.util
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from drafthead.data.encoding import Row
from drafthead.data.errors import InputError
from drafthead.data.files import write_json
from drafthead.eval.acceptance import RequestRounds, from_counters, summarize, walk
from drafthead.eval.engine import EngineConfig, Request, Result
from drafthead.eval.served import Served, compare, measure
from drafthead.pipeline.drafters import KINDS, DrafterSpec, speculative_config
from drafthead.pipeline.evaluate import PromptSet, load_prompts, requests_of
from drafthead.pipeline.export.folder import exported_config, served_path
from drafthead.pipeline.heads.base import HeadBatch, Objective
from drafthead.pipeline.loop import EvalOptions, Prompt, SpeculativeLoop
from drafthead.pipeline.progress import progress
from drafthead.pipeline.run_dir import Run

WALK_TOLERANCE = 0.01


def serve_check(run: Run) -> dict[str, Any]:
    """The stage: held-out prompts at every k of the recipe."""
    settings = run.recipe.serve_check
    chosen = load_prompts(run, None, settings.limit, settings.max_new_tokens)
    report = check_prompts(run, chosen, settings.k, settings.max_new_tokens)
    write_json(run.folder("serve-check") / "report.json", report)
    return {name: report[name] for name in ("ok", "identical_to_plain", "speedup_batch_1")}


def check_prompts(
    run: Run, chosen: PromptSet, depths: list[int], max_new_tokens: int, spec: DrafterSpec | None = None
) -> dict[str, Any]:
    """Serve the prompts plainly and with the head, or another drafter, at every k.

    Returns:
        The object of `drafthead serve-check --json`; `predicted` and `served` are those of the first k, `by_k` has all.
    """
    settings = run.recipe.serve_check
    prompts = chosen.prompts
    timed = list(range(len(prompts)))[: settings.timed_prompts]
    engine_config(run, depths[0], spec)  # what cannot be served fails before anything is
    plain = _serve(run, prompts, timed, None, max_new_tokens, behind=max(depths))
    loop = SpeculativeLoop(run, spec=spec)
    survived = None
    if spec is None:
        survived = {
            str(number): unroll(loop, prompt, plain.results[str(number)].token_ids, max(depths))
            for number, prompt in enumerate(prompts)
        }
    by_k = {}
    for k in depths:
        served = _serve(run, prompts, timed, k, max_new_tokens, spec=spec)
        by_k[str(k)] = _compare(run, loop, prompts, plain, served, survived, k, max_new_tokens)
    first = by_k[str(depths[0])]
    return {
        "ok": all(one["ok"] for one in by_k.values()),
        "failures": [failure for one in by_k.values() for failure in one["failures"]],
        "prompts": len(prompts),
        "left_out": chosen.left_out,
        "drafter": None if spec is None else str(spec),
        **{name: first[name] for name in ("k", "predicted", "served", "walk", "identical_to_plain")},
        "plain_ms_per_token": plain.median_ms_per_token,
        "speculative_ms_per_token": first["ms_per_token"],
        "speedup_batch_1": first["speedup_batch_1"],
        "dtype": settings.dtype,
        "max_new_tokens": max_new_tokens,
        "by_k": by_k,
    }


def _serve(
    run: Run,
    prompts: list[Prompt],
    timed: list[int],
    k: int | None,
    max_new_tokens: int,
    behind: int = 0,
    spec: DrafterSpec | None = None,
) -> Served:
    """All prompts at once, with `behind` tokens more; then the timed ones alone."""
    requests = [
        Request(key=str(number), prompt_ids=prompt.ids, max_new_tokens=max_new_tokens + behind)
        for number, prompt in enumerate(prompts)
    ]
    alone = [replace(requests[number], max_new_tokens=max_new_tokens) for number in timed]
    log_path = run.path / "logs" / f"serve-{'plain' if k is None else f'k{k}'}.log"
    with progress(len(prompts) + len(timed), f"vLLM {'plain' if k is None else f'k={k}'}", "prompt") as bar:
        config = engine_config(run, k, spec)
        ordered = spec is not None and KINDS[spec.kind].remembers
        return measure(config, requests, alone, log_path, lambda done, total: bar.update(done - bar.n), ordered)


def engine_config(run: Run, k: int | None, spec: DrafterSpec | None = None) -> EngineConfig:
    """How vLLM serves the run's head, or another drafter, with k draft tokens, or its target alone.

    Raises:
        InputError: vLLM cannot serve this drafter.
    """
    settings = run.recipe.serve_check
    speculative, model = None, run.served_target.path
    if spec is not None and k is not None:
        speculative = speculative_config(spec, k)
        package = KINDS[spec.kind].package
        if speculative is None:
            raise InputError(f"--drafter {spec}: vLLM does not serve it; `drafthead eval --drafter` measures it")
        if package is not None and importlib.util.find_spec(package.replace("-", "_")) is None:
            raise InputError(f"--drafter {spec.kind}: vLLM needs the package {package} for it, which is not installed")
    elif k is not None:
        export = run.input("export")
        speculative = {**exported_config(export), "num_speculative_tokens": k}
        model = served_path(model, export)
    return EngineConfig(
        model=str(model.resolve()),
        dtype=settings.dtype,
        max_model_len=settings.max_model_len,
        max_num_seqs=64,
        kv_cache_gib=settings.kv_cache_gib,
        speculative_config=speculative,
    )


def _compare(
    run: Run,
    loop: SpeculativeLoop,
    prompts: list[Prompt],
    plain: Served,
    served: Served,
    survived: dict[str, torch.Tensor] | None,
    k: int,
    max_new_tokens: int,
) -> dict[str, Any]:
    settings = run.recipe.serve_check
    texts = {key: result.token_ids for key, result in served.results.items()}
    same = sum(ids == plain.results[key].token_ids[: len(ids)] for key, ids in texts.items())
    options = EvalOptions(k=k, temperature=0.0, max_new_tokens=max_new_tokens, limit=None)
    drafted = loop.generate(prompts, options, k=k)
    predicted = summarize(requests_of(prompts, drafted), k)
    counted = served.rates()
    by_loop = compare(predicted, counted, same, len(prompts), settings.tolerance)
    walked, by_walk = None, by_loop
    if survived is not None:
        walked = summarize(_walk_served(prompts, plain, served, survived, k), k)
        by_walk = compare(walked, counted, same, len(prompts), WALK_TOLERANCE)
    counted |= _served_by_request(prompts, served, k, has_head=survived is not None)
    plain_ms, own_ms = plain.median_ms_per_token, served.median_ms_per_token
    return {
        "ok": by_loop.ok and by_walk.ok,
        "failures": by_loop.failures + [one for one in by_walk.failures if one not in by_loop.failures],
        "k": k,
        "predicted": predicted,
        "walk": walked,
        "served": counted,
        "identical_to_plain": f"{same}/{len(prompts)}",
        "ms_per_token": own_ms,
        "ms_per_pass": None if survived is None else served.median_ms_per_pass,
        "speedup_batch_1": plain_ms / own_ms if plain_ms and own_ms else None,
    }


def _served_by_request(prompts: list[Prompt], served: Served, k: int, *, has_head: bool) -> dict[str, Any]:
    """What the counters do not know, from what vLLM counted for each request: its mean over requests, and by domain.

    Without a head some passes have no draft and are in no count, so that a request's tokens are not those of its rounds
    alone: there is no mean of requests.
    """

    def rates(results: Sequence[Result]) -> dict[str, Any]:
        accepted = [count for result in results for count in result.accepted]
        drafted = sum(count for result in results for count in result.drafted)
        per_pos = [sum(count > position for count in accepted) for position in range(k)]
        lengths = [(len(one.token_ids) - 1) / len(one.accepted) for one in results if one.accepted]
        mean = statistics.fmean(lengths) if has_head and lengths else None
        return from_counters(len(accepted), per_pos, num_draft_tokens=drafted, mean_of_requests=mean)

    by_domain: dict[str, Any] = {}
    for domain in sorted({prompt.domain for prompt in prompts}):
        by_domain[domain] = rates(
            [served.results[str(number)] for number, prompt in enumerate(prompts) if prompt.domain == domain]
        )
        del by_domain[domain]["by_domain"]
    name = "mean_of_requests_acceptance_length"
    return {name: rates(list(served.results.values()))[name], "by_domain": by_domain}


def _walk_served(
    prompts: list[Prompt], plain: Served, served: Served, survived: dict[str, torch.Tensor], k: int
) -> list[RequestRounds]:
    """Walk the texts that vLLM wrote, as far as they equal the plain ones, whose states are known."""
    found = []
    for number, prompt in enumerate(prompts):
        answer, known = served.results[str(number)].token_ids, plain.results[str(number)].token_ids
        first, last = len(prompt.ids) - 1, len(prompt.ids) + len(answer) - 1
        accepted = []
        if known[: len(answer)] == answer and len(known) >= 2:
            hits = survived[str(number)][:, :k]
            accepted = walk(hits, first=first, last=last, text_last=len(prompt.ids) + len(known) - 1)
        found.append(RequestRounds(domain=prompt.domain, accepted=accepted, num_tokens=len(answer) - 1))
    return found


def unroll(loop: SpeculativeLoop, prompt: Prompt, answer: list[int], k: int) -> torch.Tensor:
    """Survival flags [T, k] of the drafts from every slot of a prompt with its answer."""
    row = Row(
        id="served",
        source="served",
        domain=prompt.domain,
        turn=0,
        input_ids=prompt.ids + answer,
        context_length=len(prompt.ids),
        clipped=False,
    )
    if len(answer) < 2:
        return torch.zeros(len(row.input_ids), k, dtype=torch.bool)
    tokens = torch.tensor(row.input_ids, device=loop.device)
    aux, last = loop.target.recorder.forward(tokens[None])
    batch = HeadBatch(
        tokens_T=tokens,
        aux_TAD=aux[0],
        last_TD=last[0],
        position_T=torch.arange(len(tokens), device=loop.device),
        supervised_T=torch.tensor([bool(flag) for flag in row.loss_mask], device=loop.device),
        documents=[(0, len(tokens))],
    )
    with torch.inference_mode():
        output = loop.trained.head(batch, loop.trained.frozen, Objective(depth=k))
    survived: torch.Tensor = output.survived_TK.cpu()
    return survived
