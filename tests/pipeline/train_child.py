"""Train a run in this process; run by path from a forked process that has imported everything (test_train_kills.py).

`CALL` holds `run` (a path) and `env`.
"""

import os
from pathlib import Path

import torch
from drafthead.pipeline.run_dir import open_run
from drafthead.pipeline.stages import STAGES
from drafthead.pipeline.train import work

call = globals()["CALL"]
os.environ.update(call["env"])
torch.set_num_threads(1)
work(open_run(Path(call["run"]), STAGES, []))
