"""plan: from loads to an ExpertPlacement and the reasons for it. A pure function.

Knows: how fresh tables, budgets, prices and a previous placement come together. The five-argument
form that the field knows is `rebalance_experts`. Knows nothing of: weights, ranks at work, when to
plan (`ep.rebalance`).

Shape letters: S steps, L layers, E experts, G GPUs, k slots a GPU, N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from ep.placement import ExpertPlacement
from ep.planning.balance import table_balance
from ep.planning.budget import spend
from ep.planning.duplicates import is_duplicate
from ep.planning.explain import PlanExplanation
from ep.planning.fresh import fresh_tables
from ep.planning.plan_loads import PlanError, as_loads, check_robust, join_steps
from ep.planning.policy import POLICIES, our_table
from ep.planning.prices import Prices
from ep.planning.relabel import hosts, keep_places, moved_slots
from ep.planning.replicate import FloatArray, IntArray
from ep.planning.settle import settle
from ep.planning.shapes import (
    Shape,
    check_choice,
    check_count,
    check_number,
    check_shape,
    check_type,
)
from ep.planning.spread import spread

GROUP_POLICIES = ("free", "node", "priced")


@dataclass(frozen=True)
class PlanOptions:
    """What a plan is to mind. Everything is checked when made; PlanError.

    policy: "ours", or for comparison "eplb", "contiguous". group_policy: "node" keeps each group of
    experts on one node, "free" ignores groups, "priced" takes per layer what costs less (`prices`).
    robust: how loads of several steps join: "mean", "max", "mean+<z>*std".
    extra_slots_per_gpu: slots a GPU beyond the others', over all layers, spent on the layers where
    they help most. expert_bytes: of one expert, to say what they cost.
    max_moved_slots: over all layers, against previous; None for no cap. slack: how far above its
    bound (or the best found, if that is further) a layer's balance may stay so that less of
    previous moves; a layer that previous leaves far off is held to three tenths of it.
    num_ungrouped: the last experts that belong to no group, such as a hosted shared expert.
    """

    policy: str = "ours"
    group_policy: str = "free"
    robust: str = "mean"
    extra_slots_per_gpu: int = 0
    expert_bytes: int | None = None
    max_moved_slots: int | None = None
    slack: float = 0.015
    num_ungrouped: int = 0
    prices: Prices = field(default_factory=Prices)

    def __post_init__(self) -> None:
        check_choice("policy", self.policy, POLICIES)
        check_choice("group_policy", self.group_policy, GROUP_POLICIES)
        check_robust(self.robust)
        check_count("extra_slots_per_gpu", self.extra_slots_per_gpu, 0)
        check_count("num_ungrouped", self.num_ungrouped, 0)
        for name, least in (("max_moved_slots", 0), ("expert_bytes", 1)):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), least)
        check_number("slack", self.slack, 0)
        check_type("prices", self.prices, Prices)
        if self.policy != "ours" and (self.extra_slots_per_gpu or self.max_moved_slots is not None):
            raise PlanError(
                f"policy={self.policy!r}: knows neither extra_slots_per_gpu nor max_moved_slots; "
                "valid with them is 'ours'"
            )


@dataclass(frozen=True)
class Plan:
    placement: ExpertPlacement
    explanation: PlanExplanation


def plan(
    loads: Any,
    *,
    num_gpus: int,
    num_slots: int | None = None,
    num_slots_per_gpu: int | None = None,
    num_nodes: int = 1,
    num_groups: int = 1,
    previous: ExpertPlacement | None = None,
    live_gpus: ArrayLike | None = None,
    options: PlanOptions | None = None,
) -> Plan:
    """loads [L, E], or [S, L, E] per step: tokens (or any measure) of each logical expert.

    Give num_slots (of all GPUs) or num_slots_per_gpu. live_gpus [G] booleans: dead GPUs get empty
    slots only. The placement's generation is the previous one's + 1. The same arguments give the
    same plan on every machine. PlanError names what is wrong and the nearest valid values.
    """
    options = PlanOptions() if options is None else options
    check_type("options", options, PlanOptions)
    if previous is not None:
        check_type("previous", previous, ExpertPlacement)
    steps = as_loads(loads)
    joined = join_steps(steps, options.robust)
    shape = check_shape(
        joined.shape[1],
        num_gpus,
        num_slots=num_slots,
        num_slots_per_gpu=num_slots_per_gpu,
        num_nodes=num_nodes,
        num_groups=num_groups,
        live_gpus=live_gpus,
        num_ungrouped=options.num_ungrouped,
    )
    capped = options.max_moved_slots is not None
    old = None if previous is None else _previous_table(previous, joined)
    fresh = fresh_tables(joined, shape, options.policy, options.group_policy, options.prices)
    if options.extra_slots_per_gpu:
        fresh = spend(
            joined,
            shape,
            fresh,
            options.extra_slots_per_gpu,
            options.group_policy,
            options.prices,
            kept=None if old is None or not capped else _extra_in_use(old, shape),
        )
    table, grouped = fresh.table, fresh.grouped
    if old is None and options.policy == "ours":
        table = spread(joined, table, shape, grouped)
    if old is not None and options.policy == "ours":
        table, grouped = settle(
            joined,
            shape,
            fresh,
            old,
            options.max_moved_slots,
            options.slack,
            may_stay_free=capped and options.group_policy == "priced",
        )
    moved = before = None
    if old is not None:
        hosted = hosts(old, shape.num_gpus, shape.num_experts)
        table = keep_places(table, old)
        moved = moved_slots(table, hosted)
        before = _balance_of_previous(joined, shape, old)
    generation = 0 if previous is None else previous.generation + 1
    flat = table.reshape(len(table), -1)
    placement = ExpertPlacement(flat, shape.num_experts, shape.num_gpus, generation)
    after = table_balance(joined, table, shape.live)
    notes = list(fresh.notes)
    if options.max_moved_slots is not None and moved is not None:
        total = int(moved.sum())
        if total > options.max_moved_slots:
            notes.append(
                f"moved {total} slots, over the cap of {options.max_moved_slots}: what had to be "
                "placed were experts without a live host, and layers whose number of slots or "
                "group policy changed"
            )
    extra = int((fresh.slots - shape.slots_per_gpu).sum())
    explanation = PlanExplanation(
        policy=options.policy,
        group_policy=options.group_policy,
        robust=options.robust,
        num_gpus=shape.num_gpus,
        num_live_gpus=shape.num_live,
        num_nodes=shape.num_nodes,
        num_experts=shape.num_experts,
        generation=generation,
        grouped=grouped,
        before=before,
        after=after,
        # A layer that was not grouped after all has another bound, which its balance shows.
        bound=np.where(grouped == fresh.grouped, fresh.bound, np.minimum(fresh.bound, after)),
        slots_per_gpu=fresh.slots,
        moved=moved,
        duplicates=is_duplicate(table).sum(axis=(1, 2)),
        extra_slots_per_gpu=extra,
        extra_bytes_per_gpu=None if options.expert_bytes is None else extra * options.expert_bytes,
        prices=fresh.prices,
        notes=tuple(notes),
    )
    return Plan(placement, explanation)


def rebalance_experts(
    weight: Any, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The form that EPLB's callers know, with our placement in it.

    weight [L, E] -> phy2log [L, R], log2phy [L, E, X] (slots of each expert, ascending, padded with
    -1; X the most copies in any layer), logcnt [L, E]; int64 on the CPU. R = num_replicas slots,
    GPU g owns R / num_gpus of them from g * R / num_gpus on; none is empty. Groups stay on nodes
    exactly if num_groups % num_nodes == 0; else groups are ignored, also that experts divide into
    them. PlanError for what cannot be.
    """
    loads = join_steps(as_loads(weight), "mean")
    shape = check_shape(
        loads.shape[1],
        num_gpus,
        num_slots=num_replicas,
        num_nodes=num_nodes,
        num_groups=num_groups,
        unfit_groups_are_ignored=True,
    )
    table, _, _ = our_table(loads, shape, shape.slots_per_gpu, shape.groups_fit_nodes)
    table = _filled(table, shape, shape.groups_fit_nodes)
    placement = ExpertPlacement(table.reshape(len(loads), -1), loads.shape[1], num_gpus)
    return (
        torch.from_numpy(placement.physical_to_logical.copy()),
        torch.from_numpy(placement.logical_to_physical.copy()),
        torch.from_numpy(placement.replica_count.copy()),
    )


def _filled(table: IntArray, shape: Shape, grouped: bool) -> IntArray:
    """Where GPUs have more slots than experts to host, each repeats what it hosts, in order."""
    experts = shape.num_experts // (shape.num_nodes if grouped else 1)
    if shape.slots_per_gpu > experts:
        order = np.sort(table[:, :, :experts], axis=2)
        table = order[:, :, np.arange(shape.slots_per_gpu) % experts]
    return table


def _previous_table(previous: ExpertPlacement, loads: FloatArray) -> IntArray:
    """[L, G', k']."""
    if (previous.num_layers, previous.num_logical_experts) != loads.shape:
        raise PlanError(
            f"previous: {previous.num_layers} layers of {previous.num_logical_experts} experts; "
            f"the loads have {loads.shape[0]} of {loads.shape[1]}"
        )
    table = previous.physical_to_logical
    return table.reshape(len(table), previous.num_ranks, -1)


def _extra_in_use(old: IntArray, shape: Shape) -> IntArray:
    """[L]: slots of a GPU beyond the shape's that some GPU has in use."""
    used: IntArray = np.max((old >= 0).sum(axis=2), axis=1) - shape.slots_per_gpu
    return np.maximum(used, 0)


def _balance_of_previous(loads: FloatArray, shape: Shape, old: IntArray) -> FloatArray | None:
    """[L]; None if the live GPUs do not host every expert."""
    if old.shape[1] != shape.num_gpus:
        return table_balance(loads, old)
    alive = np.where(shape.live[:, None], old, -1)
    hosted = hosts(alive, shape.num_gpus, shape.num_experts).any(axis=1)
    return table_balance(loads, alive, shape.live) if hosted.all() else None
