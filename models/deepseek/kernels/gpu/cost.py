"""What a kernel must move and compute, as plain numbers: the limit beside a measurement.

Knows no kernel and no GPU: each kernel's module counts its own. Needs neither torch nor triton, so
that the planner of a machine without a GPU can ask.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelCost:
    """bytes: to and from device memory, each tensor once (what a perfect cache would leave).
    flops: a multiply and an add count as two, those of matrix units only where a kernel has any."""

    bytes: int
    flops: int

    def __add__(self, other: KernelCost) -> KernelCost:
        return KernelCost(self.bytes + other.bytes, self.flops + other.flops)

    def __mul__(self, times: int) -> KernelCost:
        return KernelCost(self.bytes * times, self.flops * times)

    def seconds(self, bytes_per_second: float, flops_per_second: float) -> float:
        """The least time: that of the slower of memory and matrix units, which overlap."""
        return max(self.bytes / bytes_per_second, self.flops / flops_per_second)

    def bound(self, bytes_per_second: float, flops_per_second: float) -> str:
        """ "memory" or "compute": which of the two decides seconds()."""
        by_memory = self.bytes / bytes_per_second >= self.flops / flops_per_second
        return "memory" if by_memory else "compute"


NOTHING = KernelCost(0, 0)
