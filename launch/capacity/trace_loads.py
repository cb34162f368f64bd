"""Loads of experts from a file that an operator gives, by which a plan's layouts are balanced.

Knows: files of loads (`ep.trace`), phases. Knows nothing of placements.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ep.trace import TraceError, read_trace
from launch.capacity.balance import FloatArray
from launch.capacity.shape import ModelShape
from launch.capacity.values import Values


def trace_loads(
    v: Values, path: Path, array: str | None, shape: ModelShape, phases: Sequence[str]
) -> dict[str, FloatArray] | None:
    """Of each phase: of a recording its own tokens, of anything else the same for both. Layers
    without any load are left out; columns beyond the routed experts are a hosted shared one."""
    found: dict[str, FloatArray] = {}
    experts = shape.config.n_routed_experts
    for phase in phases:
        try:
            table = read_trace(path, array).totals if array else _totals(path, phase)
        except (TraceError, OSError) as error:
            v.problems.append(f"--trace {error}")  # which names the file
            return None
        if table.shape[1] not in (experts, experts + shape.config.n_shared_experts):
            v.problems.append(
                f"--trace={path}: has loads of {table.shape[1]} experts; the model has {experts}"
            )
            return None
        table = table[:, :experts]
        table = table[table.any(axis=1)]
        if not len(table):
            v.problems.append(f"--trace={path}: no layer has any load")
            return None
        found[phase] = table
    return found


def _totals(path: Path, phase: str) -> FloatArray:
    try:
        totals = read_trace(path, phase).totals
        if totals.any():
            return totals
    except TraceError:
        pass  # no recording: there are no phases in it
    return read_trace(path).totals
