"""Named expert layouts of published deployments: how many GPUs, slots, what becomes of the shared
expert.

Knows: numbers of layouts (DeepSeek-V3 report 3.4; DeepSeek's inference overview of 2025-02). Knows
nothing of: loads, placements, checkpoints: sizes are checked where a layout meets a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # settings name layouts, and must not wait for torch
    from ep.planner import PlanOptions

SharedHost = Literal["replicated", "hosted"]


@dataclass(frozen=True)
class Layout:
    """One way to lay out the experts of each layer.

    shared: "replicated" runs the shared expert on every GPU beside its slots; "hosted" makes it one
    expert more among the routed, chosen by every token, with copies as its load asks.
    routed_experts: those of the model that it was published for; `num_redundant` follows from it.
    """

    name: str
    num_gpus: int
    slots_per_gpu: int
    shared: SharedHost
    group_policy: str
    routed_experts: int = 256
    num_groups: int = 8
    gpus_per_node: int = 8
    note: str = ""

    @property
    def num_slots(self) -> int:
        return self.num_gpus * self.slots_per_gpu

    @property
    def num_nodes(self) -> int:
        return self.num_gpus // self.gpus_per_node

    @property
    def num_logical_experts(self) -> int:
        return self.routed_experts + (self.shared == "hosted")

    @property
    def num_redundant(self) -> int:
        """Slots beyond one of each logical expert."""
        return self.num_slots - self.num_logical_experts

    def options(self) -> PlanOptions:
        """For `ep.planner.plan`, with loads [.., num_logical_experts], a hosted one last."""
        from ep.planner import PlanOptions

        hosted = int(self.shared == "hosted")
        return PlanOptions(group_policy=self.group_policy, num_ungrouped=hosted)


PRESETS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout(
            name="prefill-ep32",
            num_gpus=32,
            slots_per_gpu=9,
            shared="replicated",
            group_policy="priced",
            note="4 nodes, 8 + 1 experts a GPU, 32 redundant; the shared expert on every GPU",
        ),
        Layout(
            name="decode-ep144",
            num_gpus=144,
            slots_per_gpu=2,
            shared="replicated",
            group_policy="free",
            note="18 nodes, 2 experts a GPU, 32 redundant; the shared expert on every GPU",
        ),
        Layout(
            name="decode-ep320",
            num_gpus=320,
            slots_per_gpu=1,
            shared="hosted",
            group_policy="free",
            note="40 nodes, one expert a GPU; 64 GPUs for the shared expert and redundant ones",
        ),
    )
}


def preset(name: str) -> Layout:
    """The layout of that name. PlanError lists the names there are."""
    from ep.planning.plan_loads import PlanError

    layout = PRESETS.get(name)
    if layout is None:
        known = "; ".join(f"{one.name} ({one.note})" for one in PRESETS.values())
        raise PlanError(f"preset={name!r}: valid are {known}")
    return layout
