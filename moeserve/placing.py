"""The placement that a job starts with: a given one, or one made from settings and the model.

Knows: settings, counts of experts, named layouts. Every problem is collected, none raised. Knows
nothing of weights or of measured loads.

Shape letters: L layers, E routed experts, n pieces of the shared expert, P slots, K top-k.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ep.group import EPGroup
from ep.host_shared import place_with_shared
from ep.placement import ExpertPlacement
from ep.planner import plan
from ep.planning.plan_loads import PlanError
from ep.presets import PRESETS, Layout
from models.deepseek.config import DeepSeekConfig
from moeserve.config import ServeConfig
from moeserve.model_fit import given_placement, logical_experts, model_problems


def first_placement(
    config: ServeConfig,
    model: DeepSeekConfig,
    group: EPGroup,
    with_mtp: bool,
    problems: list[str],
) -> ExpertPlacement | None:
    """None, and at least one problem more, if there cannot be one."""
    found = model_problems(config, model)
    if found:
        problems += found
        return None
    experts = logical_experts(config, model)
    layers, ranks = model.num_placement_layers(with_mtp), config.parallel.ep
    if config.parallel.placement is not None:
        return given_placement(config, model, layers, group.size, problems)
    redundant = config.parallel.redundant_experts
    most = max(1, ranks - 1) * experts
    if redundant > most:
        problems.append(
            f"parallel.redundant_experts={redundant}: at most {most}, which gives "
            + (f"each of {ranks} ranks every" if ranks > 1 else "a copy of every")
            + f" one of the {experts} experts of a layer; nearest valid: {most}"
        )
        return None
    preset = PRESETS.get(config.parallel.layout or "")
    if preset is not None:
        return _planned(preset, model, layers, experts, problems)
    if experts == model.n_routed_experts:
        return ExpertPlacement.trivial(layers, experts, ranks, redundant)
    return place_with_shared(
        layers,
        model.n_routed_experts,
        model.n_shared_experts,
        model.num_experts_per_tok,
        ranks,
        redundant,
    )


def _planned(
    preset: Layout, model: DeepSeekConfig, layers: int, experts: int, problems: list[str]
) -> ExpertPlacement | None:
    """By the planner, as if routing were uniform: by nodes and groups as the layout says."""
    routed = model.n_routed_experts
    loads = np.full((layers, experts), model.num_experts_per_tok / routed)
    loads[:, routed:] = 1.0  # every token
    try:
        return plan(
            loads,
            num_gpus=preset.num_gpus,
            num_slots_per_gpu=preset.slots_per_gpu,
            num_nodes=preset.num_nodes,
            num_groups=model.n_group,
            options=replace(preset.options(), num_ungrouped=experts - routed),
        ).placement
    except PlanError as error:
        problems.append(f"parallel.layout={preset.name!r}: {error}")
        return None


def describe(placement: ExpertPlacement, model: DeepSeekConfig) -> dict[str, object]:
    """What a rank says of its placement. shared_expert: replicated, hosted, or none where the model
    has none; shared_replicas: slots a layer for each of its pieces (all ranks compute it where it
    is replicated), in the layer that has the fewest."""
    routed, shared = model.n_routed_experts, placement.num_logical_experts - model.n_routed_experts
    replicas = placement.replica_count[:, routed:].min(axis=0).tolist()
    where = "none" if not model.n_shared_experts else "hosted" if shared else "replicated"
    return {
        "generation": placement.generation,
        "num_logical_experts": placement.num_logical_experts,
        "num_routed_experts": routed,
        "num_physical_experts": placement.num_physical_experts,
        "num_local_experts": placement.num_local_experts,
        "num_redundant_experts": placement.num_redundant_experts,
        "num_empty_slots": placement.num_empty_slots,
        "num_layers": placement.num_layers,
        "shared_expert": where,
        "shared_replicas": replicas,
    }
