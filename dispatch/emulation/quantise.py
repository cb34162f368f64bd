"""Formats of rows on the wire: FP8 with a scale for 128 channels, and the 10-bit logarithmic one.

Knows: blocks, and the library's own order of operations: it multiplies by inverses where
dispatch/fp8.py divides, so that a value now and then is rounded to the next code. Packing is
the same (`dispatch.fp8.pack_exponents`). Knows nothing of ranks.

Shape letters: T tokens, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dispatch.fp8 import BLOCK, E4M3_MAX, FLOOR, pack_exponents, power_of_two_scale

META = 16  # bytes before each low-latency row: its token's number


def quantise(x: Tensor, round_scale: bool) -> tuple[Tensor, Tensor]:
    """x [T, D] bf16 -> e4m3 [T, D], fp32 [T, D / 128]; round_scale: scales are powers of two."""
    blocks = x.to(torch.float32).view(x.shape[0], x.shape[1] // BLOCK, BLOCK)
    largest = blocks.abs().amax(dim=2).clamp_min(FLOOR)
    scale = largest * (1 / E4M3_MAX)
    if round_scale:
        scale = power_of_two_scale(scale)
        inverse = 1 / scale
    else:
        inverse = E4M3_MAX / largest
    values = (blocks * inverse[..., None]).clamp(-E4M3_MAX, E4M3_MAX)
    return values.flatten(1).to(torch.float8_e4m3fn), scale


def through_logfmt(x: Tensor) -> Tensor:
    """x [N, D] bf16 -> what is left of it after the 10-bit format: a sign and 511 steps between
    the logarithms of the smallest and largest magnitude of each 64 channels."""
    blocks = x.to(torch.float32).view(x.shape[0], x.shape[1] // 64, 64)
    size = blocks.abs()
    logs = torch.log2(size.clamp_min(1e-30))
    top = logs.amax(dim=2, keepdim=True)
    least = torch.where(size > 0, logs, top).amin(dim=2, keepdim=True).maximum(top - 32)
    step = ((top - least) / 510).clamp_min(1e-12)
    codes = ((logs - least) / step).round().clamp_min(0)
    value = torch.exp2(codes * step + least).copysign(blocks)
    return torch.where(size > 0, value, 0.0).flatten(1).to(x.dtype)


def message_rows(x: Tensor, use_fp8: bool, round_scale: bool, use_ue8m0: bool) -> Tensor:
    """x [T, D] -> uint8 [T, 16 + row]: number, values, scales."""
    numbers = torch.zeros(x.shape[0], META // 4, dtype=torch.int32)
    numbers[:, 0] = torch.arange(x.shape[0])
    parts = [numbers.view(torch.uint8)]
    if use_fp8:
        values, scale = quantise(x, round_scale)
        parts += [values.view(torch.uint8)]
        parts += [(pack_exponents(scale) if use_ue8m0 else scale).view(torch.uint8)]
    else:
        parts += [x.view(torch.uint8)]
    return torch.cat(parts, 1)
