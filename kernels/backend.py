"""Where an operation runs, and how its kernels are compiled without a GPU.

On CUDA the Triton kernels run, on a CPU the reference (or an operation's own CPU path). `impl="triton"` on CPU tensors
needs the interpreter: TRITON_INTERPRET=1 set before Triton is imported, or `testing.interpret_kernels()`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

IMPLEMENTATIONS = ("auto", "triton", "reference")


def ops_with(file: str) -> list[str]:
    """Names of the operations whose folder holds this file, such as ``kernel.py``."""
    return sorted(path.parent.name for path in Path(__file__).parent.glob(f"*/{file}"))


def interpreting() -> bool:
    """Whether the Triton kernels of this process run in the interpreter, on CPU tensors.

    Triton decides when a function is defined, so its own functions are asked and not the environment.
    """
    try:
        import triton
    except ModuleNotFoundError:
        return False
    return not isinstance(triton.language.max, triton.JITFunction)


def runs_triton(impl: str, tensor: Tensor) -> bool:
    """Whether an operation on this tensor launches its Triton kernel.

    Args:
        impl: ``auto`` (Triton on CUDA, else the reference), ``triton`` or ``reference``.
        tensor: The operation's main input.

    Raises:
        ValueError: An unknown name, or Triton on a tensor that it cannot reach.
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl={impl!r}: one of {', '.join(IMPLEMENTATIONS)}")
    if impl == "auto":
        return tensor.is_cuda
    if impl == "triton" and not (tensor.is_cuda or interpreting()):
        raise ValueError(f"impl='triton' on a {tensor.device.type} tensor: needs CUDA, or TRITON_INTERPRET=1 set early")
    return impl == "triton"


@dataclass(frozen=True, kw_only=True)
class CompileCase:
    """One kernel at its default block sizes, as the compile report builds it ahead of time.

    Every `kernel.py` offers `compile_cases() -> list[CompileCase]`.

    Attributes:
        name: What the report calls it, such as ``find_largest bf16``.
        function: The `triton.jit` function.
        signature: Type of each argument that is no constant, in Triton's spelling (``*bf16``, ``i64``, ``fp32``).
        constants: Values of the constexpr arguments.
        num_warps: As launched.
        num_stages: As launched.
        aligned: Names of pointer and integer arguments that are multiples of 16, as the launcher would find them.
    """

    name: str
    function: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    aligned: tuple[str, ...] = field(default=())
