"""Small tensors on their way to a device and back, so that the host waits once or not at all.

What is sent from memory that is not pinned, or by a copy that blocks, waits for all that the device
was asked before. What is brought back one by one waits for each. On CPUs nothing moves.

Knows tensors. Knows nothing of what they mean.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor


def sent(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on the host -> on the device. The host waits for nothing."""
    if device.type == "cpu":
        return x
    return x.pin_memory().to(device, non_blocking=True)


def sent_all(parts: Seq[Tensor], device: torch.device) -> list[Tensor]:
    """The same of several, by one copy."""
    if device.type == "cpu":
        return list(parts)
    return unpacked(sent(packed(parts), device), parts)


def brought(parts: Seq[Tensor]) -> list[Tensor]:
    """Tensors on one device -> on the host, by one copy, which is waited for."""
    if not parts or parts[0].device.type == "cpu":
        return list(parts)
    return unpacked(packed(parts).cpu(), parts)


def packed(parts: Seq[Tensor]) -> Tensor:
    """[n] uint8: the parts' bytes, in an order in which each begins where its type may."""
    return torch.cat([parts[i].reshape(-1).view(torch.uint8) for i in _order(parts)])


def unpacked(memory: Tensor, likes: Seq[Tensor]) -> list[Tensor]:
    """memory: `packed` of such tensors, wherever it lies -> the tensors in it."""
    found: list[Tensor] = [memory] * len(likes)
    at = 0
    for i in _order(likes):
        like = likes[i]
        found[i] = memory[at : at + like.nbytes].view(like.dtype).view(like.shape)
        at += like.nbytes
    return found


def _order(parts: Seq[Tensor]) -> list[int]:
    return sorted(range(len(parts)), key=lambda i: -parts[i].element_size())
