"""Kernels run on the CPU in Triton's interpreter, or compiled on a GPU: one process can do only one of the two."""

from collections.abc import Iterator

import pytest
import torch
from drafthead.kernels.backend import interpreting
from drafthead.kernels.testing import garbage_in_new_tensors, interpret_kernels

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    interpret_kernels()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where a test's tensors live, such that `impl="triton"` runs there."""
    name = str(request.param)
    if name == "cuda" and (not HAS_CUDA or interpreting()):
        pytest.skip("needs a CUDA device and no TRITON_INTERPRET")
    if name == "cpu" and not interpreting():
        pytest.skip("kernels of this process are compiled; TRITON_INTERPRET=1 runs them on the CPU instead")
    return name


@pytest.fixture(autouse=True)
def _garbage() -> Iterator[None]:
    """Outputs are `torch.empty`; here whatever a kernel leaves out is NaN or huge."""
    with garbage_in_new_tensors():
        yield
