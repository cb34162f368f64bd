"""`triton` and `tl` as the kernels see them, or stand-ins that say what is missing when used.

With the stand-ins every module of kernels can be imported (its costs asked, its twins run) where
triton is not installed: macOS, a CPU-only base install. INTERPRET is for kernels: the interpreter
multiplies and adds bf16 by their bit patterns and says nothing, so kernels widen such operands to
fp32 where it is true. On a device the operands go to the matrix units as they are.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from models.deepseek.kernels.gpu.errors import TritonMissing

HAVE_TRITON = importlib.util.find_spec("triton") is not None
HOW_TO_GET_IT = (
    "triton is not installed: it comes with torch for CUDA; beside torch for CPU (Linux only): "
    'pip install "triton==3.8.0" (extra `test` of moeserve has it)'
)


class _NoKernel:
    """What `@triton.jit` leaves of a function where there is no triton."""

    def __init__(self, function: Any) -> None:
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__

    def __getitem__(self, grid: object) -> Any:
        raise TritonMissing(f"{self.__name__}: {HOW_TO_GET_IT}")


class _NoLanguage:
    """`tl`: constants keep their value, anything else is asked for only inside of kernels."""

    def __getattr__(self, name: str) -> Any:
        if name == "constexpr":
            return lambda value: value
        raise TritonMissing(f"tl.{name}: {HOW_TO_GET_IT}")


class _NoTriton:
    """`triton`: the decorator and the two pieces of arithmetic that launchers use."""

    def jit(self, function: Any = None, **_: object) -> Any:
        return _NoKernel if function is None else _NoKernel(function)

    def cdiv(self, a: int, b: int) -> int:
        return -(-a // b)

    def next_power_of_2(self, n: int) -> int:
        return 1 << max(0, n - 1).bit_length()

    def __getattr__(self, name: str) -> Any:
        raise TritonMissing(f"triton.{name}: {HOW_TO_GET_IT}")


if TYPE_CHECKING:
    triton: Any
    tl: Any
elif HAVE_TRITON:
    import triton
    import triton.language as tl
else:
    triton, tl = _NoTriton(), _NoLanguage()

INTERPRETED: bool = HAVE_TRITON and bool(triton.knobs.runtime.interpret)
INTERPRET = tl.constexpr(INTERPRETED)


def need_triton() -> None:
    """TritonMissing, with how to get it, where there is none."""
    if not HAVE_TRITON:
        raise TritonMissing(HOW_TO_GET_IT)
