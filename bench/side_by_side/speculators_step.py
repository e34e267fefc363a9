"""speculators' EAGLE-3 training step; run by bench/train.py with the interpreter of speculators' own environment.

Reads numbers of packs, answers `bench SECONDS`. As its trainer does by default: KL loss, Muon for matrices and AdamW
for the rest, clipping at 1.0, autocast. Where its default needs a GPU, what runs on a CPU: the eager loss and torch's
SDPA.
"""

import json
import sys
import time
from argparse import Namespace
from pathlib import Path

import torch
from safetensors.torch import load_file
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, shift_batch
from speculators.train.optimizers import build_optimizers
from transformers import AutoConfig

OPTIMIZER = Namespace(
    optimizer="muon",
    lr=1e-3,
    weight_decay=0.01,
    muon_lr=1e-3,
    muon_momentum=0.95,
    muon_weight_decay=0.1,
    muon_ns_steps=5,
    muon_adjust_lr_fn="match_rms_adamw",
)


def build(folder: Path, settings: dict) -> Eagle3DraftModel:
    config = AutoConfig.from_pretrained(settings["target"])
    config.num_hidden_layers = 1
    vocab = load_file(folder / "vocab.safetensors")
    return Eagle3DraftModel.from_training_args(
        verifier_config=config,
        t2d=vocab["t2d"],
        d2t=vocab["d2t"],
        draft_vocab_size=settings["draft_vocab_size"],
        norm_before_residual=False,
        ttt_steps=settings["ttt_steps"],
        verifier_name_or_path=settings["target"],
        target_layer_ids=settings["layer_ids"],
        draft_attn_impl="sdpa",
    )


def batch_of(path: Path) -> dict[str, torch.Tensor]:
    """The documents of a pack, each shifted as its data loader does, laid end to end."""
    tensors = load_file(path)
    lengths = tensors.pop("lengths").tolist()
    pieces, start = [], 0
    for number, length in enumerate(lengths):
        document = {name: value[start : start + length] for name, value in tensors.items()}
        shifted = shift_batch({**document, "lengths": torch.tensor([length])})
        del shifted["lengths"]
        shifted["document_ids"] = torch.full_like(shifted["input_ids"], number)
        pieces.append(shifted)
        start += length
    return {name: torch.cat([piece[name] for piece in pieces])[None] for name in pieces[0]}


def main() -> None:
    folder = Path(sys.argv[1])
    settings = json.loads((folder / "settings.json").read_text())
    torch.set_num_threads(settings["threads"])
    torch.manual_seed(0)
    model = build(folder, settings)
    model.train()
    optimizers = build_optimizers(model, OPTIMIZER)
    loss_config = resolve_loss_config("kl_div", "eager")
    dtype = torch.bfloat16 if settings["precision"] == "bf16" else torch.float32
    print("bench ready", flush=True)
    for line in sys.stdin:
        batch = batch_of(folder / f"{int(line)}.safetensors")
        if dtype == torch.float32:
            batch = {name: value.float() if value.is_floating_point() else value for name, value in batch.items()}
        start = time.perf_counter()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            _, loss, _ = model(
                **batch, ttt_steps=settings["ttt_steps"], ttt_step_loss_decay=1.0, loss_config=loss_config
            )
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        assert torch.isfinite(loss)
        print(f"bench {time.perf_counter() - start}", flush=True)


if __name__ == "__main__":
    main()
