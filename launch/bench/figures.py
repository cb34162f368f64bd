"""What many measurements of one thing come to. Knows numbers, nothing of what they measure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Spread:
    """Of measurements of one thing, in their unit."""

    median: float
    p90: float
    p99: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """values: one or more."""
        ordered = sorted(values)
        half = (len(ordered) - 1) // 2, len(ordered) // 2
        return cls(
            median=(ordered[half[0]] + ordered[half[1]]) / 2,
            p90=percentile(ordered, 90),
            p99=percentile(ordered, 99),
            least=ordered[0],
            most=ordered[-1],
        )

    def as_json(self) -> dict[str, float]:
        return asdict(self)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest measured value that `percent` % of all do not exceed (nearest rank): of few
    measurements the largest, never a number that was not measured."""
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def paired_ratio(these: Sequence[float], those: Sequence[float]) -> float:
    """Median over pairs measured side by side of this / that: what slows both falls out."""
    return Spread.of([a / b for a, b in zip(these, those, strict=True)]).median
