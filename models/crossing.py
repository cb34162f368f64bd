"""Small tensors on their way to a device and back, so that the host waits once or not at all.

What is sent from memory that is not pinned, or by a copy that blocks, waits for all that the device
was asked before. What is brought back one by one waits for each. On CPUs nothing moves.

Knows tensors. Knows nothing of what they mean.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

EDGE = 16  # bytes; a pointer that is no multiple of it has a kernel compiled anew


def sent(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on the host -> on the device. The host waits for nothing."""
    if device.type == "cpu":
        return x
    return x.pin_memory().to(device, non_blocking=True)


def sent_all(parts: Seq[Tensor], device: torch.device) -> list[Tensor]:
    """The same of several, by one copy. Each begins where kernels are compiled for (EDGE)."""
    if device.type == "cpu":
        return list(parts)
    return unpacked(sent(packed(parts, EDGE), device), parts, EDGE)


def brought(parts: Seq[Tensor]) -> list[Tensor]:
    """Tensors on one device -> on the host, by one copy, which is waited for."""
    if not parts or parts[0].device.type == "cpu":
        return list(parts)
    return unpacked(packed(parts).cpu(), parts)


def packed(parts: Seq[Tensor], edge: int = 1) -> Tensor:
    """[n] uint8: the parts' bytes, in an order in which each begins where its type may, and at a
    multiple of `edge`."""
    pieces = []
    for i in _order(parts):
        pieces.append(parts[i].reshape(-1).view(torch.uint8))
        if gap := -parts[i].nbytes % edge:
            pieces.append(pieces[-1].new_zeros(gap))
    return torch.cat(pieces)


def unpacked(memory: Tensor, likes: Seq[Tensor], edge: int = 1) -> list[Tensor]:
    """memory: `packed` of such tensors, wherever it lies -> the tensors in it."""
    found: list[Tensor] = [memory] * len(likes)
    at = 0
    for i in _order(likes):
        like = likes[i]
        found[i] = memory[at : at + like.nbytes].view(like.dtype).view(like.shape)
        at += like.nbytes + -like.nbytes % edge
    return found


def _order(parts: Seq[Tensor]) -> list[int]:
    return sorted(range(len(parts)), key=lambda i: -parts[i].element_size())
