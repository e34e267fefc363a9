"""The target that a joint training (Medusa-2) changed: written as a folder of its own, its quality before and after.

Everything but the changed tensors is the original's, bit by bit: the other shards are linked, tokenizer, chat template
and configurations copied, and the changed tensors rounded to the type they had.
"""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from drafthead.data.encoding import Row
from drafthead.eval.states import StateRecorder
from drafthead.pipeline.capture import length_batches
from drafthead.pipeline.export.folder import replace_folder
from drafthead.pipeline.export.mtp import link_file, other_files
from drafthead.pipeline.progress import progress
from drafthead.pipeline.target import Target
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

CONFIGS = ("config.json", "model.safetensors.index.json")
BATCH_TOKENS = 4096
MAX_DROP = {"mean_logprob": 0.05, "top1_agreement": 0.02}
"""Nats a token, and share of the tokens, by which joint training may make the target worse without a warning."""


def write_merged(folder: Path, target: Target, changed: Mapping[str, Tensor]) -> None:
    """Write `target` with the tensors in `changed` in the place of its own, whole or not at all."""

    def write(temporary: Path) -> None:
        for path in sorted({*target.tensor_files.values()}):
            with safe_open(path, "pt") as file:
                names = list(file.keys())
                if not any(name in changed for name in names):
                    link_file(path, temporary / path.name)
                    continue
                held = {name: file.get_tensor(name) for name in names}
                metadata = file.metadata()
            new = {name: changed[name].to(held[name].dtype).contiguous() for name in names if name in changed}
            save_file({**held, **new}, temporary / path.name, metadata=metadata)
        configs = [target.path / name for name in CONFIGS if (target.path / name).is_file()]
        for path in [*configs, *other_files(target.path)]:
            shutil.copyfile(path, temporary / path.name)

    replace_folder(folder, write)


# ---- quality ---------------------------------------------------------------------------------------------


def compare_quality(before: Target, after: Target, rows: list[Row]) -> dict[str, Any]:
    """How well each of two targets predicts held-out answers, which the first one wrote.

    Returns:
        `tokens`; `before` and `after`, each `mean_logprob` (nats) and `top1_agreement`; `drop`, by how much each fell;
        `warnings`, a line for each that fell by more than `MAX_DROP`.
    """
    old, new = (measure_quality(one, rows, what) for one, what in ((before, "before"), (after, "after")))
    drop = {name: old[name] - new[name] for name in MAX_DROP}
    return {
        "tokens": sum(len(row.input_ids) - row.context_length for row in rows),
        "before": old,
        "after": new,
        "drop": drop,
        "warnings": [
            f"{name} of the target fell by {drop[name]:.3f}, more than {limit:g}: train with a smaller "
            f"head.lora.learning_rate or heads_weight"
            for name, limit in MAX_DROP.items()
            if not drop[name] <= limit  # NaN is no pass
        ],
    }


def measure_quality(target: Target, rows: list[Row], what: str) -> dict[str, float]:
    """Mean log-probability of the answers' tokens, and how many are the target's most likely ones; fp32."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = target.load(torch.float32, device)
    recorder = StateRecorder(model, [])
    logprob, agreed, tokens = 0.0, 0, 0
    with progress(len(rows), f"quality {what}", "row") as bar, torch.inference_mode():
        for batch in length_batches(rows, BATCH_TOKENS):
            for row, (_, last_TD) in zip(batch, recorder.record([one.input_ids for one in batch]), strict=True):
                answer_R = torch.tensor(row.input_ids[row.context_length :], device=device)
                state_RD = last_TD[row.context_length - 1 : -1].to(device)
                logits_RV = model.get_output_embeddings()(recorder.norm(state_RD))
                logprob += float(logits_RV.log_softmax(-1).gather(-1, answer_R[:, None]).double().sum())
                agreed += int((logits_RV.argmax(-1) == answer_R).sum())
                tokens += len(answer_R)
                bar.update()
    return {"mean_logprob": logprob / tokens, "top1_agreement": agreed / tokens}


def quality_lines(quality: Mapping[str, Any]) -> Iterable[str]:
    """The object of `compare_quality` as text."""
    before, after, drop = quality["before"], quality["after"], quality["drop"]
    yield f"the target before and after joint training, on {quality['tokens']:,} held-out answer tokens of its own:"
    for name, text in (("mean_logprob", "mean log-probability"), ("top1_agreement", "top-1 agreement")):
        yield f"  {text}: {before[name]:.4f} before, {after[name]:.4f} after (fell by {drop[name]:.4f})"
    for warning in quality["warnings"]:
        yield f"  WARNING: {warning}"
