"""Loads as planners want them: checked, joined over steps by rule, scaled exactly.

Knows: arrays of counts or rates, steps, layers, experts. Knows nothing of: GPUs, placements.

The rules: NaN, negative and infinite loads are errors that name layer and expert; a layer without
any load counts as loaded evenly; integers above 2^53 are rounded to float64.

Shape letters: S steps, L layers, E experts.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from ep.planning.replicate import FloatArray

_ROBUST = re.compile(r"mean\+(\d+(?:\.\d+)?)\*std")


class PlanError(ValueError):
    """Something that cannot be planned: names the field, the value and what would be valid."""


def as_loads(value: Any) -> FloatArray:
    """[L, E] or [S, L, E] of anything numeric (torch tensors too) -> [S, L, E] float64, checked."""
    if hasattr(value, "detach"):  # a torch tensor, of any float type and device
        value = value.detach().cpu()
        value = value.double().numpy() if value.is_floating_point() else value.numpy()
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise PlanError(f"loads: rows of unequal length ({error})") from error
    if array.dtype.kind not in "iufb":
        raise PlanError(f"loads: {array.dtype}; must be integers or floats")
    if array.ndim not in (2, 3) or not array.size:
        raise PlanError(
            f"loads: shape {list(array.shape)}; must be [layers, experts] or "
            "[steps, layers, experts], none of them 0"
        )
    loads: FloatArray = np.array(array, dtype=np.float64, ndmin=3)
    for word, wrong in (
        ("NaN", np.isnan(loads)),
        ("infinite", np.isinf(loads)),
        ("negative", loads < 0),
    ):
        if wrong.any():
            step, layer, expert = np.argwhere(wrong)[0]
            where = f"step {step}, " if array.ndim == 3 else ""
            raise PlanError(
                f"loads: {where}layer {layer}, expert {expert}: {loads[step, layer, expert]} is "
                f"{word} ({int(wrong.sum())} such); must be finite and at least 0"
            )
    return loads


def check_robust(name: str) -> float | None:
    """The z of `mean+z*std`; None for `mean` and `max`. PlanError for anything else."""
    if name in ("mean", "max"):
        return None
    match = _ROBUST.fullmatch(name.replace(" ", "")) if isinstance(name, str) else None
    if not match or math.isinf(float(match[1])):
        raise PlanError(
            f"robust={name!r}: valid are 'mean', 'max' and 'mean+<z>*std' (such as 'mean+0.67*std')"
        )
    return float(match[1])


def join_steps(loads: FloatArray, robust: str) -> FloatArray:
    """loads [S, L, E] -> [L, E]: what to plan for, scaled by a power of two to at most 1.

    mean: the load as it was. max and mean+z*std look at shares (each step's layer sums to the
    same), so that a quiet step counts as much as a busy one, and hold for each expert apart.
    A layer without load becomes all ones.
    """
    z = check_robust(robust)
    # Exact: no sum overflows, and no rounding depends on the unit of the loads.
    loads = _down_to_one(loads)
    if len(loads) == 1 or robust == "mean":
        joined = np.add.reduce(loads, axis=0)
    else:
        total = np.cumsum(loads, axis=2)[:, :, -1:]
        shares = np.zeros_like(loads)
        np.divide(loads, total, out=shares, where=total > 0)
        busy = (total > 0).sum(axis=0)
        if robust == "max":
            joined = shares.max(axis=0)
        else:
            # Steps in which a layer had no tokens say nothing of its shares.
            count = np.maximum(busy, 1)
            mean = np.add.reduce(shares, axis=0) / count
            away = np.where(total > 0, shares - mean, 0.0)
            std = np.sqrt(np.add.reduce(away * away, axis=0) / count)
            joined = mean + z * std
    joined = _down_to_one(joined[None])[0]
    idle = ~joined.any(axis=1)
    joined[idle] = 1.0
    return joined


def _down_to_one(loads: FloatArray) -> FloatArray:
    """loads [S, L, E], each layer times a power of two: its largest over the steps in [0.5, 1)."""
    largest = loads.max(axis=(0, 2), keepdims=True)
    _, exponent = np.frexp(largest)
    scaled: FloatArray = np.ldexp(loads, -exponent)
    return scaled
