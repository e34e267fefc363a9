"""speculators' EAGLE-3 training step; run by bench/train.py with the interpreter of speculators' own environment.

Reads numbers of packs, answers `bench SECONDS`. As its trainer does by default (0.9.0: train/config/schema.py): a layer
with norms before the residual and the fusion and on the output, KL loss, Muon for matrices and AdamW for the rest,
clipping at 1.0, autocast, a linear schedule. Where its default needs a GPU, what runs on a CPU: the eager loss and
torch's SDPA; where fp32 is the faster type, Muon in it too.
"""

import contextlib
import json
import sys
import time
from argparse import Namespace
from contextlib import AbstractContextManager
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, shift_batch
from speculators.train.cli import create_transformer_layer_config
from speculators.train.optimizers import build_optimizers

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
MODEL = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True, "draft_attn_impl": "sdpa"}
LAYER = {
    "num_layers": 1,
    "draft_arch": "llama",
    "hidden_act": "silu",
    "sliding_window": 2048,
    "full_attention_indices": [],
}
WARM_UP = 0.01
"""Share of a training in which the rate rises."""


class Trainer:
    """A new model and what takes its steps."""

    def __init__(self, folder: Path, settings: dict):
        self.model = build(folder, settings)
        self.model.train()
        self.ttt_steps = settings["ttt_steps"]
        self.dtype = torch.bfloat16 if settings["precision"] == "bf16" else torch.float32
        self.optimizers = build_optimizers(self.model, OPTIMIZER)
        self.groups = [(group, group["lr"]) for one in self.optimizers for group in one.param_groups]
        self.loss_config = resolve_loss_config("kl_div", "eager")

    def step(self, batch: dict[str, torch.Tensor], done: float = WARM_UP) -> tuple[float, float]:
        """Returns the loss and the seconds that it took; `done`: share of the training so far (default: full rates)."""
        for group, rate in self.groups:
            group["lr"] = rate * min(done / WARM_UP, (1 - done) / (1 - WARM_UP))
        if self.dtype == torch.float32:
            batch = {name: value.float() if value.is_floating_point() else value for name, value in batch.items()}
        start = time.perf_counter()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            _, loss, _ = self.model(
                **batch, ttt_steps=self.ttt_steps, ttt_step_loss_decay=1.0, loss_config=self.loss_config
            )
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        with muon_in_fp32() if self.dtype == torch.float32 else contextlib.nullcontext():
            for one in self.optimizers:
                one.step()
        seconds = time.perf_counter() - start
        assert torch.isfinite(loss)
        return loss.item(), seconds


def muon_in_fp32() -> AbstractContextManager:
    """torch's Muon orthogonalises in bf16 whatever it is given: 24 s a step on a CPU without bf16, in fp32 one."""
    return mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.float)


def build(folder: Path, settings: dict) -> Eagle3DraftModel:
    vocab = load_file(folder / "vocab.safetensors")
    return Eagle3DraftModel.from_training_args(
        verifier_config=create_transformer_layer_config(settings["target"], **LAYER),
        t2d=vocab["t2d"],
        d2t=vocab["d2t"],
        draft_vocab_size=settings["draft_vocab_size"],
        ttt_steps=settings["ttt_steps"],
        verifier_name_or_path=settings["target"],
        target_layer_ids=settings["layer_ids"],
        **MODEL,
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
    trainer = Trainer(folder, settings)
    print("bench ready", flush=True)
    for line in sys.stdin:
        _, seconds = trainer.step(batch_of(folder / f"{int(line)}.safetensors"))
        print(f"bench {seconds}", flush=True)


if __name__ == "__main__":
    main()
