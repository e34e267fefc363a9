"""`philox.py` for Triton kernels: the same uniform numbers, bit for bit."""

import triton
import triton.language as tl

# In Triton's functions only constants of this type can be read
ACCEPT = tl.constexpr(0)
TOKEN = tl.constexpr(1)


@triton.jit
def to_uniform(word):
    """Numbers in (0, 1) from 32-bit words."""
    # fp32 rounds the largest words up to one
    return tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)


@triton.jit
def four_words(seed, position, step, purpose: tl.constexpr, index):
    """The words that token ids 4 * index to 4 * index + 3 take; seed, position and step are int64 scalars."""
    return tl.philox(
        seed,
        index.to(tl.uint32),
        (2 * step + purpose).to(tl.uint32),
        (position & 0xFFFFFFFF).to(tl.uint32),
        ((position >> 32) & 0xFFFFFFFF).to(tl.uint32),
    )


@triton.jit
def accept_uniform(seed, position, step):
    """The number that the draft of this step is accepted with (a scalar)."""
    word, _, _, _ = four_words(seed, position, step, ACCEPT, step * 0)
    return to_uniform(word)


@triton.jit
def token_exponential(seed, position, step, start, BLOCK: tl.constexpr):
    """Exponential numbers of token ids start to start + BLOCK - 1; both are multiples of 4.

    -log(1 - u) by its series where 1 - u would round u away; the winners of a race have the smallest numbers.
    """
    index = start // 4 + tl.arange(0, BLOCK // 4)
    a, b, c, d = four_words(seed, position, step, TOKEN, index)
    u = to_uniform(tl.interleave(tl.interleave(a, c), tl.interleave(b, d)))
    series = u * (1.0 + u * (0.5 + u * (0.33333334 + u * 0.25)))
    return tl.where(u < 0.015625, series, -tl.log(1.0 - u))
