"""Picks of complete steps until they are counted: joined, and brought to the host.

On a GPU they are copied behind the step's kernels and counted a step later, when nobody has to wait
for them any more.

Knows tensors of picks. Knows nothing of plans or windows.

Shape letters: T tokens, K picks.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.device.api import DeviceApi, Event

Base = int | NDArray[np.int64]  # where a layer's rows count: all alike, or each


@dataclass(frozen=True)
class Uncounted:
    """steps: their numbers. rows: sent to each rank, a list a layer. ids [T of all, K] on the host
    as soon as `event` (None: already) says so; None: none."""

    steps: list[int]
    rows: list[list[int]]
    bases: list[Base]
    lengths: list[int]
    ids: Tensor | None
    event: Event | None = None

    @classmethod
    def of(
        cls,
        steps: list[int],
        rows: list[list[int]],
        picks: Seq[Tensor],
        bases: list[Base],
        lengths: list[int],
        api: DeviceApi | None = None,
    ) -> Uncounted:
        """picks [>= lengths[i], K] each: what lies behind lengths[i] rows is padding. api: copies
        what is on a device without the host waiting; None: it waits."""
        if not picks:
            return cls(steps, rows, bases, lengths, None)
        joined = torch.cat(list(picks))
        if joined.shape[0] != sum(lengths):
            joined = torch.cat([x[:length] for x, length in zip(picks, lengths, strict=True)])
        assert joined.shape[0] == sum(lengths), "picks of fewer rows than the plan has"
        if api is None:
            return cls(steps, rows, bases, lengths, joined.cpu())
        host = api.pinned(joined.nbytes).view(joined.dtype).view(joined.shape)
        host.copy_(joined, non_blocking=True)
        event = api.event()
        event.record()
        return cls(steps, rows, bases, lengths, host, event)

    def counts(self, size: int) -> NDArray[np.int64]:
        """[size]: each pick counts at its row's base + id; -1 is masked."""
        if self.event is not None:
            self.event.wait()
        if self.ids is None:
            return np.zeros(size, np.int64)
        ids = self.ids.numpy()
        if all(isinstance(base, int) for base in self.bases):
            of_row = np.repeat(np.array(self.bases), self.lengths)
        else:
            pairs = zip(self.bases, self.lengths, strict=True)
            of_row = np.concatenate([np.broadcast_to(base, n) for base, n in pairs])
        places = of_row[:, None] + ids
        if ids.size and ids.min() < 0:
            places = places[ids >= 0]
        found: NDArray[np.int64] = np.bincount(places.reshape(-1), minlength=size)
        return found
