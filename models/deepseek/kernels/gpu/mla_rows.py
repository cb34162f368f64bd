"""How a position lies in the latent cache of a GPU, in bf16 or in FP8.

bf16: [blocks, block, c + r] bf16, the normalised latent (c), then the rotated rope key (r).
FP8: [blocks, block, B] uint8, B = c + 4 * c / 128 + 2 r bytes a position, in this order:

    c e4m3      the latent, a scale for each 128 channels
    c/128 fp32  the scales: value = e4m3 * scale
    r bf16      the rope key, as it is: its error would move positions

c = 512, r = 64: 512 + 16 + 128 = 656 bytes, what FlashMLA's FP8 cache has. Every part begins at a
multiple of 16 bytes, so that all of it is read in wide loads. Knows no kernel.

Shape letters: c latent width (rank), r rope width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dispatch.fp8 import BLOCK
from models.deepseek.kernels.gpu.errors import ShapeRefused

BLOCK_SIZES = (16, 32, 64)


def row_bytes(rank: int = 512, rope: int = 64, fp8: bool = False) -> int:
    """Bytes of a position."""
    return rank + 4 * (rank // BLOCK) + 2 * rope if fp8 else 2 * (rank + rope)


@dataclass(frozen=True)
class CacheViews:
    """One layer's memory as each kind of element, all from the same first byte. bf16: scales is
    the layer itself, never read."""

    latents: Tensor
    scales: Tensor
    ropes: Tensor
    block_size: int
    fp8: bool


def cache_views(layer: Tensor, rank: int, rope: int) -> CacheViews:
    """ShapeRefused for a layer that is laid out otherwise."""
    fp8 = layer.dtype == torch.uint8
    wanted = row_bytes(rank, rope, fp8) // layer.element_size()
    if layer.dtype not in (torch.uint8, torch.bfloat16) or layer.dim() != 3:
        raise ShapeRefused(f"cache layer is {layer.dtype} {tuple(layer.shape)}: bf16 or uint8, 3-d")
    if layer.shape[2] != wanted or not layer.is_contiguous():
        raise ShapeRefused(
            f"cache layer is {tuple(layer.shape)}, strides {layer.stride()}: must be [blocks, "
            f"block, {wanted}] and contiguous"
        )
    if fp8 and rank % BLOCK:
        raise ShapeRefused(f"latent width {rank}: an FP8 cache has a multiple of {BLOCK}")
    if layer.shape[1] not in BLOCK_SIZES:
        raise ShapeRefused(f"block size is {layer.shape[1]}: must be one of {BLOCK_SIZES}")
    if not fp8:
        return CacheViews(layer, layer, layer, layer.shape[1], False)
    return CacheViews(
        layer.view(torch.float8_e4m3fn),
        layer.view(torch.float32),
        layer.view(torch.bfloat16),
        layer.shape[1],
        True,
    )


def check_widths(rank: int, rope: int, dtype: torch.dtype, what: str) -> None:
    """ShapeRefused unless tiles of these widths exist: powers of two, pieces of 16 or more."""
    fits = rank >= 64 and rope >= 16 and rank & (rank - 1) == 0 and rope & (rope - 1) == 0
    if not fits or dtype != torch.bfloat16:
        raise ShapeRefused(
            f"{what} {dtype}, latent width {rank}, rope width {rope}: must be bf16, powers of two, "
            "64 or more and 16 or more"
        )


# -- twins ----------------------------------------------------------------------------------------


def read_rows_twin(layer: Tensor, slots: Tensor, rank: int, rope: int) -> Tensor:
    """Rows at flat slots [n] -> [n, c + r] float64, FP8 scaled back exactly."""
    rows = layer.flatten(0, 1)[slots.long()]
    if layer.dtype == torch.bfloat16:
        return rows.double()
    rows = rows.contiguous()
    values = rows[:, :rank].contiguous().view(torch.float8_e4m3fn).double()
    scales = rows[:, rank : rank + 4 * (rank // BLOCK)].contiguous().view(torch.float32).double()
    ropes = rows[:, rank + 4 * (rank // BLOCK) :].contiguous().view(torch.bfloat16).double()
    return torch.cat((values * scales.repeat_interleave(BLOCK, dim=1), ropes), dim=1)


def pack_rows_twin(latents: Tensor, ropes: Tensor, ue8m0: bool = False) -> Tensor:
    """latents [n, c], ropes [n, r] of any float -> [n, B] uint8, as the FP8 cache holds them."""
    from dispatch.fp8 import quantise_rows

    values, scales = quantise_rows(latents.float(), ue8m0=ue8m0)
    parts = (values, scales.contiguous(), ropes.to(torch.bfloat16).contiguous())
    return torch.cat([part.view(torch.uint8) for part in parts], dim=1)
