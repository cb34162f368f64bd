"""EPGroup: who takes part in expert parallelism, and over which process groups.

Knows: ranks, node shape, the device and CPU process groups. Handed in everywhere, never global.
Knows nothing of: placement, tokens, models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class EPGroup:
    """The ranks that share the experts of one model.

    rank, size: this rank's number and the number of ranks. ranks_per_node: how many ranks one
    machine hosts (`size` when all are on one). device_group carries the all-to-alls, cpu_group the
    small agreements (`Lockstep`); both None exactly when size is 1. host: address of this
    rank at which the others reach its sockets. node_names: of the machines, () where nobody knows.
    """

    rank: int
    size: int
    ranks_per_node: int
    device_group: dist.ProcessGroup | None
    cpu_group: dist.ProcessGroup | None
    host: str = "127.0.0.1"
    node_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ValueError(f"EPGroup: rank {self.rank} is not in [0, {self.size})")
        if self.ranks_per_node < 1 or self.size % self.ranks_per_node:
            raise ValueError(
                f"EPGroup: ranks_per_node={self.ranks_per_node} does not divide size={self.size}"
            )
        if self.size > 1 and (self.device_group is None or self.cpu_group is None):
            raise ValueError("EPGroup: size > 1 needs a device group and a CPU group")

    @property
    def node(self) -> int:
        return self.rank // self.ranks_per_node

    def where(self, ranks: Sequence[int]) -> str:
        """Ranks as people find them: "rank 3", "rank 3 on h1", "node h1" for all of its ranks."""
        nodes = sorted({rank // self.ranks_per_node for rank in ranks})
        if self.num_nodes > 1 and self.node_names:
            names = ", ".join(self.node_names[node] for node in nodes)
            if len(ranks) == len(nodes) * self.ranks_per_node:
                return f"node {names}"
            return f"{_numbered(ranks)} on {names}"
        return _numbered(ranks)

    @property
    def num_nodes(self) -> int:
        return self.size // self.ranks_per_node

    @classmethod
    def single(cls) -> EPGroup:
        """The group of one rank: no process group, no collective."""
        return cls(rank=0, size=1, ranks_per_node=1, device_group=None, cpu_group=None)


def gather_objects(group: EPGroup, mine: Any) -> list[Any]:
    """One small object of each rank, on every rank (pickled; start-up only). Collective over the
    CPU group."""
    if group.size == 1:
        return [mine]
    everyone: list[Any] = [None] * group.size
    dist.all_gather_object(everyone, mine, group=group.cpu_group)
    return everyone


def _numbered(ranks: Sequence[int]) -> str:
    """rank 3; ranks 0, 1, 2 and 5 more"""
    shown = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'' if len(ranks) == 1 else 's'} {shown}{more}"
