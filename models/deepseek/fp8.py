"""Block FP8: e4m3 weights with one scale a block, in both directions, and a W8A8 product.

Knows: blocks of 128x128, ragged edges, scales as fp32 or as powers of two (UE8M0). Activations in
blocks of 1x128 are dispatch/fp8.py's: they are what travels. All of it is plain torch: the slow,
obvious twin of any FP8 kernel.

Shape letters: T tokens, N out features, C in features, b the block (128).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dispatch.fp8 import BLOCK, E4M3_MAX, FLOOR, power_of_two_scale, quantise_rows


def scale_shape(shape: tuple[int, ...] | torch.Size, block: int = BLOCK) -> tuple[int, int]:
    """Scales of a weight [N, C]: [ceil(N / b), ceil(C / b)]."""
    rows, columns = shape
    return math.ceil(rows / block), math.ceil(columns / block)


def scale_to_float(scale: Tensor) -> Tensor:
    """fp32 scales from F32, BF16, F16 or E8M0 storage (a byte e means 2^(e - 127))."""
    if scale.dtype == torch.float8_e8m0fnu:
        # Taken from the exponent by hand: a plain copy of the bytes would read 120 as 120.0.
        return torch.exp2(scale.view(torch.uint8).to(torch.float32) - 127.0)
    return scale.to(torch.float32)


def powers_of_two(scales: Tensor) -> bool:
    """Whether all scales (fp32) are."""
    return bool((torch.frexp(scales).mantissa == 0.5).all())


def dequantise_weight(
    weight: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32, block: int = BLOCK
) -> Tensor:
    """weight [N, C] e4m3, scale [ceil(N/b), ceil(C/b)] -> [N, C]: each block times its scale.

    The product is in fp32 with one rounding to dtype.
    """
    rows, columns = weight.shape
    factors = scale_to_float(scale)
    out = torch.empty(rows, columns, dtype=dtype, device=weight.device)
    for i in range(factors.shape[0]):
        band = slice(i * block, min((i + 1) * block, rows))
        row = factors[i].repeat_interleave(block)[:columns]
        out[band] = (weight[band].to(torch.float32) * row).to(dtype)
    return out


@dataclass(frozen=True)
class Fp8Rows:
    """Rows of weights as they are stored: values [N, C] e4m3, scales [N, ceil(C/b)] fp32.

    Each row has its block's scales beside it, so that rows of several weights can be joined or
    moved without regard to where their blocks begin.
    """

    values: Tensor
    scales: Tensor

    @classmethod
    def of(cls, weight: Tensor, scale: Tensor) -> Fp8Rows:
        """A weight and its scales a block, as stored."""
        rows = scale_to_float(scale).repeat_interleave(BLOCK, dim=0)
        return cls(weight, rows[: weight.shape[0]])

    def move(self, change: Callable[[Tensor], Tensor]) -> Fp8Rows:
        """change: takes rows elsewhere, whatever their width and type."""
        moved = change(self.values.view(torch.uint8))
        return Fp8Rows(moved.view(torch.float8_e4m3fn), change(self.scales))

    @staticmethod
    def join(pieces: tuple[Fp8Rows, ...]) -> Fp8Rows:
        values = torch.cat([p.values.view(torch.uint8) for p in pieces])
        scales = torch.cat([p.scales for p in pieces])
        return Fp8Rows(values.view(torch.float8_e4m3fn), scales)

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """[N, C], bit for bit as dequantise_weight."""
        factors = self.scales.repeat_interleave(BLOCK, dim=1)[:, : self.values.shape[1]]
        return (self.values.to(torch.float32) * factors).to(dtype)

    def scales_of_groups(self, height: int) -> Tensor | None:
        """[ceil(N/height), ceil(C/b)]: one row for each `height` rows, or None if they differ."""
        first = self.scales[::height].contiguous()
        spread = first.repeat_interleave(height, dim=0)[: self.scales.shape[0]]
        return first if torch.equal(spread, self.scales) else None

    def is_finite(self, dtype: torch.dtype) -> bool:
        """Whether all values would be, dequantised to dtype."""
        codes = self.values.view(torch.uint8) & 0x7F
        return bool(codes.max() < 0x7F) and (
            math.isfinite(float((self.scales.max() * E4M3_MAX).to(dtype)))
            or bool(self.dequantise(dtype).isfinite().all())
        )


def quantise_weight(
    weight: Tensor, *, ue8m0: bool = False, block: int = BLOCK, floor: float = FLOOR
) -> tuple[Tensor, Tensor]:
    """[N, C] -> (e4m3 [N, C], fp32 scale [ceil(N/b), ceil(C/b)]); value = e4m3 * scale.

    The largest magnitude of a block (at least `floor`) maps to 448; edges count as zero-padded.
    """
    rows, columns = weight.shape
    grid = scale_shape(weight.shape, block)
    padded = torch.zeros(grid[0] * block, grid[1] * block, device=weight.device)
    padded[:rows, :columns] = weight
    blocks = padded.view(grid[0], block, grid[1], block)
    scale = blocks.abs().amax(dim=(1, 3)).clamp_min(floor) / E4M3_MAX
    if ue8m0:
        scale = power_of_two_scale(scale)
    quantised = (blocks / scale[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX)
    flat = quantised.view(padded.shape)[:rows, :columns]
    return flat.to(torch.float8_e4m3fn).contiguous(), scale


def linear_w8a8(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    *,
    ue8m0: bool = False,
    out_dtype: torch.dtype = torch.float32,
    floor: float = FLOOR,
) -> Tensor:
    """x [T, C] times weight [N, C] e4m3: both sides quantised, fp32 sums block by block over C.

    acc += dot(qx, qw over 128 channels) * scale_x * scale_w, blocks in order. ue8m0: the format of
    the activation scales, which must follow the checkpoint's. -> [T, N] in out_dtype.
    """
    rows, columns = weight.shape
    quantised, x_scale = quantise_rows(x, ue8m0=ue8m0, floor=floor)
    w_scale = scale_to_float(weight_scale).repeat_interleave(BLOCK, dim=0)[:rows]  # [N, groups]
    total = torch.zeros(x.shape[0], rows, device=x.device)
    for group in range(x_scale.shape[1]):
        part = slice(group * BLOCK, min((group + 1) * BLOCK, columns))
        dot = quantised[:, part].to(torch.float32) @ weight[:, part].to(torch.float32).T
        total += dot * x_scale[:, group, None] * w_scale[None, :, group]
    return total.to(out_dtype)
