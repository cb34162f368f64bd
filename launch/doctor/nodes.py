"""`moeserve doctor --nodes`: every rank of a job under torchrun or srun takes part.

The first rank of each node looks at its machine; then all measure links, clocks and an all-to-all
together. Rank 0 shows. Knows the order; what is measured and compared lies beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from launch.doctor.check import Check, fails, ok, warning
from launch.doctor.compare import NodeReport, compare, joined, names_of
from launch.doctor.links import MOST_RANKS, Link, SlowLink, matrix, slow_links, suspect
from launch.doctor.screen import as_json, show_checks, show_matrix, slow_text
from moeserve.terminal import counted

if TYPE_CHECKING:
    import torch

    from ep.group import EPGroup
    from launch.doctor.measure import AllToAll

SECTION = "links"
MOST_NAMED = 8


@dataclass(frozen=True)
class JobReport:
    """The same on every rank. per_node: ranks of a node. over: by what tensors travelled."""

    nodes: list[NodeReport]
    links: list[Link]
    all_to_all: AllToAll
    size: int
    per_node: int
    over: str

    @property
    def rank_names(self) -> list[str]:
        """Of the ranks, by node where there are several."""
        names = [node.name for node in self.nodes]
        if len(names) == 1:
            return [f"rank {r}" for r in range(self.size)]
        if self.per_node == 1:
            return names
        return [f"{names[r // self.per_node]}/{r % self.per_node}" for r in range(self.size)]

    @property
    def slow(self) -> list[SlowLink]:
        return slow_links(self.links, self.per_node)

    @property
    def checks(self) -> list[Check]:
        """Of the nodes, of what they have in common, of what was measured."""
        found = joined(self.nodes) if len(self.nodes) > 1 else list(self.nodes[0].checks)
        if len(self.nodes) > 1:
            found += compare(self.nodes)
        return [*found, *self.link_checks()]

    def link_checks(self) -> list[Check]:
        moved = self.all_to_all
        text = f"{moved.rows} rows, {moved.bytes / 1e6:.2f} MB in {moved.seconds * 1e3:.2f} ms"
        found = []
        if moved.wrong:
            ranks = ", ".join(self.rank_names[r] for r in moved.wrong[:MOST_NAMED])
            found.append(
                fails(
                    SECTION,
                    "all-to-all",
                    text,
                    f"{ranks} received what nobody had sent: nothing that is computed is right",
                    "update NCCL and drivers; try NCCL_P2P_DISABLE=1, NCCL_IB_DISABLE=1 one by one",
                )
            )
        else:
            found.append(ok(SECTION, "all-to-all", text, "uneven, every row as it was sent"))
        slow = self.slow
        if not slow:
            told = f"{len(self.links)} pairs over {self.over}"
            return [*found, ok(SECTION, "pairs", told, "none under half of the median")]
        named = "; ".join(slow_text(x, self.rank_names) for x in slow[:MOST_NAMED])
        more = f"; and {len(slow) - MOST_NAMED} more" if len(slow) > MOST_NAMED else ""
        node = suspect(slow, self.per_node)
        who = "of the nodes that are named" if node is None else f"of node {self.nodes[node].name}"
        found.append(
            warning(
                SECTION,
                "pairs",
                f"{len(slow)} slow of {len(self.links)} pairs over {self.over}",
                f"{named}{more}",
                "an all-to-all goes at the pace of the slowest pair: look at cables, switch ports "
                f"and PCIe {who}",
            )
        )
        return found

    def as_json(self) -> dict[str, Any]:
        moved = self.all_to_all
        return as_json(
            self.checks,
            ranks=self.size,
            ranks_per_node=self.per_node,
            over=self.over,
            nodes=[node.as_json() for node in self.nodes],
            names=self.rank_names,
            links=[link.as_json() for link in self.links],
            slow=[link.as_json() for link in self.slow],
            all_to_all={
                "rows": moved.rows,
                "bytes": moved.bytes,
                "seconds": moved.seconds,
                "correct": not moved.wrong,
                "wrong_ranks": list(moved.wrong),
            },
        )

    def show(self) -> None:
        nodes = counted(len(self.nodes), "node")
        title = f"{self.size} ranks on {nodes}, over {self.over}"
        every, names = 1, self.rank_names
        if self.size > MOST_RANKS:  # then the first ranks of the nodes stand for them
            every, names = self.per_node, [node.name for node in self.nodes]
        for what, unit, of in (("latency", 1e-6, "us, less is better"), ("rate", 1e6, "MB/s")):
            cells = matrix(self.links, what, self.size, every)
            show_matrix(cells, names, f"{'latency' if unit < 1 else 'bandwidth'}, {of}", unit)
        show_checks(self.checks, title)


def examine(
    group: EPGroup,
    device: torch.device,
    local: Callable[[], NodeReport],
    over: str,
    shown: bool = True,
) -> JobReport:
    """Collective. local: what the first rank of a node says of it. shown: say on stderr how far it
    is, on rank 0."""
    from ep.group import gather_objects
    from launch.doctor.measure import measure_all_to_all, measure_clocks, measure_links

    def tell(what: str, done: int = 0, total: int = 0) -> None:
        if shown and group.rank == 0 and done % 8 == 0:
            print(f"{what}{f': round {done + 1} of {total}' if total else ''}", file=sys.stderr)

    tell("looking at the nodes")
    mine = local() if group.rank % group.ranks_per_node == 0 else None
    nodes: list[NodeReport] = [x for x in gather_objects(group, mine) if x is not None]
    names = names_of([node.name for node in nodes])
    clocks = measure_clocks(group)
    nodes = [
        replace(node, name=name, clock=clock)
        for node, name, clock in zip(nodes, names, clocks, strict=True)
    ]
    links = measure_links(group, device, tell)
    tell("all-to-all")
    moved = measure_all_to_all(group, device)
    return JobReport(nodes, links, moved, group.size, group.ranks_per_node, over)
