"""From logical experts to the physical slots that shall compute them.

Knows: the placement of one layer as a device-side table, the choice among replicas, counts of
picks. Knows nothing of: which rank it runs on (the choice is the same wherever it is made, law 2),
how rows travel.

Shape letters: T tokens, K top-k, E logical experts, R replicas, P physical slots, e local slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ep.placement import ExpertPlacement


@dataclass(frozen=True)
class RoutingTable:
    """One layer of a placement on the device. Make it with `build`.

    slots [E + 1, R] int32: slots of each expert, padded by repeating none (-1); count [E + 1]
    int32. The last row is the one that a masked id (-1) indexes: its only slot is -1. Empty slots
    stand in no row, so that none is ever chosen; num_physical_experts and num_local_experts count
    them. is_identity: expert i lies in slot i alone, so that routing has nothing to do.
    """

    slots: Tensor
    count: Tensor
    num_logical_experts: int
    num_physical_experts: int
    num_local_experts: int
    generation: int
    is_identity: bool

    @classmethod
    def build(
        cls, placement: ExpertPlacement, layer: int, device: torch.device | str = "cpu"
    ) -> RoutingTable:
        """layer counts the layers of the placement (those that have experts), not of the model."""
        slots = torch.from_numpy(placement.logical_to_physical[layer].copy())
        count = torch.from_numpy(placement.replica_count[layer].copy())
        slots = torch.cat([slots, torch.full_like(slots[:1], -1)]).to(torch.int32)
        count = torch.cat([count, torch.ones_like(count[:1])]).to(torch.int32)
        where = placement.logical_to_physical[layer]
        return cls(
            slots=slots.to(device),
            count=count.to(device),
            num_logical_experts=placement.num_logical_experts,
            num_physical_experts=placement.num_physical_experts,
            num_local_experts=placement.num_local_experts,
            generation=placement.generation,
            is_identity=bool(
                (placement.replica_count[layer] == 1).all()
                and (where[:, 0] == range(len(where))).all()
            ),
        )


def token_keys(num_tokens: int, home_rank: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """[T] int32: the number by which each token picks among replicas.

    Row number plus home rank: even over replicas both for many tokens of one rank and for one
    token on each of many ranks. The home rank is a property of the token (the rank whose batch it
    is in), not of the rank that looks: whoever routes this token must use the same keys.
    """
    return torch.arange(home_rank, home_rank + num_tokens, dtype=torch.int32, device=device)


def route(ids: Tensor, table: RoutingTable, keys: Tensor | None = None) -> Tensor:
    """ids [T, K] int32 or int64 logical experts or -1 (masked) -> slots [T, K] int32.

    Replica of expert x for a token with key q: (q + x) % count(x). keys [T] None: `token_keys(T)`.
    """
    if table.is_identity:
        return ids.to(torch.int32)
    if table.slots.shape[1] == 1:
        return table.slots[:, 0][ids]  # -1 wraps to the last row
    if keys is None:
        keys = token_keys(ids.shape[0], device=ids.device)
    ids = ids.to(torch.int32)  # promotion: int32 throughout halves the traffic
    replica = (keys.to(torch.int32)[:, None] + ids).remainder(table.count[ids])
    return table.slots[ids, replica]


def count_picks(ids: Tensor, num_experts: int) -> Tensor:
    """ids [T, K], experts or slots, -1 for masked -> [E] int64: picks of each. On a CPU longer than
    E where an id lies beyond, and RuntimeError where one lies below -1; a device stops at either by
    itself, and is not asked (bincount would wait to hear how long its result is)."""
    if ids.device.type != "cpu":
        flat = ids.reshape(-1).to(torch.int64) + 1
        counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
        return counts.scatter_add_(0, flat, torch.ones_like(flat))[1:]
    return torch.bincount(ids.reshape(-1) + 1, minlength=num_experts + 1)[1:]
