"""Held-out answers during training: what is watched is the walk (eval/acceptance.py), not an average over slots."""

from typing import Any

import torch
from accelerate import Accelerator
from drafthead.data.batches import load_ahead, plan_epoch
from drafthead.data.encoding import Row
from drafthead.eval.acceptance import RequestRounds, summarize, walk
from drafthead.pipeline.recipe import Recipe
from drafthead.pipeline.train_inputs import Inputs, loader_of
from drafthead.pipeline.train_step import run_head
from torch import Tensor, nn


def heldout_walk(accelerator: Accelerator, model: nn.Module, inputs: Inputs, recipe: Recipe) -> dict[str, Any]:
    """Walk the held-out answers with drafts of `eval.k` tokens; every rank does the same, each row counts once."""
    return summarize(list(heldout_requests(accelerator, model, inputs, recipe).values()), recipe.eval.k)


def heldout_requests(
    accelerator: Accelerator, model: nn.Module, inputs: Inputs, recipe: Recipe
) -> dict[str, RequestRounds]:
    """The walk of each held-out answer, by its row's key."""
    model.eval()
    rows = inputs.heldout_rows
    packs = plan_epoch([len(row.input_ids) for row in rows], recipe.train.batch_tokens, 0, 0)
    requests: dict[str, RequestRounds] = {}
    with torch.no_grad():
        loaded = load_ahead([[rows[row] for row in pack] for pack in packs], loader_of(inputs.heldout_store))
        for pack, numbers in zip(loaded, packs, strict=True):
            output = run_head(accelerator, model, pack, inputs, recipe.train, recipe.eval.k)
            for number, (start, length) in zip(numbers, pack.documents, strict=True):
                survived = output.survived_TK[start : start + length].cpu()
                requests[rows[number].key] = walk_row(rows[number], survived)
    model.train()
    return requests


def walk_row(row: Row, survived_TK: Tensor) -> RequestRounds:
    """The rounds that serving would run over one answer, from the unroll's survival flags."""
    last = len(row.input_ids) - 1
    accepted = walk(survived_TK, first=row.context_length - 1, last=last)
    return RequestRounds(domain=row.domain, accepted=accepted, num_tokens=last - row.context_length)


def flat_walk(summary: dict[str, Any]) -> dict[str, Any]:
    """Numbers for the logs: rates of all rounds, rates given the earlier positions (none where none was reached)."""
    joint = {f"walk_position_{i}": rate for i, rate in enumerate(summary["per_position"], 1)}
    given = {f"walk_conditional_{i}": rate for i, rate in enumerate(summary["conditional"], 1) if rate is not None}
    return {**joint, **given, "walk_accept_length": summary["mean_acceptance_length"]}


def render_walk(summary: dict[str, Any]) -> str:
    rates = " ".join(f"{rate:.3f}" for rate in summary["per_position"] if rate is not None)
    return f"{rates}  accept length {summary['mean_acceptance_length']:.3f}"
