"""What a rank says of its speculation, for /metrics, /health and the bench. Plain data."""

from __future__ import annotations

import msgspec


class SpeculationStats(msgspec.Struct, frozen=True):
    """Totals since start. drafter: as in `--speculate`; rule: same or rejection; depth: of the last
    step, agreed by all ranks, 0 where no sequence drafts. drafted[i], accepted[i]: drafts at
    position i of a run; a position counts as drafted also where an earlier one was refused. runs:
    verifications of drafts, over which temperature is the mean. predicted: Leviathan's speed-up at
    that depth with the measured acceptance and cost ratio of a round to a step; 1 where nothing is
    known. failures: of drafting on this rank, which cost its drafts only, and the last one's
    reason. depths[k]: steps at depth k in which sequences could draft. recent_depth,
    recent_predicted: means over the last recent_steps of them that drafted; 0 and 1 before."""

    drafter: str
    rule: str
    depth: int
    adaptive: bool
    drafted_tokens: int
    accepted_tokens: int
    runs: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    temperature: float
    predicted: float
    cost_ratio: float
    rounds: int
    seconds: float
    failures: int = 0
    failure: str | None = None
    memory_bytes: int = 0
    depths: tuple[int, ...] = ()
    recent_steps: int = 0
    recent_depth: float = 0.0
    recent_predicted: float = 1.0

    @property
    def mean_accepted(self) -> float:
        """Drafts accepted a run."""
        return sum(self.accepted) / self.runs if self.runs else 0.0
