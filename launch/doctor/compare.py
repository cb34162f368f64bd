"""What nodes say of themselves, side by side: differing versions, checkpoints, clocks. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from launch.doctor.check import Check, fails, ok, warning

SECTION = "nodes"
CLOCK_SECONDS = 0.5  # more than this apart, logs and traces mislead
# What must be equal, and what to do where it is not.
MUST_MATCH = {
    "moeserve": "install one release, or check out one commit, on all nodes",
    "python": "use one minor release of Python on all nodes",
    "torch": "install one torch on all nodes",
    "CUDA": "install one torch on all nodes",
    "NCCL": "install one NCCL on all nodes; look at LD_LIBRARY_PATH",
    "NVSHMEM": "install one NVSHMEM on all nodes; look at LD_LIBRARY_PATH",
    "driver": "update the driver",
    "GPU": "ranks go at the pace of the slowest: use nodes of one kind",
    "checkpoint": "copy the checkpoint again: nodes would compute with other weights",
}
# `serve` refuses a job whose nodes differ in these (launch.node_facts).
REFUSED = {"moeserve", "python", "torch", "checkpoint"}


@dataclass(frozen=True)
class NodeReport:
    """Of the first rank of a node. values: by the names in MUST_MATCH. clock: seconds ahead of rank
    0's, and how wrong that may be."""

    name: str
    checks: list[Check] = field(default_factory=list)
    values: dict[str, str] = field(default_factory=dict)
    clock: tuple[float, float] = (0.0, 0.0)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "values": self.values,
            "clock_offset_seconds": self.clock[0],
            "clock_error_seconds": self.clock[1],
            "checks": [check.as_json() for check in self.checks],
        }


def names_of(hosts: Sequence[str]) -> list[str]:
    """A name of each node: its host's, with its number where two share one."""
    return [h if hosts.count(h) == 1 else f"{h}#{i}" for i, h in enumerate(hosts)]


def compare(nodes: Sequence[NodeReport]) -> list[Check]:
    """One check a value: equal on all nodes, or who has another than most."""
    found = []
    for name, remedy in MUST_MATCH.items():
        values = [node.values.get(name, "-") for node in nodes]
        usual, count = Counter(values).most_common(1)[0]
        if count == len(nodes):
            if usual != "-":
                found.append(ok(SECTION, name, f"{usual} on all {len(nodes)} nodes"))
            continue
        others = [f"{n.name}: {v}" for n, v in zip(nodes, values, strict=True) if v != usual]
        told = f"{usual} on {count} of {len(nodes)} nodes; {', '.join(others[:8])}"
        if name in REFUSED:
            reason = "nodes differ in what must be equal: serve refuses such a job"
            found.append(fails(SECTION, name, told, reason, remedy))
        else:
            reason = "nodes differ in what should be equal"
            found.append(warning(SECTION, name, told, reason, remedy))
    found.append(_clocks(nodes))
    return found


def _clocks(nodes: Sequence[NodeReport]) -> Check:
    off = [n for n in nodes if max(0.0, abs(n.clock[0]) - n.clock[1]) > CLOCK_SECONDS]
    if off:
        told = ", ".join(f"{n.name}: {n.clock[0]:+.2f} s" for n in off[:8])
        return warning(
            SECTION,
            "clocks",
            told,
            f"against {nodes[0].name}: logs and certificates of the nodes do not go together",
            "set up NTP (chrony) on all nodes",
        )
    worst = max(nodes, key=lambda n: abs(n.clock[0]))
    return ok(
        SECTION,
        "clocks",
        f"within {abs(worst.clock[0]) * 1e3:.1f} ms",
        f"measured to {max(n.clock[1] for n in nodes) * 1e3:.2f} ms",
    )


def joined(nodes: Sequence[NodeReport]) -> list[Check]:
    """The nodes' own checks: what all say alike once, else each with its node. Figures that differ
    by the machine (free memory, rates) are kept apart only where a state differs."""
    order: dict[tuple[str, str], list[tuple[str, Check]]] = {}
    for node in nodes:
        for check in node.checks:
            order.setdefault((check.section, check.name), []).append((node.name, check))
    found = []
    for said in order.values():
        states = {check.state for _, check in said}
        if len(states) == 1 and len(said) == len(nodes):
            texts = {check.found for _, check in said}
            first = said[0][1]
            shown = first.found if len(texts) == 1 else f"{first.found} (first node)"
            if first.section == "checkpoint" and len(texts) > 1:
                found += [replace(check, node=name) for name, check in said]
                continue
            found.append(replace(first, found=shown, node="all"))
        else:
            found += [replace(check, node=name) for name, check in said]
    return found
