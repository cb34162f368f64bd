"""fp32 to bf16 and to e4m3 inside of kernels, the same on a device and in the interpreter.

On a device a cast is one instruction that rounds to nearest even. Triton's interpreter cuts bf16
off, and its e4m3 is wrong where rounding carries into the exponent (124 becomes 64), beyond 448 and
for NaN, all without a word. So there values are first rounded to the grid in fp32, by hand; the
cast that follows is exact. Knows no kernel.
"""

from __future__ import annotations

from models.deepseek.kernels.gpu.language import INTERPRET, tl, triton


@triton.jit
def to_bf16(x):
    """fp32 of any shape -> bf16, to nearest even; NaN stays NaN."""
    if INTERPRET:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
    return x.to(tl.bfloat16)


@triton.jit
def to_e4m3(x):
    """fp32 of any shape -> e4m3, to nearest even, beyond 448 to 448; NaN stays NaN."""
    if INTERPRET:
        # 2^-9 is the least step; from 2^-6 on 3 bits of mantissa follow the leading one. Adding and
        # taking away 1.5 * 2^23 steps leaves whole steps: fp32 itself rounds to nearest even.
        bits = x.to(tl.int32, bitcast=True)
        power = tl.maximum((bits >> 23) & 0xFF, 121)  # 121: the exponent of 2^-6
        shift = ((power + 20) << 23).to(tl.float32, bitcast=True) * 1.5  # 23 bits above the step
        near = (x + shift) - shift
        near = tl.minimum(tl.maximum(near, -448.0), 448.0)
        code = near.to(tl.float8e4nv)
        nan = tl.full(x.shape, 0x7F, tl.uint8).to(tl.float8e4nv, bitcast=True)
        return tl.where(x == x, code.to(tl.uint8, bitcast=True), nan.to(tl.uint8, bitcast=True)).to(
            tl.float8e4nv, bitcast=True
        )
    return x.to(tl.float8e4nv)
