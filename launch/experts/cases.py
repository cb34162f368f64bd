"""From flags about GPUs, copies, nodes and groups to the layouts that are asked about.

Knows what follows from the source where a flag was not given. Knows nothing of plans or tables.

Shape letters: S steps, L layers, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ep.presets import PRESETS, Layout
from launch.experts.units import parse_numbers
from launch.experts.view import View
from moeserve.errors import ConfigError

SHARED = ("replicated", "hosted")
GROUP_POLICIES = ("free", "node", "priced")


@dataclass(frozen=True)
class Wanted:
    """The flags as typed; None where not given. gpus, redundant: several, such as 32,72."""

    gpus: str | None = None
    redundant: str | None = None
    slots_per_gpu: int | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    groups: int | None = None
    group_policy: str | None = None
    shared: str | None = None
    layout: str | None = None
    top_k: int | None = None

    @property
    def shaping(self) -> list[str]:
        """Flags that were given and that a published layout sets itself."""
        given = {
            "gpus": self.gpus,
            "redundant": self.redundant,
            "slots-per-gpu": self.slots_per_gpu,
            "nodes": self.nodes,
            "gpus-per-node": self.gpus_per_node,
            "groups": self.groups,
            "group-policy": self.group_policy,
            "shared-expert": self.shared,
        }
        return [name for name, value in given.items() if value is not None]

    def cases(self, view: View) -> list[Layout]:
        """ConfigError for all that is wrong with the flags."""
        problems = self._problems()
        if problems:
            raise ConfigError(problems)
        if self.layout is not None:
            return [self._named(PRESETS[self.layout])]
        return [
            self._case(view, gpus, redundant)
            for gpus in self._gpus(view)
            for redundant in self._redundant()
        ]

    def _problems(self) -> list[str]:
        problems = []
        for flag, value, valid in (
            ("group-policy", self.group_policy, GROUP_POLICIES),
            ("shared-expert", self.shared, SHARED),
            ("layout", self.layout, tuple(PRESETS)),
        ):
            if value is not None and value not in valid:
                problems.append(f"--{flag} {value!r}: valid are {', '.join(valid)}")
        if self.layout is not None:
            for flag, given in (
                ("gpus", self.gpus),
                ("redundant", self.redundant),
                ("slots-per-gpu", self.slots_per_gpu),
                ("shared-expert", self.shared),
            ):
                if given is not None:
                    problems.append(f"--{flag} {given}: --layout sets it; give one of them")
        if self.redundant is not None and self.slots_per_gpu is not None:
            problems.append("--redundant and --slots-per-gpu: give one of them, not both")
        if self.nodes is not None and self.gpus_per_node is not None:
            problems.append("--nodes and --gpus-per-node: give one of them, not both")
        return problems

    def _named(self, layout: Layout) -> Layout:
        return replace(
            layout,
            group_policy=self.group_policy or layout.group_policy,
            num_groups=self.groups or layout.num_groups,
            gpus_per_node=self._per_node(layout.num_gpus, layout.gpus_per_node),
        )

    def _gpus(self, view: View) -> list[int]:
        if self.gpus is not None:
            return parse_numbers("--gpus", self.gpus, 1)
        if view.placement is None:
            raise ConfigError(
                [f"--gpus: {view.name} does not say where experts live; give a number of GPUs"]
            )
        return [view.placement.num_ranks]

    def _redundant(self) -> list[int | None]:
        if self.redundant is None:
            return [None]
        return [*parse_numbers("--redundant", self.redundant)]

    def _case(self, view: View, gpus: int, redundant: int | None) -> Layout:
        shared = self.shared or ("hosted" if view.num_experts > view.num_routed else "replicated")
        experts = view.num_routed + (pieces(view) if shared == "hosted" else 0)
        if self.slots_per_gpu is not None:
            slots = self.slots_per_gpu
        elif redundant is not None:
            slots, rest = divmod(experts + redundant, gpus)
            if rest or not slots:
                near = [n * gpus - experts for n in (slots, slots + 1) if n * gpus >= experts]
                raise ConfigError(
                    [
                        f"--redundant {redundant}: {experts} experts and {redundant} copies do not "
                        f"divide by {gpus} GPUs; nearest valid: {' or '.join(map(str, near))}"
                    ]
                )
        else:
            copies = view.placement.num_redundant_experts if view.placement is not None else 0
            slots = -(-(experts + copies) // gpus)
        name = f"{gpus} GPUs x {slots}" + (", shared hosted" if shared == "hosted" else "")
        return Layout(
            name=name,
            num_gpus=gpus,
            slots_per_gpu=slots,
            shared="hosted" if shared == "hosted" else "replicated",
            group_policy=self.group_policy or "free",
            routed_experts=view.num_routed,
            num_groups=self.groups or view.num_groups,
            gpus_per_node=self._per_node(gpus, view.ranks_per_node),
        )

    def _per_node(self, gpus: int, default: int) -> int:
        if self.nodes is not None:
            if gpus % self.nodes:
                raise ConfigError([f"--nodes {self.nodes}: {gpus} GPUs do not divide by it"])
            return gpus // self.nodes
        if self.gpus_per_node is not None:
            if gpus % self.gpus_per_node:
                raise ConfigError(
                    [f"--gpus-per-node {self.gpus_per_node}: {gpus} GPUs do not divide by it"]
                )
            return self.gpus_per_node
        return default if default > 1 and gpus % default == 0 else gpus

    def fitted(self, view: View, layout: Layout) -> View:
        """The view with as many experts as the layout has: the shared expert's load is added, or
        taken out. Its placement is forgotten where the number of experts changes."""
        if view.num_routed != layout.routed_experts:
            raise ConfigError(
                [
                    f"--layout {layout.name}: made for {layout.routed_experts} routed experts; "
                    f"{view.name} has {view.num_routed}"
                ]
            )
        hosted = view.num_experts > view.num_routed
        assert view.history is not None
        if hosted == (layout.shared == "hosted"):
            return view
        if not hosted:
            return view.with_shared(1, self.top_k)
        history = view.history[:, :, : view.num_routed]
        return replace(view, history=history, num_experts=history.shape[2], placement=None)


def pieces(view: View) -> int:
    """Of the shared expert, where it is hosted."""
    return max(view.num_experts - view.num_routed, 1)
