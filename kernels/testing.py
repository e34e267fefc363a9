"""Compare every operation with its definition on fresh random inputs: `python -m drafthead.kernels.testing`.

An operation takes part by a file `kernels/<op>/check.py` with

    def check(seed: int, device: str) -> None

which draws inputs from the seed (awkward shapes among them, another set for each seed), runs the public function with
`impl="triton"` on the device and raises AssertionError, with the shapes in its message, where it differs from the
float64 reference. One call takes at most about two seconds in the interpreter. The assertions below serve the checks
and the tests alike.
"""

import argparse
import importlib
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from drafthead.kernels.backend import interpreting, ops_with
from torch import Tensor


def same(found: Tensor, exact: Tensor, what: str = "result") -> None:
    """Assert that ids, counts or masks are equal, shape and dtype included.

    Raises:
        AssertionError: They are not; the message shows the first place.
    """
    _same_kind(found, exact, what)
    assert found.dtype == exact.dtype, f"{what}: {found.dtype} instead of {exact.dtype}"
    wrong = (found != exact).nonzero()
    if len(wrong):
        place = tuple(wrong[0].tolist())
        raise AssertionError(
            f"{what}{_in_words(found)}: {len(wrong)} wrong, first at {place}: {found[place]} instead of {exact[place]}"
        )


def within_budget(
    found: Tensor, exact: Tensor, same_dtype: Tensor, eps: float | None = None, what: str = "result"
) -> None:
    """Assert max|found - exact| <= max|same_dtype - exact| + eps max|exact|; where `exact` is not finite, equality.

    Args:
        found: What the operation gave.
        exact: The reference on the same inputs in float64.
        same_dtype: The reference in the operation's own dtype.
        eps: Slack as a share of the largest exact value; by default the precision of `found`'s dtype.
        what: Name of the result in the message.

    Raises:
        AssertionError: The error is larger, or shapes or dtypes differ.
    """
    _same_kind(found, exact, what)
    assert found.dtype == same_dtype.dtype, f"{what}: {found.dtype} instead of {same_dtype.dtype}"
    exact = exact.double()
    finite = exact.isfinite()
    same(found.double()[~finite].nan_to_num(0.5), exact[~finite].nan_to_num(0.5), f"{what} (what is not finite)")
    if not finite.any():
        return
    error, plain = ((other.double() - exact)[finite].abs() for other in (found, same_dtype))
    slack = (torch.finfo(found.dtype).eps if eps is None else eps) * exact[finite].abs().max()
    budget = plain.nan_to_num(0.0, posinf=0.0).max() + slack
    # A NaN is no larger than the budget, so the question is which errors are not within it
    wrong = (~(error <= budget)).nonzero()
    if len(wrong):
        place = tuple(finite.nonzero()[wrong[0, 0]].tolist())
        raise AssertionError(
            f"{what}{_in_words(found)}: {len(wrong)} of {found.numel()} off, first at {place}: {found[place]:.6g} "
            f"instead of {exact[place]:.6g}; budget {budget:.3g}"
        )


def _same_kind(found: Tensor, exact: Tensor, what: str) -> None:
    assert found.shape == exact.shape, f"{what}: shape {tuple(found.shape)} instead of {tuple(exact.shape)}"
    assert found.device == exact.device, f"{what}: on {found.device} instead of {exact.device}"


def _in_words(tensor: Tensor) -> str:
    return f" {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


@contextmanager
def garbage_in_new_tensors() -> Iterator[None]:
    """Fill what `torch.empty` gives with NaN or the largest integer, so that an output nobody wrote is seen."""
    settings: Any = torch.utils.deterministic
    mode, fill = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("warn")
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        settings.fill_uninitialized_memory = fill


def interpret_kernels() -> None:
    """Make the kernels of this process run in Triton's interpreter, whoever imported Triton before.

    Triton decides when a function is defined. So its own functions are defined anew; ours must not be there yet. The
    setting stays with this process: unlike TRITON_INTERPRET it reaches no child process.
    """
    if interpreting():
        return
    from triton import JITFunction, knobs

    ours = {name: module for name, module in sys.modules.items() if name.startswith("drafthead.kernels.")}
    early = [
        name for name, module in ours.items() if any(isinstance(each, JITFunction) for each in vars(module).values())
    ]
    assert not early, f"too late: {', '.join(early)} imported already"
    knobs.propagate_env = False
    knobs.runtime.interpret = True
    knobs.propagate_env = True
    for name in ("triton.language.standard", "triton.language.random", "triton.language"):
        importlib.reload(importlib.import_module(name))
    assert interpreting()
    _patch_language_once()


def _patch_language_once() -> None:
    """Let Triton's interpreter patch `triton.language` once a launch and module, not at each call of a device function.

    That is half of its time, and changes nothing: within a launch the same functions would be patched again.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    patched: set[int] = set()

    def patch_once(function: Any) -> Any:
        module = id(function.__globals__)
        if module in patched:
            return None  # the call of a device function, which does not look at it
        is_launch = not patched
        patched.add(module)
        scope = patch(function)
        if is_launch:
            restore = scope.restore

            def close() -> None:
                patched.clear()
                restore()

            scope.restore = close
        return scope

    interpreter._patch_lang = patch_once


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks; 1 if an operation differs from its reference."""
    options = _options(argv)
    if options.device == "cpu":
        interpret_kernels()
    failed = False
    for op in options.op:
        failure = _first_failure(op, range(options.seed, options.seed + options.seeds), options.device)
        failed = failed or failure is not None
    return int(failed)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    ops = ops_with("check.py")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(prog="python -m drafthead.kernels.testing", description=main.__doc__)
    parser.add_argument("--op", action="append", choices=ops, help="only this operation (may be repeated)")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="draws of each operation (default 3)")
    parser.add_argument("--seed", type=int, default=time.time_ns() // 1_000_000 % 10**9, help="first (default: clock)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default=device, help=f"(default {device})")
    options = parser.parse_args(argv)
    options.op = options.op or ops
    return options


def _first_failure(op: str, seeds: range, device: str) -> AssertionError | None:
    """Check one operation and print its line."""
    check = importlib.import_module(f"drafthead.kernels.{op}.check").check
    start = time.perf_counter()
    for seed in seeds:
        try:
            with garbage_in_new_tensors():
                check(seed, device)
        except AssertionError as error:
            print(f"{op:<16} FAILED on {device}: {error}")
            print(f"{'':<16} again: --op {op} --device {device} --seeds 1 --seed {seed}", flush=True)
            return error
    seconds = time.perf_counter() - start
    print(f"{op:<16} ok on {device}, seeds {seeds.start} to {seeds.stop - 1}, {seconds:.1f} s", flush=True)
    return None


if __name__ == "__main__":
    sys.exit(main())
