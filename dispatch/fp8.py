"""Rows in FP8 for the wire: e4m3 with a scale for each 128 channels (DeepSeek-V3, section 3.3.2).

Knows: rows, blocks, the four formats of scales. Knows nothing of ranks, experts or weights. Plain
torch: the slow, obvious twin of any kernel that does the same. A row's bytes depend on that row
alone, so rounding for the wire keeps law 5.

Shape letters: T tokens, D hidden, G = ceil(D / 128) blocks a row.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from dispatch.base import DispatchError, Fp8Tokens, ScaleFormat, WireFormat

BLOCK = 128
E4M3_MAX = 448.0
FLOOR = 1e-4  # the smallest magnitude that a block is scaled by
_COLUMNS = (ScaleFormat.F32_COLUMN, ScaleFormat.UE8M0_COLUMN)
_PACKED = (ScaleFormat.UE8M0_ROW, ScaleFormat.UE8M0_COLUMN)


def num_blocks(hidden: int) -> int:
    return -(-hidden // BLOCK)


def scale_bytes(hidden: int, wire: WireFormat) -> int:
    """Bytes of a row's scales on the wire."""
    if wire is WireFormat.MODEL:
        return 0
    blocks = num_blocks(hidden)
    return 4 * blocks if wire is WireFormat.FP8 else 4 * -(-blocks // 4)


def quantise(x: Tensor, wire: WireFormat) -> Fp8Tokens:
    """x [T, D] -> e4m3 [T, D] with scales: largest magnitude of a block / 448, for UE8M0 the next
    power of two; never of less than 1e-4. DispatchError for WireFormat.MODEL."""
    if wire is WireFormat.MODEL:
        raise DispatchError("wire=model: rows travel as they are; FP8 is fp8 or fp8_ue8m0")
    tokens, hidden = x.shape
    blocks = _blocks(x)
    largest = blocks.abs().amax(dim=2).clamp_min(FLOOR)
    scale = largest / E4M3_MAX
    if wire is WireFormat.FP8_UE8M0:
        mantissa, exponent = torch.frexp(scale)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
        scale = torch.ldexp(torch.ones_like(scale), exponent)
    values = (blocks / scale[..., None]).clamp(-E4M3_MAX, E4M3_MAX)
    rows = values.flatten(1)[:, :hidden].to(torch.float8_e4m3fn)
    if wire is WireFormat.FP8:
        return Fp8Tokens(rows, scale, ScaleFormat.F32_ROW)
    return Fp8Tokens(rows, pack_exponents(scale), ScaleFormat.UE8M0_ROW)


def dequantise(values: Tensor, scales: Tensor, form: ScaleFormat, dtype: torch.dtype) -> Tensor:
    """values e4m3 [.., N, D], scales as `form` says -> [.., N, D]: value times scale in fp32, one
    rounding to dtype. Bitwise a function of each row alone."""
    if form is ScaleFormat.NONE:
        raise DispatchError("scale_format=none: rows without scales are not FP8")
    if form in _PACKED:
        scales = unpack_exponents(scales, num_blocks(values.shape[-1]))
    hidden = values.shape[-1]
    flat = values.reshape(-1, hidden)
    rows = _blocks(flat) * scales.reshape(-1, num_blocks(hidden), 1)
    return rows.flatten(1)[:, :hidden].to(dtype).view(values.shape)


def pack_exponents(scale: Tensor) -> Tensor:
    """fp32 powers of two [.., G] -> int32 [.., ceil(G / 4)]; the bytes of no block are 0."""
    exponents = (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    short = -scale.shape[-1] % 4
    return functional.pad(exponents, (0, short)).contiguous().view(torch.int32)


def unpack_exponents(packed: Tensor, blocks: int) -> Tensor:
    """int32 [.., ceil(G / 4)] -> fp32 [.., G]."""
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=packed.device)
    exponents = (packed[..., None] >> shifts) & 0xFF
    return (exponents << 23).view(torch.float32).flatten(-2)[..., :blocks]


def _blocks(x: Tensor) -> Tensor:
    """[T, D] -> fp32 [T, G, 128], the last block filled up with zeros."""
    tokens, hidden = x.shape
    rows = functional.pad(x.to(torch.float32), (0, -hidden % BLOCK))
    return rows.view(tokens, num_blocks(hidden), BLOCK)
