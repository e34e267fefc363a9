"""Packs of a run's captured states as plain files, for trainers that live in an environment of their own."""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from drafthead.data.batches import Pack
from drafthead.data.draft_vocab import DraftVocab
from drafthead.pipeline.run_dir import Run
from drafthead.pipeline.train import resolve_precision
from safetensors.torch import save_file


def write_packs(folder: Path, run: Run, packs: Iterable[Pack], **more: object) -> int:
    """Write `NUMBER.safetensors` for each pack, `vocab.safetensors` and `settings.json`; returns how many packs."""
    vocab = DraftVocab.load(run.input("draft-vocab") / "draft_vocab.safetensors")
    save_file({"t2d": vocab.t2d, "d2t": vocab.d2t}, folder / "vocab.safetensors")
    count = 0
    for count, pack in enumerate(packs, start=1):
        save_file(peer_batch(pack), folder / f"{count - 1}.safetensors")
    settings = {
        "target": str(run.target.path),
        "layer_ids": run.target.resolve_aux_layers(run.recipe.capture.aux_layers),
        "draft_vocab_size": vocab.size,
        "ttt_steps": run.recipe.train.depth,
        "precision": resolve_precision(run.recipe),
        "threads": torch.get_num_threads(),
        "packs": count,
        **more,
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    return count


def peer_batch(pack: Pack) -> dict[str, torch.Tensor]:
    """A pack as plain tensors: ids [T], aux [T, A * D], last [T, D], mask [T], positions [T], lengths [documents]."""
    return {
        "input_ids": pack.tokens_T,
        "hidden_states": pack.aux_TAD.flatten(1).contiguous(),
        "verifier_last_hidden_states": pack.last_TD.contiguous(),
        "loss_mask": pack.supervised_T,
        "position_ids": pack.position_T,
        "lengths": torch.tensor([length for _, length in pack.documents]),
    }
