"""What this device does at best, measured now: the limits that times stand beside.

Memory: one large copy, bytes read and written. Matrix units: torch's bf16 product of two large
squares; e4m3 by torch._scaled_mm, or twice bf16 where that does not run. Overhead: a launch of next
to nothing, as the clock sees it. Knows no kernel of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from models.deepseek.kernels.gpu.bench.clock import Clock
from models.deepseek.kernels.gpu.cost import KernelCost


@dataclass(frozen=True)
class Limits:
    """Bytes and FLOPs a second; fp8_by: how that was found. overhead: seconds of an empty run."""

    memory: float
    bf16: float
    fp8: float
    fp8_by: str
    overhead: float

    def seconds(self, cost: KernelCost, unit: str) -> float:
        return cost.seconds(self.memory, self.peak(unit))

    def bound(self, cost: KernelCost, unit: str) -> str:
        """ "memory" or "compute"."""
        return cost.bound(self.memory, self.peak(unit))

    def peak(self, unit: str) -> float:
        """unit: fp8 or bf16 products; none: FLOPs do not count."""
        return {"fp8": self.fp8, "bf16": self.bf16, "none": float("inf")}[unit]


def measure_limits(
    clock: Clock, device: torch.device, copy_bytes: int = 1 << 30, side: int = 8192
) -> Limits:
    """copy_bytes: of each of two buffers. side: of the squares that are multiplied."""
    copy = clock.time(_copy(copy_bytes, device), False, 0.5).seconds
    x = torch.randn(side, side, dtype=torch.bfloat16, device=device)
    y = torch.randn(side, side, dtype=torch.bfloat16, device=device)
    flops = 2 * side**3
    bf16 = flops / clock.time(lambda: x @ y.T, False, 0.5).seconds
    fp8, how = 2 * bf16, "twice bf16"
    try:
        a, b = x.to(torch.float8_e4m3fn), y.to(torch.float8_e4m3fn)
        one = torch.ones((), device=device)

        def product() -> object:
            return torch._scaled_mm(a, b.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

        measured = flops / clock.time(product, False, 0.5).seconds
        fp8, how = measured, "torch._scaled_mm"
    except Exception as error:  # no e4m3 here, or another version's signature
        how = f"twice bf16 (torch._scaled_mm: {(str(error).splitlines() or [''])[0][:60]})"
    small = torch.zeros(1, device=device)
    overhead = clock.time(lambda: small.add_(1), False, 0.2).seconds
    return Limits(2 * copy_bytes / copy, bf16, fp8, how, overhead)


def _copy(size: int, device: torch.device) -> Callable[[], object]:
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)
