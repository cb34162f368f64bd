"""Rows in FP8: e4m3 with a scale for each 128 channels (DeepSeek-V3, section 3.3.2).

Knows: rows, blocks, the four formats of scales. Knows nothing of ranks, experts or weights. Plain
torch: the slow, obvious twin of any kernel that does the same. A row's bytes depend on that row
alone, so rounding for the wire keeps law 5.

A block that has a NaN or an infinity comes back as NaN throughout, in each format: nothing that
went wrong is made to look sound.

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
_PACKED = (ScaleFormat.UE8M0_ROW, ScaleFormat.UE8M0_COLUMN)


def num_blocks(hidden: int) -> int:
    return -(-hidden // BLOCK)


def row_scales(hidden: int, wire: WireFormat) -> tuple[ScaleFormat, torch.dtype, int]:
    """What lies beside a row on the wire: format, dtype and number of its scales."""
    if wire is WireFormat.MODEL:
        return ScaleFormat.NONE, torch.float32, 0
    blocks = num_blocks(hidden)
    if wire is WireFormat.FP8:
        return ScaleFormat.F32_ROW, torch.float32, blocks
    return ScaleFormat.UE8M0_ROW, torch.int32, -(-blocks // 4)


def scale_bytes(hidden: int, wire: WireFormat) -> int:
    """Bytes of a row's scales on the wire: 4 * G, or 4 * ceil(G / 4) of exponents."""
    _, dtype, width = row_scales(hidden, wire)
    return dtype.itemsize * width


# -- to FP8 and back --------------------------------------------------------------------------


def quantise_rows(x: Tensor, *, ue8m0: bool = False, floor: float = FLOOR) -> tuple[Tensor, Tensor]:
    """x [T, D] -> e4m3 [T, D], fp32 scales [T, G]: largest magnitude of a block (never less than
    `floor`) / 448, for UE8M0 the next power of two. The last block counts as filled with zeros."""
    blocks = _blocks(x)
    largest = blocks.abs().amax(dim=2).clamp_min(floor)
    # By a tensor: CUDA multiplies by the inverse of a plain number, and so rounds otherwise.
    scale = largest / torch.full_like(largest, E4M3_MAX)
    divisor = scale
    if ue8m0:
        scale = power_of_two_scale(scale)
        divisor = torch.where(scale.isinf(), torch.nan, scale)  # codes are NaN too, not 0
    values = (blocks / divisor[..., None]).clamp(-E4M3_MAX, E4M3_MAX)
    return values.flatten(1)[:, : x.shape[1]].to(torch.float8_e4m3fn).contiguous(), scale


def dequantise_rows(values: Tensor, scale: Tensor) -> Tensor:
    """values e4m3 [T, D], fp32 scales [T, G] -> fp32 [T, D]: value times scale."""
    rows = _blocks(values) * scale[..., None]
    return rows.flatten(1)[:, : values.shape[1]]


def quantise(x: Tensor, wire: WireFormat) -> Fp8Tokens:
    """x [T, D] as it travels. DispatchError for WireFormat.MODEL, which is not FP8."""
    if wire is WireFormat.MODEL:
        raise DispatchError("wire=model: rows travel as they are; FP8 is fp8 or fp8_ue8m0")
    values, scale = quantise_rows(x, ue8m0=wire is WireFormat.FP8_UE8M0)
    if wire is WireFormat.FP8:
        return Fp8Tokens(values, scale, ScaleFormat.F32_ROW)
    return Fp8Tokens(values, pack_exponents(scale), ScaleFormat.UE8M0_ROW)


def dequantise(values: Tensor, scales: Tensor, form: ScaleFormat, dtype: torch.dtype) -> Tensor:
    """values e4m3 [.., N, D], scales as `form` says -> [.., N, D]: value times scale in fp32, one
    rounding to dtype. Bitwise a function of each row alone."""
    if form is ScaleFormat.NONE:
        raise DispatchError("scale_format=none: rows without scales are not FP8")
    hidden = values.shape[-1]
    blocks = num_blocks(hidden)
    if form in _PACKED:
        scales = unpack_exponents(scales, blocks)
    rows = dequantise_rows(values.reshape(-1, hidden), scales.reshape(-1, blocks))
    return rows.to(dtype).reshape(values.shape).contiguous()


# -- scales -----------------------------------------------------------------------------------


def power_of_two_scale(scale: Tensor) -> Tensor:
    """fp32 scales, none negative -> the next power of two, 2^ceil(log2(scale)), at least 2^-126:
    what UE8M0 can hold. Exact by exponent bits, on every device. An infinity for what is none or no
    number: its exponent byte is 255, UE8M0's NaN."""
    bits = scale.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    return (exponent.clamp(1, 255) << 23).view(torch.float32)


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
