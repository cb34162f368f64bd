"""Settings of where experts live against the model's config: what can be said before any rank
starts.

Knows: counts of experts, named layouts, placement files. Needs no torch; knows nothing of ranks or
weights.
"""

from __future__ import annotations

from ep.placement import ExpertPlacement, PlacementError
from ep.presets import PRESETS
from models.deepseek.config import DeepSeekConfig
from moeserve.config import ServeConfig


def logical_experts(config: ServeConfig, model: DeepSeekConfig) -> int:
    """Of a layer: the routed ones and, in slots, the pieces of the shared one."""
    hosted = config.parallel.shared_expert == "hosted"
    return model.n_routed_experts + (model.n_shared_experts if hosted else 0)


def model_problems(config: ServeConfig, model: DeepSeekConfig) -> list[str]:
    """Why this model cannot be served with these settings; [] if it can."""
    if config.parallel.shared_expert == "hosted" and not model.n_shared_experts:
        return [
            "parallel.shared_expert='hosted': this model has no shared expert; "
            "valid is replicated (leave the setting out)"
        ]
    preset = PRESETS.get(config.parallel.layout or "")
    experts = logical_experts(config, model)
    if preset is None or preset.num_logical_experts == experts:
        return []
    shared = "" if experts == model.n_routed_experts else f" + {model.n_shared_experts} shared"
    return [
        f"parallel.layout={preset.name!r}: made for {preset.num_logical_experts} experts a layer "
        f"({preset.num_slots} slots, {preset.num_redundant} of them for copies); this model has "
        f"{model.n_routed_experts}{shared}: give ep, redundant_experts and shared_expert instead"
    ]


def given_placement(
    config: ServeConfig,
    model: DeepSeekConfig,
    layers: int,
    num_ranks: int,
    problems: list[str],
) -> ExpertPlacement | None:
    """Read the file of `parallel.placement`. None, and a problem more, if it is broken or does not
    fit."""
    given = config.parallel.placement
    assert given is not None
    try:
        placement = ExpertPlacement.load(given)
    except PlacementError as error:
        reason = str(error).removeprefix(f"{given}: ")
        problems.append(f"parallel.placement={given}: {reason}")
        return None
    except OSError as error:
        problems.append(f"parallel.placement={given}: cannot be read: {error.strerror}")
        return None
    fits = True
    for name, has, needs in (
        ("layers", placement.num_layers, layers),
        ("logical experts", placement.num_logical_experts, logical_experts(config, model)),
        ("ranks", placement.num_ranks, num_ranks),
    ):
        if has == needs:
            continue
        hint = _other_mode(config, model, has) if name == "logical experts" else ""
        problems.append(f"parallel.placement={given}: has {has} {name}, needs {needs}{hint}")
        fits = False
    redundant = config.parallel.redundant_experts
    if redundant and redundant != placement.num_redundant_experts:
        problems.append(
            f"parallel.redundant_experts={redundant}: the given placement has "
            f"{placement.num_redundant_experts}; leave the setting out"
        )
    return placement if fits else None


def _other_mode(config: ServeConfig, model: DeepSeekConfig, experts: int) -> str:
    """Which setting of the shared expert would fit this number of logical experts, if one does."""
    shared = experts - model.n_routed_experts
    if not model.n_shared_experts or shared not in (0, model.n_shared_experts):
        return ""
    fitting = "hosted" if shared else "replicated"
    return (
        f" with parallel.shared_expert={config.parallel.shared_expert!r}; it was made for "
        f"shared_expert={fitting!r}"
    )
