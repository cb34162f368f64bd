"""From fp32 to whatever dtype a kernel's output has, rounded to nearest even.

For kernels that take the model dtype as it comes (bf16 or fp32). Knows rounding.py, no kernel.
"""

from __future__ import annotations

from models.deepseek.kernels.gpu.language import tl, triton
from models.deepseek.kernels.gpu.rounding import to_bf16


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """fp32 of any shape -> dtype (bf16, fp32)."""
    if dtype == tl.bfloat16:  # noqa: SIM108 (constants of the compiler, not values)
        y = to_bf16(x)
    else:
        y = x.to(dtype)
    return y
