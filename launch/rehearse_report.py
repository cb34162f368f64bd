"""What a rehearsal found, and whether that is good. Knows numbers; nothing of how they came."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from moeserve.errors import MoeserveError

TOLERANCE = 1e-5  # 0 is what comes out; outputs are about 1, a wrong expert is off by as much


class RehearsalFailed(MoeserveError):
    """Outputs are not those of the dense reference."""


@dataclass(frozen=True)
class Report:
    """tokens: of all ranks and steps. max_error: largest absolute difference from the reference, of
    any value of any token after the last layer. ideal: what no dispatcher could leave out
    (`dispatch.ideal`). seconds: all of it but for loading torch; its parts beside it, of which
    ranks_seconds is what a job's ranks would do, one after another on these cores."""

    rehearsal: str
    layout: str
    routing: str
    dispatch: str
    wire: str
    seed: int
    ranks: int
    nodes: int
    experts: int  # logical, of a layer
    slots: int
    layers: int
    steps: int
    generations: int  # placements that were in force
    tokens: int
    idle_rank_steps: int
    collectives: int
    bytes_sent: int
    dispatch_bytes: int
    combine_bytes: int
    ideal_bytes: int
    ideal_dispatch_bytes: int
    ideal_combine_bytes: int
    max_error: float
    seconds: float
    reference_seconds: float
    planning_seconds: float
    ranks_seconds: float
    peak_memory_bytes: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def check(self) -> None:
        """RehearsalFailed if a token's output is not the reference's."""
        if not self.max_error <= TOLERANCE:  # NaN fails too
            raise RehearsalFailed(
                f"{self.rehearsal}: max_error={self.max_error:.3g}; at most {TOLERANCE:g} is the "
                "rounding of fp32"
            )
