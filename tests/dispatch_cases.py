"""What the dispatchers' tests share: a small configuration, and the work that they must carry."""

from __future__ import annotations

import torch

from dispatch.base import DispatchConfig
from dispatch.selfcheck import CheckCase, make_case, random_placement
from ep.placement import ExpertPlacement


def config_for(
    placement: ExpertPlacement, dtype: torch.dtype = torch.bfloat16, hidden: int = 6, top_k: int = 3
) -> DispatchConfig:
    return DispatchConfig(hidden, top_k, placement.num_physical_experts, 64, dtype, True)


def cases_of(num_ranks: int, dtype: torch.dtype) -> list[tuple[DispatchConfig, CheckCase]]:
    """Random work, and the corners: idle ranks, no work at all, everything to one rank."""
    experts = 8
    cases = []
    for seed in range(3):
        placement = random_placement(experts, num_ranks, (num_ranks + 1) * seed, seed)
        config = config_for(placement, dtype, hidden=5 + seed)
        some = [(7 * rank + 3 * seed) % 6 for rank in range(num_ranks)]
        one_busy = [0] * num_ranks
        one_busy[seed % num_ranks] = 9
        for tokens, options in (
            (some, {}),
            (some, {"masked": 0.4}),
            (one_busy, {}),
            ([0] * num_ranks, {}),
            (some, {"to_rank": seed % num_ranks}),
            ([4] * num_ranks, {"masked": 1.1}),
        ):
            cases.append((config, make_case(config, placement, tokens, seed, **options)))
    return cases
