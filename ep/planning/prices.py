"""What keeping groups on nodes saves between nodes, and what it costs in balance.

Knows: the two formulas and their constants. Knows nothing of: placements.

A token of one layer costs, in microseconds of the busiest GPU and of a GPU's link:

    top_k * pick_us * balance + remote * copy_bytes / (link_gb_s * 1000)
    remote = nodes reached * (N - 1) / N      (the token's own node needs no link)
    nodes reached, grouped   = N * (1 - C(g - g/N, t) / C(g, t))   t of g groups, evenly likely
    nodes reached, scattered = N * (1 - (1 - 1/N) ** top_k)        top_k experts, evenly likely
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ep.planning.plan_loads import PlanError


@dataclass(frozen=True)
class Prices:
    """Of DeepSeek-V3 on H800-like nodes unless told otherwise.

    pick_us: one (token, expert) pair where GPUs are busy with arithmetic: 88 MFLOP at 0.95 PFLOP/s.
    copy_bytes: a token to a node and its sum back: 7168 FP8 + 224 of scales, 7168 BF16. link_gb_s:
    a GPU's share of the network between nodes.
    """

    top_k: int = 8
    groups_per_token: int = 4
    pick_us: float = 0.093
    copy_bytes: int = 7168 + 224 + 2 * 7168
    link_gb_s: float = 50.0

    def __post_init__(self) -> None:
        for name in ("top_k", "groups_per_token", "pick_us", "copy_bytes", "link_gb_s"):
            value = getattr(self, name)
            if name in ("top_k", "groups_per_token") and not isinstance(value, int):
                raise PlanError(f"prices.{name}={value!r}: must be an integer above 0")
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not (value > 0 and math.isfinite(value)):
                raise PlanError(f"prices.{name}={value!r}: must be above 0")

    def token_us(self, balance: float, nodes_reached: float, num_nodes: int) -> float:
        remote = nodes_reached * (num_nodes - 1) / num_nodes
        copies = remote * self.copy_bytes / (self.link_gb_s * 1000)
        return self.top_k * self.pick_us * balance + copies


def nodes_reached(prices: Prices, num_groups: int, num_nodes: int, grouped: bool) -> float:
    """Nodes that compute some expert of a token, on average. Needs groups that divide by nodes if
    grouped."""
    if not grouped:
        return num_nodes * (1 - (1 - 1 / num_nodes) ** prices.top_k)
    each = num_groups // num_nodes
    chosen = min(prices.groups_per_token, num_groups)
    missed = math.comb(num_groups - each, chosen) / math.comb(num_groups, chosen)
    return num_nodes * (1 - missed)
