"""Settings of where experts live against the model's config: what can be said before any rank
starts.

Knows: counts of experts, named layouts. Needs no torch; knows nothing of ranks or weights.
"""

from __future__ import annotations

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
