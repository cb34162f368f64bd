"""What is timed: a kernel at a shape, the same by others, and what it must move and compute.

Plain data. A case is made (its tensors too) only when its turn has come, and dropped behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from models.deepseek.kernels.gpu.cost import KernelCost

BY_LOAD = "ours by load"  # a rival that is ours too, in fast mode
Call = Callable[[], "Tensor | object"]


@dataclass(frozen=True)
class Prepared:
    """ours, and by name others that do the same. absent: by name, why one is not here. compare: of
    a rival's result to ours, the largest difference over the largest value (None: not compared)."""

    ours: Call
    rivals: Mapping[str, Call] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    compare: Callable[[object, object], float] | None = None


@dataclass(frozen=True)
class Case:
    """kernel: a family, as winners are kept. key: what the shape is, by name. unit: fp8, bf16 or
    none: whose FLOPs its cost counts. first: of the shapes that come before all others when time is
    short. memory: bytes that a device must have left, where that is more than any has for sure."""

    kernel: str
    shape: str
    key: Mapping[str, int]
    cost: KernelCost
    unit: str
    make: Callable[[], Prepared]
    first: bool = False
    memory: int = 0

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.shape}"


def largest_difference(ours: object, theirs: object) -> float:
    """Of two tensors, over the largest value of ours."""
    assert isinstance(ours, Tensor) and isinstance(theirs, Tensor)
    mine, other = ours.float(), theirs.float()
    return float((mine - other).abs().max() / mine.abs().max().clamp(min=1e-9))
