"""Where the time of steps goes, and how many operations they are."""

import time

import pytest
import torch
from drafthead.pipeline.throughput import FlopCounter, StepClock, lanes_of, loss_flops, peak_flops
from torch import nn


def test_the_clock_adds_up_each_part() -> None:
    clock = StepClock()
    for _ in range(2):
        start = clock.now()
        time.sleep(0.02)
        start = clock.add("data", start)
        time.sleep(0.03)
        clock.add("forward", start)
    seconds = clock.seconds()
    assert 0.04 <= seconds["data"] < seconds["forward"]
    assert 0.06 <= seconds["forward"] < 1
    assert (seconds["backward"], seconds["optimizer"]) == (0, 0)


def test_times_of_micro_batches_side_by_side_overlap() -> None:
    clock = StepClock(lanes=2)
    clock.spans = [("data", 0.0, 1.0), ("forward", 1.0, 3.0), ("forward", 1.0, 3.0), ("optimizer", 3.0, 4.0)]
    assert clock.seconds() == {"data": 1.0, "forward": 2.0, "backward": 0.0, "optimizer": 1.0}
    assert lanes_of(4, threads=False) == 1
    assert lanes_of(1, threads=True) == 1


def test_linear_layers_are_counted_while_they_train() -> None:
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False))
    model[2].requires_grad_(False)
    counter = FlopCounter(model)
    model(torch.ones(5, 8))
    assert counter.take() == 2 * 5 * (3 * 8 * 16 + 2 * 16 * 4)
    with torch.no_grad():
        model(torch.ones(5, 8))
    assert counter.take() == 0


def test_the_loss_of_a_trained_lm_head_costs_a_product_more() -> None:
    assert loss_flops([], 40, trained=True) == 0
    assert loss_flops([6, 2], 40, trained=False) == 2 * 40 * (6 + 2 * 8)
    assert loss_flops([6, 2], 40, trained=True) == 2 * 40 * (6 + 3 * 8)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA L40S", 362e12),
        ("Tesla T4", None),
    ],
)
def test_peaks_are_found_by_name(name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda"), "bf16") == peak
    assert peak_flops(torch.device("cuda"), "fp32") is None
    assert peak_flops(torch.device("cpu"), "bf16") is None
