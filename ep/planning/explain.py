"""PlanExplanation: why a plan is as it is, as numbers, as JSON, as text.

Knows: what a planner found out on the way. Decides nothing.

Shape letters: L layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ep.planning.replicate import FloatArray, IntArray
from ep.planning.shapes import BoolArray


@dataclass(frozen=True, eq=False)
class PlanExplanation:
    """Arrays are per layer. Balance is busiest GPU / mean of the live ones, on the loads that were
    planned for (joined over steps by `robust`).

    before: the previous placement on these loads, None without one (or where a dead GPU held the
    last copy of an expert). bound: what no placement of these slots can be below. moved: slots
    whose expert was not on that GPU, None without a previous placement. prices: microseconds a
    token and nodes reached, None unless both group policies were open.
    """

    policy: str
    group_policy: str
    robust: str
    num_gpus: int
    num_live_gpus: int
    num_nodes: int
    num_experts: int
    generation: int
    grouped: BoolArray
    before: FloatArray | None
    after: FloatArray
    bound: FloatArray
    slots_per_gpu: IntArray
    moved: IntArray | None
    duplicates: IntArray
    extra_slots_per_gpu: int
    extra_bytes_per_gpu: int | None
    prices: dict[str, float] | None
    notes: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and strings: what JSON holds."""
        out: dict[str, Any] = {}
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, np.ndarray):
                value = [round(v, 6) if isinstance(v, float) else v for v in value.tolist()]
            out[name] = list(value) if isinstance(value, tuple) else value
        out["mean_balance"] = _mean(self.after)
        out["mean_balance_before"] = None if self.before is None else _mean(self.before)
        out["mean_bound"] = _mean(self.bound)
        out["moved_slots"] = None if self.moved is None else int(self.moved.sum())
        return out

    def __str__(self) -> str:
        layers = len(self.after)
        lines = [
            f"{self.policy} placement, generation {self.generation}: {layers} layers, "
            f"{self.num_experts} experts on {self.num_live_gpus} of {self.num_gpus} GPUs "
            f"({self.num_nodes} nodes), loads joined by {self.robust}",
            f"balance (busiest / mean GPU)  mean {_mean(self.after):.4f}  "
            f"worst {self.after.max():.4f} (layer {int(self.after.argmax())})  "
            f"bound {_mean(self.bound):.4f}",
        ]
        if self.before is not None:
            lines.append(
                f"  before                      mean {_mean(self.before):.4f}  "
                f"worst {self.before.max():.4f} (layer {int(self.before.argmax())})"
            )
        if self.moved is not None:
            used = int(self.slots_per_gpu.sum()) * self.num_live_gpus
            lines.append(
                f"moved slots: {int(self.moved.sum())} of {used}, in "
                f"{int((self.moved > 0).sum())} layers"
            )
        grouped = int(self.grouped.sum())
        lines.append(
            f"group policy {self.group_policy}: groups on nodes in {grouped} layers, "
            f"free in {layers - grouped}"
        )
        if self.prices is not None:
            lines.append(
                "  us a token and layer: grouped {grouped_us:.3f} ({grouped_nodes:.2f} nodes "
                "reached, balance {grouped_balance:.4f}), free {free_us:.3f} ({free_nodes:.2f} "
                "nodes, balance {free_balance:.4f})".format(**self.prices)
            )
        if self.extra_slots_per_gpu:
            memory = (
                "" if self.extra_bytes_per_gpu is None else f", {self.extra_bytes_per_gpu:,} bytes"
            )
            most = np.flatnonzero(self.slots_per_gpu > self.slots_per_gpu.min()).tolist()
            lines.append(f"extra slots a GPU: {self.extra_slots_per_gpu}{memory}, in layers {most}")
        return "\n".join([*lines, *self.notes])


def _mean(values: FloatArray) -> float:
    return round(float(np.cumsum(values)[-1]) / len(values), 6)
