"""Training: resumed == uninterrupted, accumulated == one batch, many ranks == one, and failures are failures.

The loop runs in this process on the stored states of the tiny run, except where ranks are started.
"""

import contextlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from drafthead.data.batches import load_pack, plan_epoch, plan_steps, supervised_slots
from drafthead.data.errors import InputError
from drafthead.data.files import read_json, read_jsonl
from drafthead.pipeline import heldout, train_loop, train_step
from drafthead.pipeline import train as training
from drafthead.pipeline.checkpoint import newest_state
from drafthead.pipeline.cores import side_by_side
from drafthead.pipeline.heads.base import HeadBatch, Objective
from drafthead.pipeline.heads.build import build_head
from drafthead.pipeline.launch import LAUNCH_FILES, make_accelerator
from drafthead.pipeline.optim import learning_rate
from drafthead.pipeline.recipe import TrainConfig
from drafthead.pipeline.run_dir import Run
from drafthead.pipeline.train_inputs import Inputs
from drafthead.pipeline.train_log import Tally, unlearned
from safetensors.torch import load_file
from torch import Tensor

from tests.conftest import reset_accelerator

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_accelerator")]
MakeRun = Any
C17 = (
    "train.tokens=6k",
    "train.batch_tokens=256",
    "train.accumulation=2",
    "train.depth=2",
    "train.evaluate_every=3",
    "train.checkpoint_every=4",
    "train.log_every=1",
)


class Killed(BaseException):
    """Stands for a kill at a place that a test chooses."""


@pytest.fixture
def run_with(make_run: MakeRun, tiny_run: Run) -> Any:
    """Make a run whose states are those of the tiny run, ready to train."""

    def make(name: str, *overrides: str) -> Run:
        run: Run = make_run(name, *overrides)
        for stage in ("prompts", "respond", "encode", "draft-vocab", "capture"):
            assert not run.run_stage(stage), f"{stage}: from the cache"
        return run

    return make


def weights(run: Run) -> dict[str, Tensor]:
    return load_file(run.path / "train" / "head.safetensors")


def log(run: Run, name: str) -> list[Any]:
    rows = read_jsonl(run.path / "train" / "log.jsonl")
    return [(row["step"], row[name]) for row in rows if name in row]


@dataclass
class Spy:
    """Which tokens each forward pass saw, and in which mode the head was."""

    trained: list[tuple[int, ...]] = field(default_factory=list)
    evaluated: int = 0

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = train_step.run_head

        def run_head(accelerator: Any, model: Any, pack: Any, *rest: Any) -> Any:
            if torch.is_grad_enabled():
                assert model.training, "the head is not in train mode"
                self.trained.append(tuple(pack.tokens_T.tolist()))
            else:
                assert not model.training
                self.evaluated += 1
            return real(accelerator, model, pack, *rest)

        monkeypatch.setattr(train_step, "run_head", run_head)
        monkeypatch.setattr(heldout, "run_head", run_head)


# ---- C17: a killed training goes on as if nothing had happened


def test_resumed_equals_uninterrupted(run_with: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy()
    spy.watch(monkeypatch)
    straight, killed = run_with("straight", *C17), run_with("killed", *C17)
    training.work(straight)
    in_order = list(spy.trained)
    num_steps = len(in_order) // 2
    assert num_steps > 10
    assert spy.evaluated > 0, "the head was evaluated in between"
    spy.trained.clear()

    save = train_loop.save_checkpoint

    def save_and_die(accelerator: Any, folder: Path, step: int, *rest: Any) -> None:
        save(accelerator, folder, step, *rest)
        if step == 8:
            raise Killed

    monkeypatch.setattr(train_loop, "save_checkpoint", save_and_die)
    with pytest.raises(Killed):
        training.work(killed)
    assert len(spy.trained) == 16
    # log lines and folders of work that is lost must not stay
    with open(killed.path / "train" / "log.jsonl", "a") as file:
        file.write(json.dumps({"step": 9, "learning_rate": 77.0}) + '\n{"step": 1')
    checkpoints = killed.path / "train" / "checkpoints"
    (checkpoints / "step-00000012").mkdir()
    (checkpoints / "step-00000012" / "model.safetensors").write_bytes(b"half")
    shutil.copytree(checkpoints / "step-00000008", checkpoints / ".step-00000012.part")
    reset_accelerator()
    monkeypatch.setattr(train_loop, "save_checkpoint", save)
    training.work(killed)

    assert spy.trained == in_order, "a sample was repeated or skipped"
    assert log(killed, "learning_rate") == log(straight, "learning_rate")
    assert [step for step, _ in log(straight, "learning_rate")] == list(range(1, num_steps + 1))
    assert log(killed, "walk_accept_length") == log(straight, "walk_accept_length")
    assert log(killed, "loss") == log(straight, "loss")
    expected = weights(straight)
    for name, tensor in weights(killed).items():
        assert torch.equal(tensor, expected[name]), name
    for name in ("report.json", "head.json"):
        assert read_json(killed.path / "train" / name) == read_json(straight.path / "train" / name)
    kept = list((straight.path / "train" / "checkpoints").glob("step-*"))
    assert len(kept) == straight.recipe.train.keep_checkpoints


# ---- trainings that learn nothing say so


@pytest.mark.parametrize("what", ["loss", "norm"])
def test_the_first_step_without_a_number_stops_the_training(
    run_with: Any, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Weights are NaN after it; before, the run went on and the export was refused at its end."""
    run = run_with("r", *C17)
    real, taken = train_loop.take_step, []

    def take_step(*arguments: Any) -> float | None:
        norm = real(*arguments)
        taken.append(norm)
        if len(taken) == 3 and what == "loss":
            arguments[7].loss = float("nan")
        return float("inf") if len(taken) == 3 and what == "norm" else norm

    monkeypatch.setattr(train_loop, "take_step", take_step)
    with pytest.raises(InputError, match=r"^train: step 3: the loss is .*norm .*store verify"):
        training.work(run)
    assert not (run.path / "train" / "head.safetensors").exists()


@pytest.mark.parametrize(("losses", "is_told"), [([3, 2, 1], False), ([3, 2, 3], True), ([3, 4], False)])
def test_a_loss_that_has_not_fallen_is_told(tmp_path: Path, losses: list[int], is_told: bool) -> None:
    rows = [{"step": 10 * number, "loss": loss} for number, loss in enumerate(losses, 1)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"step": 99, "walk": 1}]))
    told = unlearned(tmp_path / "log.jsonl")
    assert (told is not None) is is_told
    if told:
        assert "has not fallen: 3.000 at step 10, 3.000 at step 30" in told


def test_an_epoch_sees_every_row_once() -> None:
    lengths = [5, 30, 7, 7, 12, 40, 3]
    for epoch in range(3):
        packs = plan_epoch(lengths, 32, seed=1, epoch=epoch)
        assert sorted(row for pack in packs for row in pack) == list(range(len(lengths)))
    steps = plan_steps(lengths, lengths, 32, 1, packs_per_step=2, tokens=400)
    dealt = [row for step in steps for pack in step for row in pack]
    assert sorted(dealt[: len(lengths)]) == list(range(len(lengths)))
    assert plan_epoch(lengths, 32, 1, 0) != plan_epoch(lengths, 32, 1, 1)


def test_two_ranks_take_the_packs_of_two_accumulated_ones() -> None:
    lengths = [10] * 12
    one_rank = plan_steps(lengths, lengths, 20, 0, packs_per_step=1 * 2, tokens=200)
    two_ranks = plan_steps(lengths, lengths, 20, 0, packs_per_step=2 * 1, tokens=200)
    assert one_rank == two_ranks
    assert [pack for step in two_ranks for rank in range(2) for pack in step[rank::2]] == [
        pack for step in one_rank for pack in step
    ]


def saved_at(run: Run, step: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Train until the checkpoint of that step is written."""
    save = train_loop.save_checkpoint

    def save_and_die(accelerator: Any, folder: Path, number: int, *rest: Any) -> None:
        save(accelerator, folder, number, *rest)
        if number == step:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(train_loop, "save_checkpoint", save_and_die)
        with pytest.raises(Killed):
            training.work(run)
    return run.path / "train" / "checkpoints" / f"step-{step:08d}"


def test_a_checkpoint_that_ranks_cannot_share_is_one_line(
    run_with: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = run_with("r", *C17, "run.launch=ddp")
    alone = run_with("alone", *C17, "train.accumulation=3")
    saved = saved_at(alone, 4, monkeypatch)
    shutil.copytree(saved, run.path / "train" / "checkpoints" / saved.name)
    capfd.readouterr()
    with pytest.raises(SystemExit) as caught:
        run.run_stage("train")
    assert caught.value.code == 2
    said = capfd.readouterr().err
    (line,) = [line for line in said.splitlines() if line.startswith("drafthead:")]
    assert "its steps are of 3 micro batches (written by 1 processes), which 2 processes cannot share" in line
    assert "Traceback" not in said
    assert len(said.splitlines()) < 4, said
    assert not (run.path / "train" / "manifest.json").exists()


@pytest.mark.parametrize("harm", ["cut off", "missing"])
def test_a_checkpoint_that_lost_a_part_is_passed_over(
    harm: str, run_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with("r", *C17)
    saved = saved_at(run, 8, monkeypatch)
    assert newest_state(saved.parent)["step"] == 8
    weights_file = saved / "model.safetensors"
    if harm == "missing":
        weights_file.unlink()
    else:
        os.truncate(weights_file, weights_file.stat().st_size - 1)
    assert newest_state(saved.parent)["step"] == 4


# ---- which head is kept


@pytest.mark.parametrize(("keep", "taken"), [("best", 6), ("last", None)])
def test_the_head_with_the_longest_walk_is_kept(
    keep: str, taken: int | None, run_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with("r", *C17, f"train.keep={keep}", "train.checkpoint_every=3", "train.keep_checkpoints=99")
    walks = iter([1.2, 1.5, 1.3, 1.4, *[1.1] * 99])

    def scripted(*_: Any) -> dict[str, Any]:
        return {"per_position": [0.5], "conditional": [0.5], "mean_acceptance_length": next(walks)}

    monkeypatch.setattr(train_loop, "heldout_walk", scripted)
    monkeypatch.setattr(training, "heldout_walk", scripted)
    training.work(run)
    report = read_json(run.path / "train" / "report.json")
    assert report["steps"] > 9
    assert report["taken_step"] == (taken or report["steps"])
    saved = load_file(run.path / "train" / "checkpoints" / "step-00000006" / "model.safetensors")
    same = [torch.equal(saved[name], tensor) for name, tensor in weights(run).items()]
    if keep == "best":
        assert (report["walk"]["mean_acceptance_length"], report["last_walk"]["mean_acceptance_length"]) == (1.5, 1.1)
        assert all(same)
    else:
        assert report["walk"]["mean_acceptance_length"] == 1.1
        assert not all(same)


# ---- one step


@pytest.mark.parametrize("context_weight", [0.0, 0.3])
def test_accumulation_equals_one_batch_of_the_same_rows(context_weight: float, run_with: Any) -> None:
    run = run_with("r", *C17, f"train.context_weight={context_weight}")
    inputs = Inputs.open(run)
    pieces = [inputs.rows[:3], inputs.rows[3:5]]
    total = sum(supervised_slots(row) for piece in pieces for row in piece)
    found = []
    whole = [[row for piece in pieces for row in piece]]
    for packs, threads in ((pieces, None), (pieces, side_by_side(2)), (whole, None)):
        settings = run.recipe.train.model_copy(update={"accumulation": len(packs), "max_grad_norm": 1e9})
        accelerator = make_accelerator("single", precision="fp32", accumulation=len(packs), max_grad_norm=1e9)
        head = build_head(run.recipe.head, run.target, inputs.frozen, 3, seed=0)
        before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
        model, optimizer = accelerator.prepare(head, torch.optim.SGD(head.parameters(), lr=1.0))
        tally = Tally()
        loaded = iter([load_pack(pack, inputs.store) for pack in packs])
        norm = train_step.take_step(accelerator, model, optimizer, loaded, inputs, total, settings, tally, threads)
        gradients = {name: before[name] - tensor for name, tensor in head.state_dict().items()}
        found.append((tally.metrics()["loss"], norm, gradients))
        reset_accelerator()
    *accumulated, (loss_one, norm_one, gradients_one) = found
    assert norm_one > 0
    for loss, norm, gradients in accumulated:
        assert loss == pytest.approx(loss_one, rel=1e-5)
        assert norm == pytest.approx(norm_one, rel=1e-5)
        for name, gradient in gradients_one.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-5)


def test_every_batch_has_a_supervised_slot(run_with: Any) -> None:
    """So that no rank ever stands outside the reduction; even an answer of one token gives a slot."""
    run = run_with("r", *C17)
    inputs = Inputs.open(run)
    assert all(supervised_slots(row) >= 1 for row in [*inputs.rows, *inputs.heldout_rows])
    shortest = replace(inputs.rows[0], input_ids=inputs.rows[0].input_ids[: inputs.rows[0].context_length + 1])
    assert supervised_slots(shortest) == 1
    pack = load_pack([inputs.rows[0]], inputs.store)
    length = len(shortest.input_ids)
    batch = HeadBatch(
        tokens_T=pack.tokens_T[:length],
        aux_TAD=pack.aux_TAD[:length],
        last_TD=pack.last_TD[:length],
        position_T=pack.position_T[:length],
        supervised_T=pack.supervised_T[:length],
        documents=[(0, length)],
    )
    head = build_head(run.recipe.head, run.target, inputs.frozen, 3, seed=0)
    output = head(batch, inputs.frozen, Objective(depth=3, step_weight=0.8))
    output.loss.backward()
    assert output.rows_K.tolist() == [1, 0, 0]
    assert all(parameter.grad is not None for parameter in head.parameters() if parameter.requires_grad)


def test_which_chains_are_trained_does_not_change_the_heldout_walk(run_with: Any) -> None:
    """`served` leaves out chains that the walk may come upon: there all are run that go on."""
    run = run_with("r", *C17)
    inputs = Inputs.open(run)
    head = build_head(run.recipe.head, run.target, inputs.frozen, 3, seed=0)
    walks = []
    for chains in ("all", "surviving", "served"):
        settings = run.recipe.train.model_copy(update={"chains": chains})
        recipe = run.recipe.model_copy(update={"train": settings})
        walks.append(heldout.heldout_walk(Accelerator(cpu=True), head, inputs, recipe))
        assert head.training
    assert walks[0] == walks[1] == walks[2]
    assert walks[0]["per_position"][0] > 0


@pytest.mark.parametrize("total", [10, 100, 1000])
@pytest.mark.parametrize("warmup", [0.0, 0.015, 0.2])
def test_the_learning_rate_peaks_after_warm_up_and_ends_at_zero(total: int, warmup: float) -> None:
    settings = TrainConfig(tokens=1, learning_rate=0.5, warmup_ratio=warmup)
    rates = [learning_rate(step, total, settings) for step in range(total + 1)]
    peak = max(1, round(warmup * total))
    assert rates[peak - 1] == max(rates) == 0.5
    assert all(a < b for a, b in itertools.pairwise(rates[:peak]))
    assert all(a >= b for a, b in itertools.pairwise(rates[peak - 1 :]))
    assert rates[total] == pytest.approx(0, abs=1e-12)
    assert rates[total - 1] < 0.02 or total == 10


# ---- what is written


def test_metrics_are_shares_and_the_loss_falls(tiny_run: Run) -> None:
    rows = read_jsonl(tiny_run.path / "train" / "log.jsonl")
    shares = [
        value
        for row in rows
        for name, value in row.items()
        if name.startswith(("slot_survival_", "walk_position_")) and value is not None
    ]
    assert len(shares) > 5
    assert all(0 <= value <= 1 for value in shares)
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < losses[0]
    for row in rows:
        if "loss" in row:
            parts = [row[f"{part}_ms"] for part in ("data", "forward", "backward", "optimizer")]
            assert 0 < sum(parts) <= row["step_ms"] * 1.001
            assert row["forward_ms"] > 0
            assert row["tflops"] > 0
            assert "mfu" not in row, "a CPU's peak is not known"
    lengths = [row["walk_accept_length"] for row in rows if "walk_accept_length" in row]
    assert all(1 <= length <= 1 + tiny_run.recipe.eval.k for length in lengths)
    assert read_json(tiny_run.path / "train" / "report.json")["tokens"] >= tiny_run.recipe.train.tokens


def test_tracking_files_are_written_offline(tiny_run: Run) -> None:
    files = list((tiny_run.path / "wandb").glob("offline-run-*/*.wandb"))
    assert files
    assert all(path.stat().st_size > 0 for path in files)


# ---- ranks


@pytest.fixture(scope="module")
def one_rank() -> dict[str, Any]:
    """Filled by the first test that needs it: loss and weights of one process with accumulation 2."""
    return {}


FEW = (
    "train.tokens=3k",
    "train.batch_tokens=384",
    "train.depth=2",
    "train.log_every=1",
    "train.evaluate_every=2",
    "train.checkpoint_every=2",
)


@contextlib.contextmanager
def second_machine(run: Run, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start its worker with the line of docs/multi-node.md; the address is this machine's."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    patch.setenv("MAIN_PROCESS_IP", "127.0.0.1")
    patch.setenv("MAIN_PROCESS_PORT", port)
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    command += ["--config_file", str(LAUNCH_FILES / "multi_node.yaml"), "--num_machines", "2", "--machine_rank", "1"]
    command += ["--main_process_ip", "127.0.0.1", "--main_process_port", port, "--num_processes", "2"]
    other = subprocess.Popen([*command, "-m", "drafthead.pipeline.train", str(run.path)])
    try:
        yield
        assert other.wait(timeout=60) == 0
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize("launch", ["ddp", "zero2", "zero3", "multi_node"])
def test_two_ranks_train_the_head_of_one(
    launch: str, run_with: Any, one_rank: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not one_rank:
        alone = run_with("alone", *FEW, "train.accumulation=2")
        training.work(alone)
        one_rank.update(weights=weights(alone), rates=log(alone, "learning_rate"), walk=log(alone, "walk_position_1"))
        one_rank["norms"] = log(alone, "grad_norm")
    run = run_with(launch, *FEW, f"run.launch={launch}")
    with second_machine(run, monkeypatch) if launch == "multi_node" else contextlib.nullcontext():
        assert run.run_stage("train")
    assert log(run, "learning_rate") == one_rank["rates"]
    assert len(one_rank["rates"]) > 2
    assert [norm for _, norm in log(run, "grad_norm")] == pytest.approx([n for _, n in one_rank["norms"]], rel=1e-4)
    torch.testing.assert_close(weights(run), one_rank["weights"], rtol=0, atol=1e-4)
    for row in read_jsonl(run.path / "train" / "log.jsonl"):
        assert all(0 <= row[name] <= 1 for name in row if name.startswith(("slot_survival", "draft_vocab_overlap")))
    assert log(run, "walk_position_1") == one_rank["walk"], "held-out rows count once, whatever the ranks"


def test_one_rank_goes_on_where_two_were(run_with: Any, one_rank: dict[str, Any]) -> None:
    """With twice the accumulation: the steps, and so the weights, stay what they were."""
    before = run_with("before", *FEW, "train.keep=last", "run.launch=ddp")
    assert before.run_stage("train")
    checkpoints = before.path / "train" / "checkpoints"
    run = run_with("after", *FEW, "train.keep=last")
    shutil.copytree(checkpoints / "step-00000002", run.path / "train" / "checkpoints" / "step-00000002")
    training.work(run)
    assert log(run, "learning_rate") == log(before, "learning_rate")[2:]
    assert log(run, "walk_position_1") == log(before, "walk_position_1")[1:]
    torch.testing.assert_close(weights(run), weights(before), rtol=0, atol=1e-4)


# ---- failures


@pytest.mark.parametrize(
    ("program", "code"),
    [("raise SystemExit(1)", "1"), ("import os; os.kill(os.getpid(), 9)", "-9")],
    ids=["exception", "killed-for-memory"],
)
def test_a_failed_worker_fails_the_stage(
    program: str, code: str, run_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with("r")
    monkeypatch.setattr(training, "launch_command", lambda *_: ([sys.executable, "-c", program], {}))
    with pytest.raises(InputError, match=f"training stopped with exit code {code};"):
        run.run_stage("train")
    assert not (run.path / "train" / "manifest.json").exists()
    with pytest.raises(InputError, match="stage train has not finished"):
        run.run_stage("eval")


def test_a_worker_does_not_outlive_its_stage(tmp_path: Path) -> None:
    """Or a killed stage that is run again would train beside its own orphan."""
    program = f"""
import os, subprocess, sys, time
from drafthead.pipeline.train import end_with_parent
child = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
with open({str(tmp_path / "pid")!r}, "w") as out:
    subprocess.Popen([sys.executable, "-c", child], preexec_fn=end_with_parent, stdout=out)
    while not os.path.getsize({str(tmp_path / "pid")!r}):
        time.sleep(0.05)
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == -9
    worker = int((tmp_path / "pid").read_text())
    end = time.monotonic() + 20
    while Path(f"/proc/{worker}").exists() and _state(worker) != "Z" and time.monotonic() < end:
        time.sleep(0.1)
    assert not Path(f"/proc/{worker}").exists() or _state(worker) == "Z"


def _state(process: int) -> str:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"
