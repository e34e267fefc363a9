"""Launch files: every launch must train the head that one process trains."""

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from drafthead.data.errors import InputError
from drafthead.pipeline import launch as launching
from drafthead.pipeline.launch import build_ops, launch_command, make_accelerator, read_launch

LAUNCHES = (
    "ddp",
    "multi_node",
    "multi_node_zero2",
    "multi_node_zero3",
    "single",
    "zero1",
    "zero2",
    "zero2_offload",
    "zero3",
)


def test_unknown_launch_names_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"zero4: no such launch; give one of ddp, multi_node, "):
        launch_command("zero4", "toy_worker", [])


@pytest.mark.parametrize("name", ["../eagle3", "launch/zero2", ""])
def test_names_outside_the_launch_folder_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="no such launch"):
        read_launch(name)


def test_every_launch_file_is_read() -> None:
    assert tuple(sorted(path.stem for path in launching.LAUNCH_FILES.glob("*.yaml"))) == LAUNCHES
    stages = {name: read_launch(name).deepspeed_config.get("zero_stage") for name in LAUNCHES}
    known = {"ddp": None, "single": None, "zero1": 1, "zero2": 2, "zero2_offload": 2, "zero3": 3}
    assert stages == {**known, "multi_node": None, "multi_node_zero2": 2, "multi_node_zero3": 3}
    assert not any("use_cpu" in read_launch(name).path.read_text() for name in LAUNCHES)


def test_single_starts_plain_python() -> None:
    assert launch_command("single", "some.worker", ["a", "b c"]) == (
        [sys.executable, "-m", "some.worker", "a", "b c"],
        {},
    )


def test_one_process_per_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    command, _ = launch_command("zero2", "some.worker", ["a"])
    assert command[command.index("--num_processes") + 1] == "8"
    assert command[-3:] == ["-m", "some.worker", "a"]


def test_several_machines_need_the_address_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MAIN_PROCESS_IP", raising=False)
    with pytest.raises(InputError, match=r"run.launch=multi_node_zero2: set MAIN_PROCESS_IP .*docs/multi-node.md"):
        launch_command("multi_node_zero2", "some.worker", [])
    monkeypatch.setenv("MAIN_PROCESS_IP", "10.0.0.1")
    monkeypatch.setenv("NUM_MACHINES", "two")
    with pytest.raises(InputError, match="NUM_MACHINES=two: give a number"):
        launch_command("multi_node_zero2", "some.worker", [])
    monkeypatch.setenv("NUM_MACHINES", "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    command, _ = launch_command("multi_node_zero2", "some.worker", ["a"])
    flags = dict(itertools.pairwise(command))
    assert (flags["--num_processes"], flags["--num_machines"], flags["--machine_rank"]) == ("24", "3", "0")
    assert (flags["--main_process_ip"], flags["--main_process_port"]) == ("10.0.0.1", "29500")


def test_the_users_accelerate_cpu_switch_cannot_turn_deepspeed_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert launch_command("zero2", "some.worker", [])[1]["ACCELERATE_USE_CPU"] == "false"


def test_a_worker_started_alone_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(InputError, match=r"ddp: this worker was started alone"):
        make_accelerator("ddp", precision="fp32", accumulation=1, max_grad_norm=1.0)


def train(launch: str, accumulation: int, folder: Path) -> dict[str, Any]:
    out = folder / f"{launch}.pt"
    build_ops(launch)
    command, variables = launch_command(launch, "toy_worker", [launch, "fp32", str(accumulation), str(out)])
    environment = {**os.environ, **variables, "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    environment["PYTHONPATH"] = str(Path(__file__).parent)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = torch.load(out)
    return found


@pytest.fixture(scope="module")
def one_big_batch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = train("single", 1, tmp_path_factory.mktemp("single"))
    assert min(found["norms"]) > 1.0, "the toy must clip, or clipping is not tested"
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launch", "kind", "num_processes"),
    [
        ("single", "NO", 1),
        ("ddp", "MULTI_CPU", 2),
        ("zero1", "DEEPSPEED", 2),
        ("zero2", "DEEPSPEED", 2),
        ("zero3", "DEEPSPEED", 2),
        pytest.param(
            "zero2_offload",
            "DEEPSPEED",
            2,
            marks=pytest.mark.skipif(shutil.which("g++") is None, reason="DeepSpeed's CPU Adam needs a C++ compiler"),
        ),
    ],
)
def test_ranks_and_accumulation_equal_one_big_batch(
    launch: str, kind: str, num_processes: int, one_big_batch: dict[str, Any], tmp_path: Path
) -> None:
    found = train(launch, 2, tmp_path)
    assert (found["kind"], found["num_processes"]) == (kind, num_processes)
    assert found["norms"] == pytest.approx(one_big_batch["norms"], rel=1e-5)
    assert found["weights"].keys() == one_big_batch["weights"].keys()
    for name, expected in one_big_batch["weights"].items():
        torch.testing.assert_close(found["weights"][name], expected, rtol=0, atol=1e-6)
