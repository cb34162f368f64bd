"""Formats of rows on the wire: FP8 with a scale for 128 channels, and the 10-bit logarithmic one.

Knows: blocks, scales as fp32 or as packed exponents. Knows nothing of ranks.

Shape letters: T tokens, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128
_E4M3_MAX = 448.0
_FLOOR = 1e-4  # the smallest magnitude that a block is scaled by


def quantise(x: Tensor, round_scale: bool) -> tuple[Tensor, Tensor]:
    """x [T, D] bf16 -> e4m3 [T, D], fp32 [T, D / 128]; round_scale: scales are powers of two."""
    blocks = x.to(torch.float32).view(x.shape[0], x.shape[1] // BLOCK, BLOCK)
    largest = blocks.abs().amax(dim=2).clamp_min(_FLOOR)
    scale = largest * (1 / _E4M3_MAX)
    if round_scale:
        mantissa, exponent = torch.frexp(scale)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
        scale = torch.ldexp(torch.ones_like(scale), exponent)
        inverse = 1 / scale
    else:
        inverse = _E4M3_MAX / largest
    values = (blocks * inverse[..., None]).clamp(-_E4M3_MAX, _E4M3_MAX)
    return values.flatten(1).to(torch.float8_e4m3fn), scale


def pack_ue8m0(scale: Tensor) -> Tensor:
    """fp32 powers of two [T, D / 128] -> int32 [T, D / 512], four exponent bytes each, the first
    block's lowest."""
    exponents = (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    return exponents.contiguous().view(torch.int32)


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
