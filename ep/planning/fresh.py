"""Tables made without regard to a previous placement, under a named policy and group policy.

Knows: which group policy a layer gets and at what price. Knows nothing of: previous placements,
budgets of single layers (`ep.planning.budget`).

Shape letters: L layers, E experts, G GPUs, k slots a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ep.planning.balance import table_balance
from ep.planning.duplicates import empty_wasted, is_duplicate
from ep.planning.plan_loads import PlanError
from ep.planning.policy import contiguous_table, eplb_can_group, eplb_table, our_table, policy_bound
from ep.planning.prices import Prices, nodes_reached
from ep.planning.replicate import FloatArray, IntArray, in_order_sum
from ep.planning.shapes import BoolArray, Shape


@dataclass(frozen=True, eq=False)
class Fresh:
    """table [L, G, k]; slots [L]: how many of a GPU's k the layer may use. bound, balance, floor
    [L]: multiples of the mean; floor is the EPLB-equivalent's, infinite where there is none."""

    table: IntArray
    slots: IntArray
    balance: FloatArray
    bound: FloatArray
    floor: FloatArray
    grouped: BoolArray
    prices: dict[str, float] | None = None
    notes: tuple[str, ...] = ()


def fresh_tables(
    loads: FloatArray,
    shape: Shape,
    policy: str,
    group_policy: str,
    prices: Prices,
    slots_per_gpu: int | None = None,
) -> Fresh:
    """slots_per_gpu None: the shape's own."""
    slots = shape.slots_per_gpu if slots_per_gpu is None else slots_per_gpu
    if group_policy != "priced" or policy == "contiguous":
        return _one_policy(loads, shape, policy, group_policy == "node", slots)
    free = _one_policy(loads, shape, policy, False, slots)
    if not shape.groups_fit_nodes or shape.num_nodes == 1:
        reason = (
            "one node"
            if shape.num_nodes == 1
            else f"{shape.num_groups} groups do not divide over {shape.num_nodes} nodes"
        )
        return _noted(free, f"group policy priced: free, because there is {reason}")
    try:
        node = _one_policy(loads, shape, policy, True, slots)
    except PlanError as error:
        return _noted(free, f"group policy priced: free, because {error}")
    return _cheaper(free, node, shape, prices)


def _one_policy(loads: FloatArray, shape: Shape, policy: str, grouped: bool, slots: int) -> Fresh:
    layers = len(loads)
    floor = np.full(layers, np.inf)
    notes: tuple[str, ...] = ()
    if policy == "contiguous":
        table, grouped = contiguous_table(shape, layers, slots), False
    elif policy == "eplb":
        if grouped and not eplb_can_group(shape):
            raise PlanError(
                "group_policy='node' with policy='eplb': EPLB keeps groups on nodes only where "
                "groups divide by nodes, all GPUs live and every expert has a group; valid is "
                "'free', or policy 'ours'"
            )
        table = eplb_table(loads, shape, slots, grouped)
    else:
        table, kept, floor = our_table(loads, shape, slots, grouped)
        table = empty_wasted(table)
        kept = kept[is_duplicate(table[kept]).any(axis=(1, 2))]
        if len(kept):
            notes = (
                f"layers {kept.tolist()} keep several copies of an expert on a GPU: no table "
                "without was found as even as the EPLB-equivalent",
            )
    return Fresh(
        table=table,
        slots=np.full(layers, slots),
        balance=table_balance(loads, table, shape.live),
        bound=policy_bound(loads, shape, slots, grouped),
        floor=floor,
        grouped=np.full(layers, grouped),
        notes=notes,
    )


def _cheaper(free: Fresh, node: Fresh, shape: Shape, prices: Prices) -> Fresh:
    """Layer by layer the group policy whose tokens cost less; free where they cost the same."""
    nodes = shape.num_nodes
    reached = {
        grouped: nodes_reached(prices, shape.num_groups, nodes, grouped)
        for grouped in (False, True)
    }
    layers = len(free.balance)
    cost = {
        grouped: np.array([prices.token_us(float(b), reached[grouped], nodes) for b in balance])
        for grouped, balance in ((False, free.balance), (True, node.balance))
    }
    grouped = cost[True] < cost[False]

    summary = {}
    for name, which, made in (("free", False, free), ("grouped", True, node)):
        summary[f"{name}_us"] = float(in_order_sum(cost[which])) / layers
        summary[f"{name}_nodes"] = reached[which]
        summary[f"{name}_balance"] = float(in_order_sum(made.balance)) / layers
    return Fresh(
        table=np.where(grouped[:, None, None], node.table, free.table),
        slots=free.slots,
        balance=np.where(grouped, node.balance, free.balance),
        bound=np.where(grouped, node.bound, free.bound),
        floor=np.where(grouped, node.floor, free.floor),
        grouped=grouped,
        prices=summary,
        notes=(*free.notes, *node.notes),
    )


def _noted(fresh: Fresh, note: str) -> Fresh:
    return Fresh(**{**fresh.__dict__, "notes": (*fresh.notes, note)})
