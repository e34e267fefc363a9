"""Encode: one row per assistant turn, the served prompt as context; and the draft vocabulary, counted over these rows.

drafthead encode runs/eagle3
drafthead draft-vocab runs/eagle3
"""

from collections import defaultdict
from typing import Any

import torch
from drafthead.data.draft_vocab import build, single_byte_ids, special_ids
from drafthead.data.encoding import (
    EncodeReport,
    Row,
    check_row,
    encode_answer,
    encode_conversation,
    read_rows,
    write_rows,
)
from drafthead.data.files import read_jsonl, write_json
from drafthead.data.template import Template
from drafthead.pipeline.heads.warm_start import draft_vocab_size, kept_vocab
from drafthead.pipeline.respond import SPLITS, Dialogue, load_template, read_prompts
from drafthead.pipeline.run_dir import Run
from torch import Tensor

LOW_COVERAGE = 0.9


def encode(run: Run) -> dict[str, Any]:
    """Write `train.parquet` and `heldout.parquet`."""
    folder = run.folder("encode")
    template = load_template(run)
    report: dict[str, Any] = {}
    for split in SPLITS:
        counts = EncodeReport()
        if run.recipe.respond.engine == "off":
            rows = _encode_given(run, template, split, counts)
        else:
            rows = _encode_answers(run, template, split, counts)
        counts.require_samples(f"encode {split}")
        write_rows(folder / f"{split}.parquet", rows)
        supervised = sum(sum(row.loss_mask) for row in rows)
        tokens = sum(len(row.input_ids) for row in rows)
        report[split] = {**counts.as_json(), "tokens": tokens, "supervised_tokens": supervised}
    write_json(folder / "report.json", report)
    return report


def _encode_given(run: Run, template: Template, split: str, counts: EncodeReport) -> list[Row]:
    """Rows of conversations that hold their answers already (respond.engine=off)."""
    rows: list[Row] = []
    for conversation in read_prompts(run, split):
        settings = run.recipe.encode
        new, reasons = encode_conversation(
            template, conversation, max_length=settings.max_length, turns=settings.turns or "all"
        )
        turns = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        for row in new:
            served = template.render_prompt(conversation.messages[: turns[row.turn]], conversation.tools)
            check_row(row, served)
        counts.add(new, reasons)
        rows += new
    return rows


def _encode_answers(run: Run, template: Template, split: str, counts: EncodeReport) -> list[Row]:
    """Rows of the answers that the engine wrote, its own ids; their contexts are held against a fresh rendering."""
    dialogues = {one.id: Dialogue(one, split, template) for one in read_prompts(run, split)}
    rows: list[Row] = []
    for answer in read_jsonl(run.input("respond") / "answers.jsonl"):
        if answer["split"] != split:
            continue
        dialogue = dialogues[answer["id"]]
        conversation, served = dialogue.conversation, dialogue.next_context()
        dialogue.answers.append(answer)
        if run.recipe.encode.turns == "last" and len(dialogue.answers) < dialogue.num_turns:
            continue
        row = encode_answer(
            id=conversation.id,
            source=conversation.source,
            domain=conversation.domain,
            turn=answer["turn"],
            context_ids=answer["context_ids"],
            completion_ids=answer["completion_ids"],
            finish_reason=answer["finish_reason"],
            max_length=run.recipe.encode.max_length,
        )
        if isinstance(row, str):
            counts.add([], [row])
            continue
        check_row(row, served)
        counts.add([row], [])
        rows.append(row)
    return rows


def make_draft_vocab(run: Run) -> dict[str, Any]:
    """Write `draft_vocab.safetensors`: counted over the supervised training tokens, or kept by a warm start."""
    folder = run.folder("draft-vocab")
    tokenizer = run.target.tokenizer
    encoded = run.input("encode")
    counts_V = count_supervised(read_rows(encoded / "train.parquet"), run.target.vocab_size)
    special = special_ids(tokenizer)
    always = sorted({*special, *run.target.end_of_turn_ids})
    vocab = kept_vocab(run.recipe, run.target)
    if vocab is None:
        size = draft_vocab_size(run.recipe, run.target)
        vocab = build(counts_V, size, len(tokenizer), always, single_byte_ids(tokenizer))
        vocab.check(tokenizer_size=len(tokenizer), always=always)
    else:  # what a published head cannot draft it cannot learn
        vocab.check(tokenizer_size=len(tokenizer), always=())
    vocab.save(folder / "draft_vocab.safetensors")
    heldout = read_rows(encoded / "heldout.parquet")
    by_domain: dict[str, list[Row]] = defaultdict(list)
    for row in heldout:
        by_domain[row.domain].append(row)
    report = {
        "size": vocab.size,
        "target_vocab": run.target.vocab_size,
        "coverage_train": round(vocab.coverage(counts_V), 4),
        "coverage_heldout": round(vocab.coverage(count_supervised(heldout, run.target.vocab_size)), 4),
        "coverage_by_domain": {
            domain: round(vocab.coverage(count_supervised(rows, run.target.vocab_size)), 4)
            for domain, rows in sorted(by_domain.items())
        },
    }
    write_json(folder / "report.json", report)
    return report


def count_supervised(rows: list[Row], vocab_size: int) -> Tensor:
    """How often each target token is supervised: [V] int64."""
    tokens = [token for row in rows for token in row.input_ids[row.context_length :]]
    return torch.bincount(torch.tensor(tokens, dtype=torch.long), minlength=vocab_size)
