"""Block verification on random inputs against float64; see `drafthead.kernels.testing`."""

from drafthead.kernels.verify_block import reference
from drafthead.kernels.verify_block.op import verify_block
from drafthead.kernels.verify_sampling.check import check_op


def check(seed: int, device: str) -> None:
    check_op(verify_block, reference.verify_block, seed, device)
