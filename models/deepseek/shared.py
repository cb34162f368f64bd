"""The shared expert as experts of the routed ones' width: n pieces whose results add up.

A gated MLP of width n * I is the sum of n of width I: piece j has rows j * I .. (j + 1) * I - 1 of
gate and up, and those columns of down. In slots ("hosted") piece j is logical expert E + j; beside
them ("replicated") the pieces are computed one by one too, so that both give the same bits.

Knows: which rows, columns and FP8 blocks make a piece. Knows nothing of files or ranks.

Shape letters: I expert intermediate, D hidden, E routed experts, n pieces, b the FP8 block (128).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from models.deepseek.config import DeepSeekConfig
from models.deepseek.fp8 import BLOCK, Fp8Rows, scale_to_float


@dataclass(frozen=True)
class Region:
    """Rows and columns [begin, end) of a matrix."""

    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def size(self) -> int:
        return math.prod(end - begin for begin, end in (self.rows, self.columns))

    def of(self, matrix: Tensor) -> Tensor:
        return matrix[slice(*self.rows), slice(*self.columns)]

    def blocks(self) -> Region:
        """The scales of all blocks that it touches."""
        (top, bottom), (left, right) = self.rows, self.columns
        return Region((top // BLOCK, -(-bottom // BLOCK)), (left // BLOCK, -(-right // BLOCK)))


def piece_region(config: DeepSeekConfig, name: str, piece: int) -> Region:
    """Of the shared expert's tensor `name`, what makes this piece."""
    width = config.moe_intermediate_size
    part, whole = (piece * width, (piece + 1) * width), (0, config.hidden_size)
    return Region(whole, part) if name.endswith("down_proj.weight") else Region(part, whole)


def pieces_on_blocks(config: DeepSeekConfig) -> bool:
    """Whether every piece begins where FP8 blocks do, so that its scales are blocks of its own."""
    return config.n_shared_experts <= 1 or config.moe_intermediate_size % BLOCK == 0


def dequantise_piece(values: Tensor, scale: Tensor, region: Region, dtype: torch.dtype) -> Tensor:
    """values [rows, columns] of `region`, scale of region.blocks(): wherever it begins, bit for bit
    what dequantising the whole and cutting gives."""
    factors = scale_to_float(scale)
    for axis, (begin, end) in enumerate((region.rows, region.columns)):
        first = begin % BLOCK
        spread = factors.repeat_interleave(BLOCK, dim=axis)
        factors = spread.narrow(axis, first, end - begin)
    return (values.float() * factors).to(dtype)


def cut(whole: Tensor | Fp8Rows, region: Region) -> Tensor | Fp8Rows:
    """A piece of rows in memory; of FP8, its columns must begin with a block."""
    if isinstance(whole, Tensor):
        return region.of(whole)
    assert region.columns[0] % BLOCK == 0
    scales = Region(region.rows, region.blocks().columns)
    return Fp8Rows(region.of(whole.values), scales.of(whole.scales))
