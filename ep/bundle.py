"""The bytes of one slot of experts, as the one run in which an expert moves (law 3).

Kernels may keep experts stacked matrix by matrix; then a slot's bytes lie in several places. Who
sends or stores them sees one run all the same, and nothing is copied but what is sent. Knows
nothing of what the bytes mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor


class Bundle:
    """parts: flat uint8 views of where a slot lies, in the order of the run. stored: called once
    other bytes have been put there."""

    def __init__(self, *parts: Tensor, stored: Callable[[], None] | None = None) -> None:
        assert all(part.dtype == torch.uint8 and part.dim() == 1 for part in parts)
        self.parts = parts
        self.nbytes = sum(part.numel() for part in parts)
        self._stored = stored

    def cut(self, offset: int = 0, length: int | None = None) -> Tensor:
        """uint8 [length] (None: to the end) from there on: a view where one part holds them all,
        else a copy. offset + length is within the run."""
        end = self.nbytes if length is None else offset + length
        found = [
            part[max(offset - begin, 0) : end - begin]
            for begin, part in self._placed()
            if begin < end and begin + part.numel() > offset
        ]
        if not found:
            return torch.empty(0, dtype=torch.uint8)
        return found[0] if len(found) == 1 else torch.cat(found)

    def copy_to(self, run: Tensor) -> None:
        """run: uint8 [nbytes], on any device, here and below."""
        for begin, part in self._placed():
            run[begin : begin + part.numel()].copy_(part)

    def copy_from(self, run: Tensor) -> None:
        assert run.shape == (self.nbytes,), f"{list(run.shape)} for {self.nbytes} bytes"
        for begin, part in self._placed():
            part.copy_(run[begin : begin + part.numel()])
        if self._stored is not None:
            self._stored()

    def _placed(self) -> Iterator[tuple[int, Tensor]]:
        begin = 0
        for part in self.parts:
            yield begin, part
            begin += part.numel()
