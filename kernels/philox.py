"""Random numbers that depend on a request's seed and place only, never on the batch, the device or a block size.

Philox 4x32-10 (Salmon et al. 2011): four 32-bit words for a 64-bit key and a 128-bit counter. The key is the request's
seed; the counter says what the number is for:

    word 0: index // 4 (the number itself is word index % 4 of the four)
    word 1: 2 * step + purpose
    words 2, 3: position, low and high half

`philox_device.py` is the same in Triton, word for word. A drafter that samples must not draw from the same seed.
"""

import torch
from torch import Tensor

ACCEPT = 0
"""Purpose of the numbers that drafts are accepted with."""
TOKEN = 1
"""Purpose of the numbers that decide which token is sampled; index = token id."""

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
LARGEST_BELOW_ONE = 1.0 - 2.0**-24


def philox(key: Tensor, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random words, as int64 tensors with values below 2^32.

    Args:
        key: 64-bit keys, int64 (negative ones stand for their two's complement).
        counter: Four 32-bit words, int64; all broadcast with the key.
    """
    low, high = key & WORD, (key >> 32) & WORD
    c0, c1, c2, c3 = counter
    for _ in range(ROUNDS):
        # int64 products wrap around, which changes neither half's bits
        product0, product2 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = ((product2 >> 32) & WORD) ^ c1 ^ low, product2 & WORD
        c2, c3 = ((product0 >> 32) & WORD) ^ c3 ^ high, product0 & WORD
        low, high = (low + KEY_STEPS[0]) & WORD, (high + KEY_STEPS[1]) & WORD
    return c0, c1, c2, c3


def uniform(seed: Tensor, position: Tensor, step: Tensor, purpose: int, count: int = 1) -> Tensor:
    """Uniform fp32 numbers in (0, 1), finer near 0: steps of 2^-32 there, of 2^-24 near 1.

    Args:
        seed: Key of each request, int64.
        position: Place of the round in its request; never the same twice for one seed.
        step: Step within the round. All three broadcast.
        purpose: `ACCEPT` or `TOKEN`.
        count: How many numbers each.

    Returns:
        Numbers of index 0 to count - 1, [..., count].
    """
    index_C = torch.arange((count + 3) // 4, device=seed.device)
    seed, position, step = seed[..., None], position[..., None], step[..., None]
    words = philox(seed, (index_C, 2 * step + purpose, position & WORD, (position >> 32) & WORD))
    number = torch.stack(torch.broadcast_tensors(*words), -1).flatten(-2)[..., :count]
    return to_uniform(number)


def to_uniform(word: Tensor) -> Tensor:
    """Numbers in (0, 1) from 32-bit words."""
    # fp32 rounds the largest words up to one
    return ((word.float() + 0.5) * 2.0**-32).clamp_max(LARGEST_BELOW_ONE)


def exponential(seed: Tensor, position: Tensor, step: Tensor, count: int) -> Tensor:
    """Exponential fp64 numbers [..., count], one per token id: argmax of weight / number is a sample by weight."""
    return -torch.log1p(-uniform(seed, position, step, TOKEN, count).double())
