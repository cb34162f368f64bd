"""The planner's options as the job is set: what an operator's wish starts from.

Knows settings. Knows nothing of the planner itself, so that the front end can read it too.
"""

from __future__ import annotations

from typing import Any

from ep.presets import PRESETS
from moeserve.config import ServeConfig


def planner_options(config: ServeConfig) -> dict[str, Any]:
    """Those of `ep.planner.PlanOptions` that are settings; a named layout has a group policy."""
    section = config.rebalance
    policy: str = section.group_policy
    layout = PRESETS.get(config.parallel.layout or "")
    if layout is not None and "group_policy" not in section.model_fields_set:
        policy = layout.group_policy
    return {
        "robust": section.robust,
        "group_policy": policy,
        "max_moved_slots": section.max_moved_slots,
    }
