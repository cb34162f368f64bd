"""What a plan is asked for, checked: GPUs, nodes, groups, slots, who lives.

Knows: the sizes of a plan and which of them go together; every refusal lists the nearest values
that would be valid. Knows nothing of: loads, how experts are placed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ep.planning.plan_loads import PlanError

BoolArray = NDArray[np.bool_]

_MAX_GPUS = 1 << 16  # as many as ExpertPlacement takes ranks
_MAX_SLOTS = 1 << 20  # of a layer: far beyond any machine, and still a table that fits memory


@dataclass(frozen=True, eq=False)
class Shape:
    """A valid request. live [G] bool; slots_per_gpu counts those of every GPU, dead ones too.

    grouped_experts: those that the groups divide (the first ones); experts beyond belong to no
    group, such as a hosted shared expert.
    """

    num_experts: int
    num_gpus: int
    num_nodes: int
    num_groups: int
    slots_per_gpu: int
    live: BoolArray
    grouped_experts: int

    @property
    def num_live(self) -> int:
        return int(self.live.sum())

    @property
    def gpus_per_node(self) -> int:
        return self.num_gpus // self.num_nodes

    @property
    def groups_fit_nodes(self) -> bool:
        """Whether groups can stay on nodes, the same number of them on each."""
        return self.num_groups % self.num_nodes == 0


def check_shape(
    num_experts: int,
    num_gpus: int,
    *,
    num_slots: int | None = None,
    num_slots_per_gpu: int | None = None,
    num_nodes: int = 1,
    num_groups: int = 1,
    live_gpus: ArrayLike | None = None,
    num_ungrouped: int = 0,
    unfit_groups_are_ignored: bool = False,
) -> Shape:
    """Shape, or PlanError. Give either num_slots (of all GPUs) or num_slots_per_gpu.

    unfit_groups_are_ignored: groups that do not divide by nodes count as one, as EPLB's rule is.
    """
    counts = {"num_gpus": num_gpus, "num_nodes": num_nodes, "num_groups": num_groups}
    for name, value in counts.items():
        check_count(name, value, 1)
    if num_gpus > _MAX_GPUS:
        raise PlanError(f"num_gpus={num_gpus}: valid are 1..{_MAX_GPUS}")
    if num_gpus % num_nodes:
        raise PlanError(
            f"num_nodes={num_nodes}: {num_gpus} GPUs do not divide into {num_nodes} nodes; "
            f"num_nodes could be {near_divisors(num_gpus, num_nodes)}, or num_gpus "
            f"{near_multiples(num_gpus, num_nodes)}"
        )
    if unfit_groups_are_ignored and num_groups % num_nodes:
        num_groups = 1
    check_count("num_ungrouped", num_ungrouped, 0)
    grouped = num_experts - num_ungrouped
    if grouped < 1:
        raise PlanError(
            f"num_ungrouped={num_ungrouped}: of {num_experts} experts; valid are "
            f"0..{num_experts - 1}"
        )
    if grouped % num_groups:
        raise PlanError(
            f"num_groups={num_groups}: {grouped} experts do not divide into {num_groups} groups; "
            f"num_groups could be {near_divisors(grouped, num_groups)}, or the number of experts "
            f"{near_multiples(grouped, num_groups)} (experts of no group, such as a shared one, "
            "are counted by num_ungrouped)"
        )
    per_gpu = _slots_per_gpu(num_experts, num_gpus, num_slots, num_slots_per_gpu)
    if per_gpu * num_gpus > _MAX_SLOTS:
        name, given, most = (
            ("num_slots", num_slots, _MAX_SLOTS // num_gpus * num_gpus)
            if num_slots_per_gpu is None
            else ("num_slots_per_gpu", num_slots_per_gpu, _MAX_SLOTS // num_gpus)
        )
        raise PlanError(f"{name}={given}: too many for {num_gpus} GPUs; at most {most} are planned")
    live = _live(live_gpus, num_gpus)
    if per_gpu * int(live.sum()) < num_experts:
        needed = -(-num_experts // per_gpu)
        slots = -(-num_experts // int(live.sum()))
        raise PlanError(
            f"live_gpus: {int(live.sum())} of {num_gpus} GPUs with {per_gpu} slots each hold "
            f"{per_gpu * int(live.sum())} of {num_experts} experts; at least {needed} live GPUs "
            f"are needed, or {slots} slots a GPU"
        )
    return Shape(num_experts, num_gpus, num_nodes, num_groups, per_gpu, live, grouped)


def near_multiples(value: int, of: int) -> str:
    """The nearest multiples of `of` on both sides of value, from `of` on: '288 or 320'."""
    below = value // of * of
    return " or ".join(str(n) for n in (below, below + of) if n >= of)


def near_divisors(number: int, value: int) -> str:
    """The divisors of number that lie nearest to value on both sides: '2 or 4'."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = [d for d in divisors if d <= value]
    above = [d for d in divisors if d >= value]
    return " or ".join(str(n) for n in (*below[-1:], *above[:1]))


def check_count(name: str, value: object, least: int) -> None:
    """PlanError unless value is an integer of at least least."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise PlanError(f"{name}={value!r}: must be an integer of at least {least}")


def _slots_per_gpu(
    experts: int, gpus: int, num_slots: int | None, num_slots_per_gpu: int | None
) -> int:
    least = -(-experts // gpus)
    if (num_slots is None) == (num_slots_per_gpu is None):
        raise PlanError(
            f"num_slots={num_slots}, num_slots_per_gpu={num_slots_per_gpu}: give one of the two; "
            f"{experts} experts on {gpus} GPUs need at least {least} slots a GPU ({least * gpus})"
        )
    if num_slots_per_gpu is not None:
        check_count("num_slots_per_gpu", num_slots_per_gpu, 1)
        if num_slots_per_gpu < least:
            raise PlanError(
                f"num_slots_per_gpu={num_slots_per_gpu}: {gpus} GPUs would hold "
                f"{num_slots_per_gpu * gpus} of {experts} experts; at least {least} are needed"
            )
        return int(num_slots_per_gpu)
    assert num_slots is not None
    check_count("num_slots", num_slots, 1)
    if num_slots < experts:
        raise PlanError(
            f"num_slots={num_slots}: fewer than {experts} experts; on {gpus} GPUs valid are "
            f"{least * gpus}, {least * gpus + gpus} ..."
        )
    if num_slots % gpus:
        valid = [n * gpus for n in (num_slots // gpus, num_slots // gpus + 1) if n >= least]
        raise PlanError(
            f"num_slots={num_slots}: does not divide by {gpus} GPUs; nearest valid are "
            f"{' or '.join(map(str, valid))} ({num_slots - experts} redundant would become "
            f"{' or '.join(str(n - experts) for n in valid)})"
        )
    return int(num_slots) // gpus


def _live(live_gpus: ArrayLike | None, gpus: int) -> BoolArray:
    if live_gpus is None:
        return np.ones(gpus, dtype=bool)
    if hasattr(live_gpus, "detach"):
        live_gpus = live_gpus.detach().cpu().numpy()
    live = np.asarray(live_gpus)
    if live.shape != (gpus,) or not (live.dtype == bool or np.isin(live, (0, 1)).all()):
        raise PlanError(
            f"live_gpus: {live.dtype} {list(live.shape)}; must be {gpus} booleans, one a GPU"
        )
    live = live.astype(bool)
    if not live.any():
        raise PlanError(f"live_gpus: none of {gpus} GPUs lives; at least one must")
    return live


def check_number(name: str, value: object, least: float) -> None:
    """PlanError unless value is a finite number of at least least."""
    is_number = isinstance(value, int | float | np.integer | np.floating)
    if isinstance(value, bool) or not is_number or not least <= value < math.inf:  # type: ignore[operator]
        raise PlanError(f"{name}={value!r}: must be a finite number of at least {least}")


def check_type(name: str, value: object, valid: type) -> None:
    """PlanError unless value is an instance of valid."""
    if not isinstance(value, valid):
        raise PlanError(f"{name}={value!r}: {type(value).__name__}; must be a {valid.__name__}")


def check_choice(name: str, value: object, valid: Sequence[str]) -> None:
    if value not in valid:
        raise PlanError(f"{name}={value!r}: valid are {', '.join(map(repr, valid))}")
