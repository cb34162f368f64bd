"""The byte layout of a row on its way to another rank, and which rows go where.

Knows: hidden rows, local slots, weights, packing, the plan of one dispatch as plain tensors. Knows
nothing of process groups.

Shape letters: T tokens, D hidden, K top-k, R ranks, e local slots, S rows sent (one for each token
and destination rank), Q valid (token, k) pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dispatch.base import PeerError

REFUSED = -1  # in place of a row count: that rank refuses its arguments


def stop_if_refused(counts: list[int]) -> None:
    """counts [R], one from each rank. PeerError if any rank refused."""
    refused = [rank for rank, count in enumerate(counts) if count == REFUSED]
    if refused:
        raise PeerError(f"dispatch: refused by ranks {refused}; see their errors")


@dataclass(frozen=True)
class RowFormat:
    """A row is D hidden values, K fp32 weights, K local slots (int16; int32 from 32768 slots up),
    padded to 4 bytes so that each part of each row is aligned; so a row has 8 bytes or more."""

    hidden_size: int
    top_k: int
    dtype: torch.dtype
    slot_dtype: torch.dtype

    @classmethod
    def choose(
        cls, hidden_size: int, top_k: int, dtype: torch.dtype, num_local_experts: int
    ) -> RowFormat:
        small = num_local_experts <= torch.iinfo(torch.int16).max
        return cls(hidden_size, top_k, dtype, torch.int16 if small else torch.int32)

    @property
    def x_bytes(self) -> int:
        """Bytes of the hidden part, padded to 4."""
        return -(-self.hidden_size * self.dtype.itemsize // 4) * 4

    @property
    def row_bytes(self) -> int:
        slots = self.top_k * self.slot_dtype.itemsize
        return self.x_bytes + self.top_k * 4 + -(-slots // 4) * 4

    def split(self, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """uint8 [n, row_bytes] -> views x [n, D], weights [n, K], slots [n, K]."""
        k, start = self.top_k, self.x_bytes
        x = buffer[:, : self.hidden_size * self.dtype.itemsize].view(self.dtype)
        weights = buffer[:, start : start + 4 * k].view(torch.float32)
        start += 4 * k
        slots = buffer[:, start : start + k * self.slot_dtype.itemsize].view(self.slot_dtype)
        return x, weights, slots


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

    def pack(self, plan: SendPlan, x: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
        """x [T, D]; weights, slots [S, K] of the sent rows -> the buffer."""
        buffer = self.empty(x.device)
        counts = torch.tensor(plan.row_counts, device=x.device)
        self._headers(buffer).copy_(counts)
        at = self._rows(counts)
        x_part, weight_part, slot_part = self.form.split(buffer)
        x_part[at] = x.index_select(0, plan.tokens)
        weight_part[at] = weights
        slot_part[at] = slots.to(self.form.slot_dtype)
        return buffer

    def counts(self, buffer: Tensor) -> list[int]:
        """[R] rows in each block, or REFUSED."""
        counts: list[int] = self._headers(buffer).tolist()
        return counts

    def unpack(self, buffer: Tensor, counts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """x [N, D], weights [N, K], slots [N, K] of the rows that are there."""
        at = self._rows(torch.tensor(counts, device=buffer.device))
        x, weights, slots = (part.index_select(0, at) for part in self.form.split(buffer))
        return x, weights, slots

    def _headers(self, buffer: Tensor) -> Tensor:
        """View [R] int32 of the headers."""
        return buffer.view(torch.int32)[:: self.block_rows, 0]

    def _rows(self, counts: Tensor) -> Tensor:
        """counts [R] -> [sum] int64: where the rows of all blocks lie in the buffer."""
        ranks = torch.arange(self.num_ranks, device=counts.device)
        # A row's number, plus how far its block's first row lies beyond the rows before it.
        shift = ranks * self.block_rows + 1 - (counts.cumsum(0) - counts)
        shifts = shift.repeat_interleave(counts)
        return shifts + torch.arange(shifts.shape[0], device=counts.device)
