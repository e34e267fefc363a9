"""Eval: the true speculative loop over held-out prompts, with the trained head and the target in transformers.

drafthead eval runs/eagle3 --prompts spec_bench.jsonl --temperature 0.7 --k 5
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from drafthead.data.conversations import read_conversations
from drafthead.data.draft_vocab import DraftVocab
from drafthead.data.errors import InputError
from drafthead.data.files import write_json
from drafthead.data.template import Template, TurnError
from drafthead.eval.acceptance import RequestRounds, summarize
from drafthead.eval.decode import Answer, DecodeOptions, decode
from drafthead.eval.hf_target import HFTarget
from drafthead.pipeline.heads.build import build_frozen_target, load_head
from drafthead.pipeline.progress import progress
from drafthead.pipeline.prompts import spread
from drafthead.pipeline.respond import read_prompts, turn_contexts
from drafthead.pipeline.run_dir import Run

MAX_K = 16
BATCH_TOKENS = 32_768
"""Prompt tokens of one batch, padding included: bounds the caches."""


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """What a user may change for one evaluation."""

    k: int
    temperature: float
    max_new_tokens: int
    limit: int | None


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt as a server would see it."""

    domain: str
    ids: list[int]


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
        max_new_tokens=settings.max_new_tokens,
        limit=settings.limit,
    )
    report = evaluate_prompts(run, load_prompts(run, None, options.limit, options.max_new_tokens), options)
    write_json(run.folder("eval") / "report.json", report)
    return {name: report[name] for name in ("mean_acceptance_length", "per_position", "identical_to_plain", "drafts")}


def evaluate_prompts(run: Run, chosen: PromptSet, options: EvalOptions) -> dict[str, Any]:
    """Generate speculatively and, at temperature 0, plainly; returns the object of `drafthead eval --json`."""
    loop = SpeculativeLoop(run)
    prompts = chosen.prompts
    drafted = loop.generate(prompts, options, k=options.k)
    report = summarize(
        [
            RequestRounds(domain=prompt.domain, accepted=answer.accepted, num_tokens=len(answer.tokens) - 1)
            for prompt, answer in zip(prompts, drafted, strict=True)
        ],
        options.k,
    )
    identical = None
    if options.temperature == 0:
        plain = loop.generate(prompts, options, k=0)
        same = sum(a.tokens == b.tokens for a, b in zip(drafted, plain, strict=True))
        identical = f"{same}/{len(prompts)}"
    return {
        **report,
        "identical_to_plain": identical,
        "prompts": len(prompts),
        "left_out": chosen.left_out,
        "temperature": options.temperature,
        "max_new_tokens": options.max_new_tokens,
        "dtype": run.recipe.eval.dtype,
        "method": "speculative loop in transformers, chain of greedy drafts, full vocabulary",
    }


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


class SpeculativeLoop:
    """Target, head and prompts, batched by length."""

    def __init__(self, run: Run, model: Any = None):
        """`model`: the target in `eval.dtype`, where it is loaded already."""
        settings = run.recipe.eval
        self.batch_size = settings.batch_size
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = getattr(torch, settings.dtype)
        folder = run.input("train")
        head, description = load_head(folder, run.target)
        vocab = DraftVocab.load(run.input("draft-vocab") / "draft_vocab.safetensors")
        # the served head is the exported one: its rounding is part of what is predicted
        self.head = head.to(getattr(torch, run.recipe.export.dtype)).to(self.device, dtype)
        self.frozen = build_frozen_target(run.target, vocab).to(self.device)
        self.drafter = self.head.drafter(self.frozen)
        model = run.target.load(dtype, self.device) if model is None else model
        self.target = HFTarget(model, description["aux_layer_ids"])
        self.end_ids = run.target.end_of_turn_ids
        self.seed = run.recipe.run.seed

    def generate(self, prompts: list[Prompt], options: EvalOptions, *, k: int) -> list[Answer]:
        """Answers in the order of the prompts; plain decoding for k = 0."""
        answers: dict[int, Answer] = {}
        settings = DecodeOptions(
            max_new_tokens=options.max_new_tokens,
            end_ids=self.end_ids,
            temperature=options.temperature,
            seed=self.seed,
        )
        drafter = self.drafter if k else None
        what = f"eval k={k}" if k else "eval plain"
        with progress(len(prompts), what, "prompt") as bar:
            for numbers in self._batches(prompts):
                batch = [prompts[number].ids for number in numbers]
                found = decode(self.target, drafter, batch, k, settings, on_progress=bar.update)
                answers.update(zip(numbers, found, strict=True))
        return [answers[number] for number in range(len(prompts))]

    def _batches(self, prompts: list[Prompt]) -> Iterator[list[int]]:
        order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number].ids))
        while order:
            size = max(1, min(self.batch_size, BATCH_TOKENS // len(prompts[order[0]].ids)))
            yield order[:size]
            order = order[size:]
