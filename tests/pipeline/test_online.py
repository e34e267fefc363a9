"""`capture.mode: online`: the head of stored states, without any on the disk."""

from typing import Any

import pytest
import torch
from drafthead.data.errors import InputError
from drafthead.data.files import read_jsonl
from drafthead.pipeline import train as training
from drafthead.pipeline.recipe import load_recipe
from drafthead.pipeline.run_dir import Run
from drafthead.pipeline.train_inputs import Inputs, loader_of
from safetensors.torch import load_file

from tests.conftest import reset_accelerator

pytestmark = pytest.mark.usefixtures("fresh_accelerator")

ALONE = ("capture.batch_tokens=1", "train.tokens=3k", "train.batch_tokens=256", "train.depth=2", "train.log_every=1")
STAGES = ("prompts", "respond", "encode", "draft-vocab", "capture")


def ready(make_run: Any, name: str, *overrides: str) -> Run:
    run: Run = make_run(name, *overrides)
    for stage in STAGES:
        run.run_stage(stage)
    return run


def losses(run: Run) -> list[float]:
    return [row["loss"] for row in read_jsonl(run.path / "train" / "log.jsonl") if "loss" in row]


@pytest.mark.slow
def test_the_same_losses_as_with_stored_states(
    make_run: Any, tiny_run: Run, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTHEAD_CACHE", str(tmp_path / "cache"))  # states of rows that ran alone
    monkeypatch.setenv("WANDB_MODE", "disabled")
    runs = [ready(make_run, mode, *ALONE, f"capture.mode={mode}") for mode in ("store", "online")]
    for run in runs:
        training.work(run)
        reset_accelerator()
    stored, online = runs
    assert losses(stored) == losses(online)
    assert len(losses(online)) > 5
    expected = load_file(stored.path / "train" / "head.safetensors")
    found = load_file(online.path / "train" / "head.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    folder = online.folder("capture").resolve()
    assert not list(folder.rglob("*.safetensors"))
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 20_000


@pytest.mark.slow
def test_rows_that_run_together_differ_by_rounding(make_run: Any, tiny_run: Run) -> None:
    """Padding changes the order of fp32 sums over a few hundred terms: 1e-6 of the largest state, some times over."""
    stored, online = Inputs.open(tiny_run), Inputs.open(ready(make_run, "online", "capture.mode=online"))
    rows = online.rows[:6]
    expected, found = loader_of(stored.store)(rows), loader_of(online.store)(rows)
    assert found.documents == expected.documents
    for name in ("aux_TAD", "last_TD"):
        one, other = getattr(expected, name), getattr(found, name)
        torch.testing.assert_close(other, one, rtol=0, atol=1e-5 * float(one.abs().max()))


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_smaller_states_are_for_a_store_only(dtype: str) -> None:
    with pytest.raises(InputError, match=f"capture.dtype={dtype}: .*capture.mode=online writes nothing"):
        load_recipe("smoke/eagle3", ["capture.mode=online", f"capture.dtype={dtype}"])
