"""How a position lies in an FP8 latent cache, and how kernels without a reader of it attend to it.

A cache layer is then [blocks, block, B] uint8, B = c + 4 G + r * itemsize bytes a position:

    c e4m3        the normalised latent, a scale for each 128 channels
    G fp32        the scales, G = ceil(c / 128): value = e4m3 * scale
    r             the rope key in the model dtype, as it is: its error would move positions

What gpu/mla_rows.py has for bf16 and c in whole blocks. A row's bytes depend on that row alone, and
what is read is the value rounded to the model dtype: law 5 holds within the format.

Plain torch: the twin of the kernels that read and write such rows themselves, and the way of those
that do not. Knows no kernel. Shape letters: c latent width (rank), r rope width, n rows.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dispatch.fp8 import dequantise_rows, num_blocks, quantise_rows
from models.interface import ForwardBatch

DTYPE = torch.uint8


def is_fp8(layer: Tensor) -> bool:
    return layer.dtype == DTYPE


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


class UnpackedBlocks:
    """A cache as kernels in the model dtype read it: the blocks that a batch attends to, brought
    back. Which these are is found once a batch and kept for its other layers."""

    def __init__(self) -> None:
        self._last: tuple[ForwardBatch, ForwardBatch, Tensor] | None = None

    def of(
        self, layer: Tensor, batch: ForwardBatch, rank: int, dtype: torch.dtype
    ) -> tuple[Tensor, ForwardBatch]:
        """layer [blocks, block, B] -> [used blocks, block, c + r] in dtype, and the batch with
        tables and ancestors that say where its positions lie there."""
        last = self._last
        if last is None or last[0] is not batch:
            last = self._last = (batch, *_renumbered(batch, layer.shape[1]))
        used = layer.index_select(0, last[2])
        rows = read_rows(used.flatten(0, 1), rank, dtype)
        return rows.view(*used.shape[:2], rows.shape[1]), last[1]


def _renumbered(batch: ForwardBatch, block_size: int) -> tuple[ForwardBatch, Tensor]:
    """-> the batch over the blocks that it attends to alone, and which these are [used]."""
    tables = batch.block_tables.long()
    held = (batch.context_len.long() + block_size - 1) // block_size  # blocks a sequence
    wanted = (torch.arange(tables.shape[1])[None, :] < held[:, None]) & (tables >= 0)
    blocks = [tables[wanted]]
    paths = None if batch.ancestors is None else batch.ancestors.long()
    if paths is not None:
        blocks.append(paths[paths >= 0] // block_size)
    used, places = torch.cat(blocks).unique(return_inverse=True)
    numbers = torch.full_like(tables, -1)
    count = int(wanted.sum())
    numbers[wanted] = places[:count]
    if paths is not None:
        slots = torch.full_like(paths, -1)
        own = paths >= 0
        slots[own] = places[count:] * block_size + paths[own] % block_size
        paths = slots.to(batch.ancestors.dtype)  # type: ignore[union-attr]
    changed = replace(
        batch, block_tables=numbers.to(batch.block_tables.dtype), ancestors=paths, host=None
    )
    return changed, used
