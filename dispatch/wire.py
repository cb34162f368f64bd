"""The byte layout of a row on its way to another rank, and which rows go where.

Knows: hidden rows, local slots, weights, packing, the plan of one dispatch as plain tensors. Knows
nothing of process groups.

Shape letters: T tokens, D hidden, K top-k, G scales a row, R ranks, e local slots, S rows sent
(one for each token and destination rank), Q valid (token, k) pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dispatch.base import PeerError, ScaleFormat, WireFormat
from dispatch.fp8 import num_blocks, row_scales, scale_bytes

REFUSED = -1  # in place of a row count: that rank refuses its arguments
_FEW_ROWS = 64  # a decode step's: plain Python is several times quicker than six small kernels


def stop_if_refused(counts: list[int]) -> None:
    """counts [R], one from each rank. PeerError if any rank refused."""
    refused = [rank for rank, count in enumerate(counts) if count == REFUSED]
    if refused:
        raise PeerError(f"dispatch: refused by ranks {refused}; see their errors")


@dataclass(frozen=True)
class CountFormat:
    """A number of rows for each rank, or REFUSED, where counts travel by themselves: c = 2 bytes
    each, 4 where a rank may have 32768 tokens or more. They travel as bytes: not every transport
    knows int16."""

    dtype: torch.dtype

    @classmethod
    def choose(cls, max_tokens: int) -> CountFormat:
        """max_tokens of a rank, which sends no more rows to another."""
        return cls(torch.int16 if max_tokens <= torch.iinfo(torch.int16).max else torch.int32)

    @property
    def nbytes(self) -> int:
        """Of one count."""
        return self.dtype.itemsize

    def pack(self, counts: list[int], device: torch.device) -> Tensor:
        """[n] -> uint8 [n * nbytes]."""
        return torch.tensor(counts, dtype=self.dtype, device=device).view(torch.uint8)

    def unpack(self, packed: Tensor) -> list[int]:
        counts: list[int] = packed.view(self.dtype).tolist()
        return counts


@dataclass(frozen=True)
class RowFormat:
    """A row is D hidden values, K fp32 weights, K local slots (int16; int32 from 32768 slots up)
    and, where the values are FP8, their scales; each part is padded to 4 bytes, so that all of them
    are aligned in each row, and a row has 8 bytes or more.

        row_bytes = pad4(D * w) + 4 * K + pad4(2 * K) + s      (pad4: up to a multiple of 4)
        model: w bytes a value of the model dtype, s = 0
        fp8: w = 1, s = 4 * G      fp8_ue8m0: w = 1, s = 4 * ceil(G / 4)      G = ceil(D / 128)

    FP8 values travel as bytes: neither gloo nor all of torch's indexing knows float8.
    """

    hidden_size: int
    top_k: int
    dtype: torch.dtype  # of the model
    slot_dtype: torch.dtype
    wire: WireFormat = WireFormat.MODEL

    @classmethod
    def choose(
        cls,
        hidden_size: int,
        top_k: int,
        dtype: torch.dtype,
        num_slots: int,
        wire: WireFormat = WireFormat.MODEL,
    ) -> RowFormat:
        """num_slots: how many a row may name, those of its destination or all."""
        small = num_slots <= torch.iinfo(torch.int16).max
        return cls(hidden_size, top_k, dtype, torch.int16 if small else torch.int32, wire)

    @property
    def value_dtype(self) -> torch.dtype:
        """Of the hidden part, as it travels."""
        return self.dtype if self.wire is WireFormat.MODEL else torch.uint8

    @property
    def scale_format(self) -> ScaleFormat:
        return row_scales(self.hidden_size, self.wire)[0]

    @property
    def x_bytes(self) -> int:
        """Bytes of the hidden part, padded to 4."""
        return _pad4(self.hidden_size * self.value_dtype.itemsize)

    @property
    def row_bytes(self) -> int:
        ids = _pad4(self.top_k * self.slot_dtype.itemsize)
        return self.x_bytes + self.top_k * 4 + ids + scale_bytes(self.hidden_size, self.wire)

    @property
    def least_bytes(self) -> int:
        """What a row must have at the least: no padding, a byte for each exponent."""
        scales = scale_bytes(self.hidden_size, self.wire)
        if self.wire is WireFormat.FP8_UE8M0:
            scales = num_blocks(self.hidden_size)
        picks = self.top_k * (4 + self.slot_dtype.itemsize)
        return self.hidden_size * self.value_dtype.itemsize + picks + scales

    def split(self, buffer: Tensor) -> tuple[Tensor, ...]:
        """uint8 [n, row_bytes] -> views x [n, D], weights [n, K], slots [n, K] and, for FP8,
        scales; x as it travels."""
        parts, start = [], 0
        _, scale_dtype, num_scales = row_scales(self.hidden_size, self.wire)
        for width, dtype in (
            (self.hidden_size, self.value_dtype),
            (self.top_k, torch.float32),
            (self.top_k, self.slot_dtype),
            (num_scales, scale_dtype),
        ):
            end = start + width * dtype.itemsize
            parts.append(buffer[:, start:end].view(dtype))
            start = _pad4(end)
        return tuple(parts if num_scales else parts[:3])

    def on_wire(self, x: Tensor) -> Tensor:
        return x if self.wire is WireFormat.MODEL else x.view(torch.uint8)

    def off_wire(self, x: Tensor) -> Tensor:
        return x if self.wire is WireFormat.MODEL else x.view(torch.float8_e4m3fn)


def _pad4(num_bytes: int) -> int:
    return -(-num_bytes // 4) * 4


@dataclass(frozen=True)
class SendPlan:
    """Which tokens go to which rank, in order of rank, then token.

    tokens [S] int64; ranks [S] int64; row_counts [R] rows for each rank; valid [T, R] bool.
    destination [T, K] int32: rank of each pick, -1 where masked.
    """

    tokens: Tensor
    ranks: Tensor
    row_counts: list[int]
    valid: Tensor
    destination: Tensor

    @classmethod
    def make(cls, slots: Tensor, num_ranks: int, num_local_experts: int) -> SendPlan:
        """slots [T, K] int32 physical or -1."""
        destination = slots.div(num_local_experts, rounding_mode="floor")
        rows = slots.shape[0]
        valid = torch.zeros(rows, num_ranks + 1, dtype=torch.bool, device=slots.device)
        # A masked pick marks the spare last column.
        column = torch.where(destination < 0, num_ranks, destination).to(torch.int64)
        valid.scatter_(1, column, True)
        valid = valid[:, :num_ranks]
        ranks, tokens = valid.t().nonzero(as_tuple=True)
        counts = torch.bincount(ranks, minlength=num_ranks)
        return cls(tokens, ranks, counts.tolist(), valid, destination)

    def local_slots(self, slots: Tensor, num_local_experts: int) -> Tensor:
        """slots [T, K] physical -> [S, K] int32: local slots at each row's destination or -1."""
        local = slots.index_select(0, self.tokens)
        local = local - (self.ranks * num_local_experts).to(torch.int32)[:, None]
        return torch.where((local >= 0) & (local < num_local_experts), local, -1)

    def home_rows(self, top_k: int) -> Tensor:
        """[T, min(K, R)] int64: the sent rows of each token in order of rank, padded with -1."""
        tokens, num_ranks = self.valid.shape
        width = min(top_k, num_ranks)
        column = (self.valid.cumsum(1) - 1)[self.tokens, self.ranks]
        index = torch.full((tokens, width), -1, dtype=torch.int64, device=self.valid.device)
        index[self.tokens, column] = torch.arange(len(self.tokens), device=index.device)
        return index

    def home_pairs(self) -> tuple[Tensor, list[int]]:
        """Where each pick's row comes home in order of (rank, token, k): [T, K] int64, -1 where
        masked; and the number of pairs for each rank [R]."""
        flat = self.destination.reshape(-1)
        order = flat.argsort(stable=True)  # the masked come first
        counts = torch.bincount(flat + 1, minlength=self.valid.shape[1] + 1).tolist()
        masked = counts[0]
        index = torch.empty_like(order)
        index.scatter_(0, order, torch.arange(-masked, len(order) - masked, device=order.device))
        return index.clamp_(min=-1).view(self.destination.shape), counts[1:]


@dataclass(frozen=True)
class SentRows:
    """The rows of a plan, each part where it lies: x [T, D] and scales [T, G] of all tokens, to be
    picked by tokens [S]; weights, slots [S, K] of the rows, as their destinations shall see them.
    """

    form: RowFormat
    tokens: Tensor
    x: Tensor
    scales: Tensor | None
    weights: Tensor
    slots: Tensor

    def take(self, rows: slice) -> tuple[Tensor, ...]:
        """Copies of these rows, in the parts that `RowFormat.split` gives."""
        at = self.tokens[rows]
        parts = (
            self.form.on_wire(self.x).index_select(0, at),
            self.weights[rows],
            self.slots[rows].to(self.form.slot_dtype),
        )
        return parts if self.scales is None else (*parts, self.scales.index_select(0, at))

    def write(self, buffer: Tensor, rows: slice) -> None:
        """These rows into uint8 [n, row_bytes], in one pass."""
        at = self.tokens[rows]
        x, weights, slots, *scales = self.form.split(buffer)
        torch.index_select(self.form.on_wire(self.x), 0, at, out=x)
        weights.copy_(self.weights[rows])
        slots.copy_(self.slots[rows])
        if self.scales is not None:
            torch.index_select(self.scales, 0, at, out=scales[0])


@dataclass(frozen=True)
class PaddedBlocks:
    """Rows in blocks of equal size, one block a rank, so that no counts need travel first.

    A block is a header row (its first int32: how many rows follow, or REFUSED) and `bound` rows.
    """

    form: RowFormat
    num_ranks: int
    bound: int

    @property
    def block_rows(self) -> int:
        return self.bound + 1

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks, this rank's own among them."""
        return self.num_ranks * self.block_rows * self.form.row_bytes

    def empty(self, device: torch.device) -> Tensor:
        shape = (self.num_ranks * self.block_rows, self.form.row_bytes)
        return torch.empty(shape, dtype=torch.uint8, device=device)

    def refuse(self, device: torch.device) -> Tensor:
        buffer = self.empty(device)
        self._headers(buffer).fill_(REFUSED)
        return buffer

    def pack(self, plan: SendPlan, rows: SentRows) -> Tensor:
        """rows: of the plan -> the buffer."""
        buffer = self.empty(plan.tokens.device)
        self._headers(buffer).copy_(torch.tensor(plan.row_counts))
        at = self._rows(plan.row_counts, buffer.device)
        for part, value in zip(self.form.split(buffer), rows.take(slice(None)), strict=True):
            part[at] = value
        return buffer

    def counts(self, buffer: Tensor) -> list[int]:
        """[R] rows in each block, or REFUSED."""
        counts: list[int] = self._headers(buffer).tolist()
        return counts

    def unpack(self, buffer: Tensor, counts: list[int]) -> tuple[Tensor, ...]:
        """The parts, as `RowFormat.split` gives them, of the rows that are there."""
        at = self._rows(counts, buffer.device)
        return tuple(part.index_select(0, at) for part in self.form.split(buffer))

    def _headers(self, buffer: Tensor) -> Tensor:
        """View [R] int32 of the headers."""
        return buffer.view(torch.int32)[:: self.block_rows, 0]

    def _rows(self, counts: list[int], device: torch.device) -> Tensor:
        """counts [R] -> [sum] int64: where the rows of all blocks lie in the buffer."""
        if sum(counts) <= _FEW_ROWS:
            firsts = range(1, self.num_ranks * self.block_rows + 1, self.block_rows)
            places = zip(firsts, counts, strict=True)
            at = [first + i for first, count in places for i in range(count)]
            return torch.tensor(at, dtype=torch.int64, device=device)
        ranks = torch.arange(self.num_ranks, device=device)
        there = torch.tensor(counts, device=device)
        # A row's number, plus how far its block's first row lies beyond the rows before it.
        shift = ranks * self.block_rows + 1 - (there.cumsum(0) - there)
        shifts = shift.repeat_interleave(there)
        return shifts + torch.arange(shifts.shape[0], device=device)
