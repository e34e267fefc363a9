"""One optimiser step of the real head on given packs, dealt to however many ranks there are.

python -m rank_worker RUN LAUNCH PACKS SILENT OUT.pt        # started by test_train_ranks.py

PACKS are lists of row numbers (JSON), one list for each micro batch in the order of a step; the pack numbered SILENT
has no supervised token.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from drafthead.data.batches import load_pack, supervised_slots
from drafthead.pipeline.heads.build import build_head
from drafthead.pipeline.launch import full_weights, make_accelerator
from drafthead.pipeline.run_dir import open_run
from drafthead.pipeline.stages import STAGES
from drafthead.pipeline.train_inputs import Inputs
from drafthead.pipeline.train_log import Tally
from drafthead.pipeline.train_step import take_step


def main(path: str, launch: str, packs_json: str, silent: int, out: str) -> None:
    torch.set_num_threads(1)
    run = open_run(Path(path), STAGES, [])
    packs = json.loads(packs_json)
    ranks = 1 if launch == "single" else 2
    accumulation = len(packs) // ranks
    settings = run.recipe.train.model_copy(update={"accumulation": accumulation, "max_grad_norm": 1e9})
    accelerator = make_accelerator(launch, precision="fp32", accumulation=accumulation, max_grad_norm=1e9)
    inputs = Inputs.open(run)
    head = build_head(run.recipe.head, run.target, inputs.frozen, 3, seed=0)
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    # its step is g / (|g| + eps): almost the gradient where eps is large against it
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e3, betas=(0.0, 0.0), eps=1e3, weight_decay=0.0)
    model, optimizer = accelerator.prepare(head, optimizer)
    total = sum(supervised_slots(inputs.rows[row]) for n, pack in enumerate(packs) if n != silent for row in pack)
    own = []
    for number in range(accelerator.process_index, len(packs), ranks):
        pack = load_pack([inputs.rows[row] for row in packs[number]], inputs.store)
        nothing = torch.zeros_like(pack.supervised_T)
        own.append(replace(pack, supervised_T=nothing) if number == silent else pack)
    tally = Tally()
    model.train()
    norm = take_step(accelerator, model, optimizer, iter(own), inputs, total, settings, tally, None)
    weights = full_weights(accelerator, model)
    if accelerator.is_main_process:
        gradients = {name: before[name] - tensor for name, tensor in weights.items()}
        torch.save({"gradients": gradients, "norm": norm, "ranks": accelerator.num_processes}, out)
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
