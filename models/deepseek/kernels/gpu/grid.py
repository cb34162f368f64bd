"""How many programs a persistent grid has: some for each SM, never more than there are tiles.

Knows the device's number of SMs, nothing of kernels. The result of a kernel does not depend on it.
"""

from __future__ import annotations

import torch

INTERPRETED_SMS = 3  # in the interpreter programs run one after the other: few, yet several


def num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def num_programs(device: torch.device, tiles: int, per_sm: int) -> int:
    return max(1, min(tiles, num_sms(device) * per_sm))
