"""Rebalancing put together at the start: what cannot work is said before weights are read; then
ranks compare their bundles, open their sockets and tell each other where.

Knows settings, the model's slots, how ranks agree at the start. Knows nothing of steps.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from ep.bundle import Bundle
from ep.group import EPGroup, gather_objects
from ep.placement import ExpertPlacement
from ep.planner import PlanOptions, plan
from ep.planning.plan_loads import PlanError
from ep.rebalance import RebalancePolicy
from ep.transfer import Transfer
from moeserve.config import ServeConfig
from moeserve.errors import ConfigError
from moeserve.lockstep import agree_on_problems
from moeserve.rebalancing.plan import IntArray, PlanMaker, Planner
from moeserve.rebalancing.rebalancer import Movable, RebalanceOptions, Rebalancer
from moeserve.rebalancing.settings import planner_options
from moeserve.recorder import StepRecorder

SILENCE = 0.5  # of the deadline: how long a source may take to answer


class MovableModel(Movable, Protocol):
    def bundle_layouts(self) -> list[str]: ...


def rebalance_problems(
    config: ServeConfig, group: EPGroup, placement: ExpertPlacement, num_groups: int, routed: int
) -> list[str]:
    """What is wrong with the [rebalance] settings for this job, without weights. num_groups: groups
    of experts of the model's router; routed: experts of a layer without the shared one's pieces."""
    section = config.rebalance
    if group.size == 1:
        if section.enabled:
            return ["rebalance.enabled=True: one rank has nobody to move experts to; valid: false"]
        return []
    loads = np.ones((1, placement.num_layers, placement.num_logical_experts), np.int64)
    try:
        our_planner(group, num_groups, routed)(loads, placement, planner_options(config))
    except PlanError as error:
        return [f"rebalance.{error}"]
    return []


def our_planner(group: EPGroup, num_groups: int, routed: int) -> Planner:
    """`ep.planner.plan` for this job's shape. Raises PlanError, also for options it has not."""

    def make(
        loads: IntArray, placement: ExpertPlacement, options: Mapping[str, Any]
    ) -> tuple[ExpertPlacement, dict[str, Any]]:
        try:
            chosen = PlanOptions(**options)
        except TypeError:
            known = ", ".join(PlanOptions.__dataclass_fields__)
            unknown = sorted(options.keys() - PlanOptions.__dataclass_fields__.keys())
            raise PlanError(f"options={unknown}: unknown; known: {known}") from None
        if chosen.extra_slots_per_gpu:
            raise PlanError("extra_slots_per_gpu: slots cannot be added while serving; valid: 0")
        chosen = replace(chosen, num_ungrouped=placement.num_logical_experts - routed)
        made = plan(
            loads,
            num_gpus=placement.num_ranks,
            num_slots=placement.num_physical_experts,
            num_nodes=group.num_nodes,
            num_groups=num_groups,
            previous=placement,
            options=chosen,
        )
        return made.placement, made.explanation.to_dict()

    return make


def open_rebalancer(
    config: ServeConfig,
    group: EPGroup,
    model: MovableModel,
    placement: ExpertPlacement,
    recorder: StepRecorder,
    planner: Planner,
    say: Callable[[str], None],
    notes: list[str],
) -> Rebalancer | None:
    """Collective, in a group of more than one rank. None, and a note, where experts cannot move;
    ConfigError on all ranks alike if they were to move by themselves."""
    slots = model.expert_weights()
    sizes = _bundle_bytes(model)
    problem = _differing(
        gather_objects(group, list(zip(model.bundle_layouts(), sizes, strict=True)))
    )
    if problem:
        if config.rebalance.enabled:
            raise ConfigError([f"rebalance.enabled=True: {problem}"])
        notes.append(f"rebalancing: off, also for operators: {problem}")
        return None

    def read(layer: int, slot: int) -> Bundle:
        bundle: Bundle = slots[layer].bundle(slot)
        return bundle

    secret = gather_objects(group, secrets.token_bytes(32) if group.rank == 0 else None)[0]
    transfer: Transfer | None = None
    problems: list[str] = []
    try:
        transfer = Transfer(group.rank, group.host, secret, read)
    except OSError as error:  # zmq's errors too
        problems.append(f"rebalance: no socket can be bound on {group.host}: {error}")
    agree_on_problems(group, problems)
    assert transfer is not None
    transfer.connect(gather_objects(group, transfer.address))
    section = config.rebalance
    maker = PlanMaker(
        planner,
        RebalancePolicy(section.threshold, section.min_gain, section.min_picks),
        sizes,
        section.max_staging_bytes or max(sizes) * placement.num_local_experts,
        group.ranks_per_node,
        section.max_rate,
        planner_options(config),
    )
    options = RebalanceOptions(
        interval_steps=section.interval_steps if section.enabled else 0,
        windows=section.windows,
        deadline=section.deadline,
        silence=SILENCE * section.deadline,
        rate=section.max_rate,
    )

    def window() -> IntArray:
        assert recorder.window is not None
        return recorder.window.totals()

    return Rebalancer(group, model, placement, window, transfer, maker, options, say)


def staging_bytes(
    config: ServeConfig, group: EPGroup, model: MovableModel, placement: ExpertPlacement
) -> int:
    """The most spare bytes that moving experts, by itself or as operators ask, takes on a rank."""
    if group.size == 1:
        return 0
    layers = [size * placement.num_local_experts for size in _bundle_bytes(model)]
    return min(config.rebalance.max_staging_bytes or max(layers), sum(layers))


def staging_foreseen(
    config: ServeConfig, group: EPGroup, placement: ExpertPlacement, experts: int
) -> int:
    """`staging_bytes` before there are weights. experts: bytes that this rank will hold of them."""
    if group.size == 1:
        return 0
    a_layer = -(-experts // placement.num_layers)
    return min(config.rebalance.max_staging_bytes or a_layer, experts)


def _bundle_bytes(model: MovableModel) -> list[int]:
    """Of an expert, by placement row."""
    return [int(x.bundle(0).nbytes) if x.num_slots else 0 for x in model.expert_weights()]


def _differing(everyone: list[list[tuple[str, int]]]) -> str:
    """Which ranks hold experts in another form than rank 0 does; empty if none."""
    for rank, theirs in enumerate(everyone):
        for row, (here, there) in enumerate(zip(everyone[0], theirs, strict=True)):
            if here != there:
                return (
                    f"experts lie in memory in different forms (layer {row}: {here[0]}, {here[1]} "
                    f"bytes on rank 0; {there[0]}, {there[1]} bytes on rank {rank}), so that they "
                    "cannot move between ranks; the same kernels and weights on all ranks would do"
                )
    return ""
