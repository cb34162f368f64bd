"""Whether groups of experts stay on nodes: both ways are tried, the quicker one is taken.

A node that holds whole groups is sent fewer rows, since a gate with group limits picks of few
groups; but hot groups make busy nodes. Knows: which policies are possible, how two plans compare.
Knows nothing of how experts are placed (`balance`) or priced (`predict`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from launch.capacity.balance import Balance
from launch.capacity.deployment import Deployment, Groups
from launch.capacity.predict import Prediction

AUTO: Literal["auto"] = "auto"
WISHES = (AUTO, "free", "node")
# Ways to dispatch that send as much wherever experts lie: groups on nodes can only cost there.
_BY_PICK = ("deepep_ll", "nvshmem", "allgather", "local")


@dataclass(frozen=True)
class Placed:
    """A deployment with its experts placed by one policy, and what it gives then."""

    deployment: Deployment
    balance: Balance
    prediction: Prediction

    def as_json(self) -> dict[str, object]:
        return self.balance.placement_json() | {
            "balance": self.balance.mean,
            "tokens_per_s_per_gpu": self.prediction.per_gpu,
        }


def policies(d: Deployment, wish: str = AUTO) -> tuple[Groups, ...]:
    """Worth a try for d, whose way to dispatch is known."""
    if wish != AUTO:
        return ("node",) if wish == "node" else ("free",)
    worth = d.can_group and d.dispatch not in _BY_PICK
    return ("free", "node") if worth else ("free",)


def quickest(tried: Sequence[Placed]) -> Placed:
    """Most tokens a second a GPU; the first where several give as much."""
    return max(tried, key=lambda x: x.prediction.per_gpu)


def why_not(d: Deployment) -> str | None:
    """Why groups cannot stay on nodes, if so."""
    if d.can_group:
        return None
    groups, domain = d.shape.config.gate_spec().num_groups, d.gpu.domain
    nodes, left = divmod(d.gpus, domain)
    valid = "; valid are free, auto"
    if groups <= 1:
        return f"--groups=node: this model's gate knows no groups of experts{valid}"
    if left or nodes < 2:
        return (
            f"--groups=node: {d.gpus} GPUs are not two or more whole nodes of {domain} that reach "
            f"one another by NVLink{valid}"
        )
    fits = ", ".join(str(n * domain) for n in range(2, groups + 1) if groups % n == 0)
    return (
        f"--groups=node: {groups} groups of experts do not divide among {nodes} nodes{valid}, or "
        f"--gpus of {fits}"
    )
