"""How much of each layer to change: the moved slots that pay, under a cap.

Knows: per layer the walk from the previous table (balance against moved slots, step by step) and
the fresh table as one more choice. Knows nothing of: how either was found.

Shape letters: L layers; of a walk: B rows, H GPUs, k slots a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ep.planning.refine import Walk
from ep.planning.replicate import FloatArray, IntArray


@dataclass(frozen=True)
class Point:
    """A state that a layer may end in. busiest: load of the busiest GPU. steps: of each row of the
    layer's walk, None for the fresh table."""

    moved: int
    busiest: float
    steps: tuple[int, ...] | None


def points_of_layer(rows: list[tuple[Walk, int]]) -> list[Point]:
    """The states of a walk whose rows (walk, row) make up one layer, from the start on: each lowers
    the busiest GPU of the layer by as few steps of each row as do."""
    # What a row is at after each step is never above what it was (up to rounding).
    falls = [np.minimum.accumulate(walk.busiest[:, row]) for walk, row in rows]
    least = max(fall[-1] for fall in falls)
    levels = np.unique(np.concatenate([*falls, [max(fall[0] for fall in falls)]]))
    points = []
    for level in levels[::-1]:
        if level < least or level > max(fall[0] for fall in falls):
            continue
        steps = tuple(int(np.searchsorted(-fall, -level, side="left")) for fall in falls)
        moved = sum(int(walk.moved[s, row]) for (walk, row), s in zip(rows, steps, strict=True))
        points.append(Point(moved, float(level), steps))
    return points


def choose(points: list[list[Point]], goal: FloatArray, cap: int | None) -> list[Point]:
    """points [L] lists, the first of each the start; goal [L] loads -> one point of each layer.

    Each layer's goal is met with the fewest moved slots (or come as near as possible). If that is
    more than cap in all, slots go to the layers where each lowers the busiest GPU most, measured
    against the layer's goal; a layer's start is taken whatever it costs.
    """
    wanted = [_fewest_moves(layer, float(g)) for layer, g in zip(points, goal, strict=True)]
    if cap is None or sum(point.moved for point in wanted) <= cap:
        return wanted
    chosen = [min(layer, key=lambda p: (p.moved, p.busiest)) for layer in points]
    left = cap - sum(point.moved for point in chosen)
    segments = []
    for number, (layer, want) in enumerate(zip(points, wanted, strict=True)):
        hull = _hull(chosen[number], [p for p in layer if p.busiest >= want.busiest])
        for order, (a, b) in enumerate(pairwise(hull)):
            worth = (a.busiest - b.busiest) / float(goal[number]) / (b.moved - a.moved)
            segments.append((-worth, number, order, b))
    held_up = set()  # layers whose next piece was too dear: what follows would skip it
    for _, number, _, point in sorted(segments, key=lambda s: s[:3]):
        more = point.moved - chosen[number].moved
        if number in held_up or more > left:
            held_up.add(number)
            continue
        chosen[number] = point
        left -= more
    for number in sorted(held_up):
        now = chosen[number]
        near = [now, *(p for p in points[number] if p.moved - now.moved <= left)]
        best = min(near, key=lambda p: (p.busiest, p.moved))
        if best.busiest < now.busiest:
            left -= best.moved - now.moved
            chosen[number] = best
    return chosen


def _hull(start: Point, points: list[Point]) -> list[Point]:
    """The points from start on along which each moved slot lowers the busiest GPU most."""
    hull = [start]
    while True:
        now = hull[-1]
        ahead = [p for p in points if p.moved > now.moved and p.busiest < now.busiest]
        if not ahead:
            return hull
        hull.append(
            max(ahead, key=lambda p: ((now.busiest - p.busiest) / (p.moved - now.moved), p.moved))
        )


def _fewest_moves(points: list[Point], goal: float) -> Point:
    meeting = [p for p in points if p.busiest <= goal * (1 + 1e-12)]
    if meeting:
        return min(meeting, key=lambda p: (p.moved, p.busiest))
    return min(points, key=lambda p: (p.busiest, p.moved))


def stops(chosen: Point, rows: list[tuple[Walk, int]], into: dict[int, IntArray]) -> None:
    """Notes in into[id of the walk] [B] how many steps each row of the layer takes."""
    assert chosen.steps is not None
    for (walk, row), steps in zip(rows, chosen.steps, strict=True):
        into.setdefault(id(walk), np.zeros(walk.busiest.shape[1], dtype=np.int64))[row] = steps
