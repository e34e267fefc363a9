"""Counter-based random numbers: the published words, the same in a kernel, and what is made of them."""

import pytest
import torch
import triton
import triton.language as tl
from drafthead.kernels import philox
from drafthead.kernels.philox_device import accept_uniform, four_words, to_uniform, token_exponential
from torch import Tensor

from tests.kernels.distribution import chi_square_p

PUBLISHED = [
    (0, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (-1, 0xFFFFFFFF, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
]
"""Key, every word of the counter, result: the known answers that come with Random123."""


@pytest.mark.parametrize(("key", "word", "result"), PUBLISHED, ids=["zeros", "ones"])
def test_the_words_are_the_published_ones(key: int, word: int, result: str) -> None:
    words = philox.philox(torch.tensor(key), (torch.tensor(word),) * 4)
    assert " ".join(f"{int(word):08x}" for word in words) == result


def test_digits_of_pi() -> None:
    """The third known answer has four different words and a key whose halves differ."""
    counter = tuple(torch.tensor(word) for word in (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344))
    words = philox.philox(torch.tensor(0x299F31D0A4093822), counter)
    assert [int(word) for word in words] == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@triton.jit
def draw_kernel(
    seed_ptr, position_ptr, step_ptr, accept_ptr, uniform_ptr, noise_ptr, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    seed, position, step = tl.load(seed_ptr + row), tl.load(position_ptr + row), tl.load(step_ptr + row)
    tl.store(accept_ptr + row, accept_uniform(seed, position, step))
    for start in range(0, COUNT, BLOCK):
        index = start // 4 + tl.arange(0, BLOCK // 4)
        a, b, c, d = four_words(seed, position, step, 1, index)
        word = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
        place = row * COUNT + start + tl.arange(0, BLOCK)
        tl.store(uniform_ptr + place, to_uniform(word))
        tl.store(noise_ptr + place, token_exponential(seed, position, step, start, BLOCK))


@pytest.mark.parametrize("block", [16, 64])
def test_kernels_draw_the_same_numbers(device: str, block: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, count = 20, 64
    seed = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator).to(device)
    position = torch.randint(2**40, (rows,), generator=generator).to(device)
    step = torch.randint(200, (rows,), generator=generator).to(device)
    accept = torch.empty(rows, device=device)
    uniform, noise = torch.empty(2, rows, count, device=device)
    draw_kernel[(rows,)](seed, position, step, accept, uniform, noise, COUNT=count, BLOCK=block)
    assert torch.equal(accept, philox.uniform(seed, position, step, philox.ACCEPT)[:, 0])
    assert torch.equal(uniform, philox.uniform(seed, position, step, philox.TOKEN, count))
    exact = philox.exponential(seed, position, step, count)
    assert ((noise.double() - exact).abs() <= 4e-6 * exact).all()


@triton.jit
def convert_kernel(word_ptr, uniform_ptr, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(uniform_ptr + index, to_uniform(tl.load(word_ptr + index).to(tl.uint32)))


def test_uniform_numbers_stay_between_zero_and_one(device: str) -> None:
    """Also those of the smallest and largest words, from which fp32 would make 0 and 1."""
    word = torch.tensor([0, 1, 2**31 - 1, 2**31, 2**32 - 129, 2**32 - 128, 2**32 - 2, 2**32 - 1], device=device)
    uniform = torch.empty(8, device=device)
    convert_kernel[(1,)](word, uniform, BLOCK=8)
    assert 0 < uniform.min() < 2.0**-32
    assert uniform.max() == 1 - 2.0**-24
    assert (uniform.diff() >= 0).all()
    assert torch.equal(uniform, philox.to_uniform(word))


def test_every_part_of_the_place_counts() -> None:
    """Another seed, position (either half), step, purpose or index is another number."""
    places = [(0, 0, 0), (1, 0, 0), (1 << 32, 0, 0), (0, 1, 0), (0, 1 << 32, 0), (0, 0, 1)]
    seed, position, step = torch.tensor(places).T
    drawn = [philox.uniform(seed, position, step, purpose, 5) for purpose in (philox.ACCEPT, philox.TOKEN)]
    assert len(torch.stack(drawn).unique()) == 2 * len(places) * 5


@pytest.mark.parametrize("axis", ["seed", "position", "step", "index"])
def test_numbers_are_uniform_along_every_axis(axis: str) -> None:
    """Pairs of neighbours fall into a 16 x 16 grid as they should."""
    zero = torch.zeros((), dtype=torch.long)
    line = torch.arange(400_000)
    along = {"seed": zero, "position": zero, "step": zero} | ({} if axis == "index" else {axis: line})
    number = philox.uniform(**along, purpose=philox.TOKEN, count=400_000 if axis == "index" else 1).flatten()
    cell: Tensor = (number * 16).long()
    pair = cell[::2] * 16 + cell[1::2]
    assert chi_square_p(pair.bincount(minlength=256), torch.full((256,), len(pair) / 256)) > 1e-4
