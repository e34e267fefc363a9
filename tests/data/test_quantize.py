"""States of one byte a value: how near they come back, with outliers as language models have them.

Shapes: S state vectors, D hidden.
"""

import pytest
import torch
from drafthead.data.quantize import CODES, quantize, vector_bytes
from torch import Tensor

S, D = 300, 64
RELATIVE_ERROR = {"int8": 0.012, "fp8": 0.035}
"""Of a vector: uniform rounding to a grid of 254 steps, or to 3 bits of mantissa."""


def like_a_target() -> Tensor:
    """Three channels 30 times larger than the rest, and a first vector 300 times larger, mostly in one channel."""
    state_SD = torch.randn(S, D, generator=torch.Generator().manual_seed(0))
    state_SD[:, [3, 17, 40]] *= 30
    state_SD[0] *= 10
    state_SD[0, 3] = 9000
    return state_SD.bfloat16()


def errors(found_SD: Tensor, state_SD: Tensor) -> Tensor:
    found, wanted = found_SD.float(), state_SD.float()
    return (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)


@pytest.mark.parametrize("dtype", CODES)
def test_vectors_come_back_within_the_grid(dtype: str) -> None:
    state_SD = like_a_target()
    found = errors(quantize(state_SD, dtype).widen(), state_SD)
    assert float(found.mean()) < RELATIVE_ERROR[dtype]
    assert float(found.max()) < 2 * RELATIVE_ERROR[dtype]


@pytest.mark.parametrize("dtype", CODES)
def test_ordinary_channels_do_not_drown_beside_outliers(dtype: str) -> None:
    """The grid of a whole vector would be as coarse as they are."""
    state_SD = like_a_target()[1:]
    ordinary = [channel for channel in range(D) if channel not in (3, 17, 40)]
    found_SD = quantize(state_SD, dtype).widen()
    assert float(errors(found_SD[:, ordinary], state_SD[:, ordinary]).mean()) < RELATIVE_ERROR[dtype]
    step_S1 = state_SD.float().abs().amax(-1, keepdim=True) / 127
    plain_SD = (state_SD.float() / step_S1).round() * step_S1
    assert float(errors(plain_SD[:, ordinary], state_SD[:, ordinary]).mean()) > 0.05


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("size", [1e-4, 1.0, 3e4], ids=["small", "usual", "large"])
def test_the_scale_fits_states_of_any_size(dtype: str, size: float) -> None:
    state_SD = torch.randn(S, D, generator=torch.Generator().manual_seed(1)) * size
    assert float(errors(quantize(state_SD, dtype).widen(), state_SD).max()) < RELATIVE_ERROR[dtype]


@pytest.mark.parametrize("dtype", CODES)
def test_faults_stay_visible(dtype: str) -> None:
    """What `find_fault` looks for must not be hidden by the codes."""
    state_SD = like_a_target()
    state_SD[5, 2] = float("nan")
    state_SD[6, 2] = float("inf")
    state_SD[7] = 0
    found_SD = quantize(state_SD, dtype).widen()
    bad_S = ~torch.isfinite(found_SD).all(-1)
    assert bad_S.nonzero().flatten().tolist() == [5, 6]
    assert not found_SD[7].any()


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("count", [0, 1, 4097], ids=lambda count: f"{count} vectors")
def test_any_number_of_vectors(dtype: str, count: int) -> None:
    state_SD = torch.randn(count, D, generator=torch.Generator().manual_seed(1))
    stored = quantize(state_SD, dtype)
    assert stored.widen().shape == (count, D)
    assert stored.code_SD.nbytes + stored.scale_S.nbytes == count * vector_bytes(D, dtype)
