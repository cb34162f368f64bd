"""What the `nvshmem` backend takes: limits of torch's two operators, rows, segments, buffers.

Knows shapes and sizes. Knows nothing of torch's symmetric memory itself.

The limits are those of the kernels behind `torch.ops.symm_mem.all_to_all_vdev_2d` (dispatch) and
`all_to_all_vdev_2d_offset` (combine). Both add up splits by warps: a block of 512 threads has 16
(`NUM_TILES`), a warp has 32 lanes. Dispatch has a warp for each local slot and a lane for each
rank, combine the other way round, so that together they carry 16 ranks of 16 slots.

Shape letters: K top-k, D hidden, P physical slots, e local slots, R ranks, M max tokens a rank,
N rows received at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dispatch.base import DispatchConfig, ScaleFormat, WireFormat
from dispatch.fp8 import row_scales
from dispatch.mib import round_up
from dispatch.words import counted, nearest

_WARP = 32
NUM_TILES = 512 // _WARP
DISPATCH_MAX_RANKS, DISPATCH_MAX_LOCAL = _WARP, NUM_TILES
COMBINE_MAX_RANKS, COMBINE_MAX_LOCAL = NUM_TILES, _WARP
MAX_RANKS = min(DISPATCH_MAX_RANKS, COMBINE_MAX_RANKS)
MAX_LOCAL = min(DISPATCH_MAX_LOCAL, COMBINE_MAX_LOCAL)
IN_FLIGHT = 2  # layers, each with buffers of its own
_WORD = 16  # bytes that a thread copies at once


@dataclass(frozen=True)
class SymmetricRow:
    """A row on its way to an expert: D values, then the scales of FP8 ones, to a multiple of 16
    bytes. No weights (they stay at home) and no slot (the operator sorts by it)."""

    hidden_size: int
    dtype: torch.dtype  # of the model
    wire: WireFormat

    @property
    def value_dtype(self) -> torch.dtype:
        return self.dtype if self.wire is WireFormat.MODEL else torch.float8_e4m3fn

    @property
    def scale_format(self) -> ScaleFormat:
        return row_scales(self.hidden_size, self.wire)[0]

    @property
    def nbytes(self) -> int:
        _, dtype, width = row_scales(self.hidden_size, self.wire)
        return round_up(self._scales_at + width * dtype.itemsize, _WORD)

    def split(self, buffer: Tensor) -> tuple[Tensor, Tensor | None]:
        """uint8 [n, nbytes] -> views values [n, D] and, for FP8, scales as `scale_format` says."""
        _, dtype, width = row_scales(self.hidden_size, self.wire)
        values = buffer[:, : self.hidden_size * self.value_dtype.itemsize].view(self.value_dtype)
        if not width:
            return values, None
        start = self._scales_at
        return values, buffer[:, start : start + width * dtype.itemsize].view(dtype)

    @property
    def _scales_at(self) -> int:
        return round_up(self.hidden_size * self.value_dtype.itemsize, 4)


def row_of(config: DispatchConfig) -> SymmetricRow:
    return SymmetricRow(config.hidden_size, config.dtype, config.wire)


def rows_out(config: DispatchConfig, num_ranks: int, tokens: int, align: int) -> int:
    """Rows that may arrive where no rank sends more than `tokens`: each goes to min(K, e) slots of
    this rank, and the segment of a slot is filled up to `align` rows, an empty one to that many."""
    local = config.num_physical_experts // num_ranks
    return num_ranks * tokens * min(config.top_k, local) + local * align


def buffer_shapes(
    config: DispatchConfig, num_ranks: int, align: int
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Symmetric tensors of one layer in flight: name -> shape, dtype; the same on every rank."""
    sent = config.max_tokens_per_rank * config.top_k
    arrives = rows_out(config, num_ranks, config.max_tokens_per_rank, align)
    row, slots = row_of(config).nbytes, config.num_physical_experts
    return {
        "rows_in": ((sent, row), torch.uint8),
        "rows_out": ((arrives, row), torch.uint8),
        "y_in": ((arrives, config.hidden_size), config.dtype),
        "y_out": ((sent, config.hidden_size), config.dtype),
        "in_splits": ((slots,), torch.int64),
        "splits": ((2, slots), torch.int64),
        "back": ((2, slots), torch.int64),
    }


def held_bytes(config: DispatchConfig, num_ranks: int, align: int) -> int:
    """Of all symmetric buffers together."""
    return IN_FLIGHT * sum(
        torch.Size(shape).numel() * dtype.itemsize
        for shape, dtype in buffer_shapes(config, num_ranks, align).values()
    )


def limit_problems(config: DispatchConfig, num_ranks: int) -> list[str]:
    """What speaks against it, each with the number and the largest valid value."""
    found = []
    if num_ranks > MAX_RANKS:
        found.append(
            f"{counted(num_ranks, 'rank')}: combine takes at most {COMBINE_MAX_RANKS}, dispatch "
            f"{DISPATCH_MAX_RANKS}; so at most {MAX_RANKS}"
        )
    slots = config.num_physical_experts
    if slots % num_ranks:
        found.append(
            f"num_physical_experts={slots} does not divide by {counted(num_ranks, 'rank')}: "
            f"{nearest(slots, num_ranks, MAX_LOCAL * num_ranks)}"
        )
    elif slots // num_ranks > MAX_LOCAL:
        found.append(
            f"num_physical_experts={slots}, {slots // num_ranks} a rank: dispatch takes at most "
            f"{DISPATCH_MAX_LOCAL}, combine {COMBINE_MAX_LOCAL}; so at most {MAX_LOCAL} a rank, "
            f"{MAX_LOCAL * num_ranks} in all"
        )
    step = _WORD // config.dtype.itemsize
    if config.hidden_size % step:
        found.append(
            f"hidden_size={config.hidden_size}: a row must be whole words of {_WORD} bytes; "
            f"{nearest(config.hidden_size, step)}"
        )
    return found


def slots_of(rows: int, starts: Tensor, counts: Tensor) -> Tensor:
    """starts, counts [e] -> [rows, 1] int32: the local slot of each row, -1 for padding."""
    numbers = torch.arange(rows, device=starts.device)
    slot = torch.searchsorted(starts, numbers, right=True) - 1
    inside = numbers < starts[slot] + counts[slot]
    return torch.where(inside, slot, -1).to(torch.int32)[:, None]
