"""How a position lies in an FP8 latent cache.

A cache layer is then [blocks, block, B] uint8, B = c + 4 G + r * itemsize bytes a position:

    c e4m3        the normalised latent, a scale for each 128 channels
    G fp32        the scales, G = ceil(c / 128): value = e4m3 * scale
    r             the rope key in the model dtype, as it is: its error would move positions

What gpu/mla_rows.py has for bf16 and c in whole blocks. A row's bytes depend on that row alone, and
what is read is the value rounded to the model dtype: law 5 holds within the format.

Plain torch: what torch and native kernels write by, and the twin of those that read and write such
rows themselves (native/latents.h, gpu/mla_cache.py). Knows no kernel. Shape letters: c latent width
(rank), r rope width, n rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dispatch.fp8 import dequantise_rows, num_blocks, quantise_rows

DTYPE = torch.uint8


def is_fp8(layer: Tensor) -> bool:
    return layer.dtype == DTYPE


def row_bytes(rank: int, rope: int, dtype: torch.dtype) -> int:
    """B of a model in dtype."""
    return rank + 4 * num_blocks(rank) + rope * dtype.itemsize


def pack_rows(latent: Tensor, k_rope: Tensor) -> Tensor:
    """latent [n, c], k_rope [n, r] of the model dtype -> [n, B] uint8. A block with a NaN or an
    infinity comes back as NaN throughout."""
    values, scales = quantise_rows(latent.float())
    parts = (values, scales.contiguous(), k_rope.contiguous())
    return torch.cat([part.view(DTYPE) for part in parts], dim=1)


def read_rows(rows: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
    """rows [n, B] uint8 of a model in `dtype` -> [n, c + r] in it: value times scale in fp32,
    rounded once."""
    scaled = rank + 4 * num_blocks(rank)
    values = rows[:, :rank].contiguous().view(torch.float8_e4m3fn)
    scales = rows[:, rank:scaled].contiguous().view(torch.float32)
    keys = rows[:, scaled:].contiguous().view(dtype)
    return torch.cat((dequantise_rows(values, scales).to(dtype), keys), dim=1)
