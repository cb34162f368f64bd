"""The product of two bf16 tiles: on the matrix units of a device, right in the interpreter too.

Knows no kernel. fp32 sums; the interpreter's own bf16 product is false (language.py).
"""

from __future__ import annotations

from models.deepseek.kernels.gpu.language import INTERPRET, tl, triton


@triton.jit
def dot(a, b, total):
    """a [M, K], b [K, N] bf16, total [M, N] fp32 -> total + a @ b."""
    if INTERPRET:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total)
