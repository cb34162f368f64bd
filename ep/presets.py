"""Named layouts: how many GPUs, how many slots on each, where the shared expert is computed.

Those that DeepSeek has described for a model of 256 routed experts and one shared expert: the V3
report (section 3.4) has the first two, the overview of its inference system the third. Plain data:
who takes a preset checks that its model fits (`num_slots`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayoutPreset:
    """slots_per_gpu: of a layer, for routed experts, copies and, where it is hosted, the shared
    expert. redundant: copies a layer beyond one slot for each logical expert. shared: "replicated"
    (each GPU computes it for its own tokens) or "hosted" (in slots). group_policy: of the planner,
    "node" (copies stay among the nodes of an expert group), "free" or "priced"."""

    name: str
    num_gpus: int
    gpus_per_node: int
    slots_per_gpu: int
    redundant: int
    shared: str
    group_policy: str

    @property
    def num_slots(self) -> int:
        return self.num_gpus * self.slots_per_gpu

    @property
    def num_logical_experts(self) -> int:
        """Of the model that fills it: routed experts and, where it is hosted, the shared one."""
        return self.num_slots - self.redundant


PRESETS = {
    preset.name: preset
    for preset in (
        # 256 GPUs with a routed expert each, 64 with the shared expert and copies.
        LayoutPreset("decode-ep320", 320, 8, 1, 63, "hosted", "free"),
        # 8 experts and a copy a GPU; tokens go to at most 4 nodes.
        LayoutPreset("prefill-ep32", 32, 8, 9, 32, "replicated", "node"),
        # 2 a GPU, on 18 nodes.
        LayoutPreset("decode-ep144", 144, 8, 2, 32, "replicated", "free"),
    )
}
