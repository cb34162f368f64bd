"""A step's small tensors on their way to the device: one copy a step, from pinned memory.

The host never waits: a pinned buffer is used again only when the copy out of it is done (an event
says so), and there are as many as steps can be under way.

Knows ForwardBatch. Knows nothing of plans or graphs.

Shape letters: T tokens, S sequences, B blocks a table row, O rows whose logits are wanted, W depth
of a tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from models.crossing import EDGE
from models.interface import ForwardBatch
from moeserve.device.api import DeviceApi, Event

# Those of 8 bytes an element first: then each begins where its type may.
FIELDS = (
    "token_ids",
    "positions",
    "slot_mapping",
    "logits_rows",
    "query_start",
    "context_len",
    "block_tables",
    "ancestors",
)


class Pack:
    """Tensors of given shapes and types in one run of bytes, wherever that lies, each at an EDGE of
    it."""

    def __init__(self, likes: Mapping[str, Tensor]) -> None:
        self._places: dict[str, tuple[int, int, torch.Size, torch.dtype]] = {}
        at = 0
        for name, like in sorted(likes.items(), key=lambda item: -item[1].element_size()):
            self._places[name] = (at, at + like.nbytes, like.shape, like.dtype)
            at += like.nbytes + -like.nbytes % EDGE
        self.nbytes = at

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """memory [>= nbytes] uint8 -> the tensors in it."""
        return {
            name: memory[start:end].view(dtype).view(shape)
            for name, (start, end, shape, dtype) in self._places.items()
        }


class Staging:
    """depth: copies that may be under way at once."""

    def __init__(self, api: DeviceApi, depth: int = 3) -> None:
        self._api = api
        self._buffers: list[tuple[Tensor, Event] | None] = [None] * depth
        self._next = 0
        self.num_copies = 0

    def send(self, batch: ForwardBatch) -> ForwardBatch:
        """A batch on the host (its tensors contiguous) -> the same on the device, with the one on
        the host as its `host`: so nothing may write to that one any more."""
        parts = {name: x for name in FIELDS if (x := getattr(batch, name)) is not None}
        pack = Pack(parts)
        host, event = self._buffer(pack.nbytes)
        for name, place in pack.views(host).items():
            place.copy_(parts[name])
        there = torch.empty(pack.nbytes, dtype=torch.uint8, device=self._api.device)
        there.copy_(host[: pack.nbytes], non_blocking=True)
        event.record()
        self.num_copies += 1
        views: dict[str, Any] = dict(pack.views(there))
        return replace(batch, host=batch, **views)

    def _buffer(self, nbytes: int) -> tuple[Tensor, Event]:
        """The one used longest ago, once it is free; a larger one where it is too small."""
        at, self._next = self._next, (self._next + 1) % len(self._buffers)
        held = self._buffers[at]
        if held is None:
            held = self._api.pinned(_room(nbytes)), self._api.event()
        else:
            held[1].wait()
            if held[0].shape[0] < nbytes:
                held = self._api.pinned(_room(nbytes)), held[1]
        self._buffers[at] = held
        return held


def _room(nbytes: int) -> int:
    return 1 << max(nbytes - 1, 4095).bit_length()
