"""JobTrace: the spans of all ranks over the same steps, put together from what ranks send.

Plain data, and its bytes. Knows wire messages. Knows nothing of sockets, HTTP or pictures.

Shape letters: S steps, N spans of a rank, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from moeserve.errors import MoeserveError
from moeserve.wire_trace import NAMES, SPAN, STEP, FromRank, TraceEnded

Array = NDArray[np.void]


class TraceDamaged(MoeserveError):
    """Bytes that are no trace."""


@dataclass(frozen=True)
class RankTrace:
    """steps [S] of STEP, spans [N] of SPAN: those of the first step first."""

    rank: int
    host: str
    clock: str
    steps: Array
    spans: Array

    @property
    def step_of_span(self) -> NDArray[np.int64]:
        """[N]: which of `steps`."""
        return np.repeat(np.arange(len(self.steps)), self.steps["spans"])

    def only(self, numbers: NDArray[np.int64]) -> RankTrace:
        """The steps of these numbers."""
        kept = np.isin(self.steps["step"], numbers)
        return RankTrace(
            self.rank,
            self.host,
            self.clock,
            self.steps[kept],
            self.spans[kept[self.step_of_span]],
        )


@dataclass(frozen=True)
class JobTrace:
    """ranks in order, all with the same steps. cut_short: why it is shorter than was asked for."""

    ranks: tuple[RankTrace, ...]
    cut_short: str | None = None

    @property
    def num_steps(self) -> int:
        return len(self.ranks[0].steps)

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(
            {
                "names": NAMES,
                "cut_short": self.cut_short,
                "ranks": [
                    (r.rank, r.host, r.clock, r.steps.tobytes(), r.spans.tobytes())
                    for r in self.ranks
                ],
            }
        )

    @classmethod
    def from_bytes(cls, content: bytes) -> JobTrace:
        """TraceDamaged for anything that `to_bytes` of this version has not made."""
        try:
            told = msgspec.msgpack.decode(content)
            if tuple(told["names"]) != NAMES:
                raise TraceDamaged("the server's spans have other names: another version of it")
            ranks = tuple(
                RankTrace(
                    int(rank),
                    str(host),
                    str(clock),
                    np.frombuffer(steps, STEP),
                    np.frombuffer(spans, SPAN),
                )
                for rank, host, clock, steps, spans in told["ranks"]
            )
            if not ranks or any(int(r.steps["spans"].sum()) != len(r.spans) for r in ranks):
                raise ValueError("steps and spans do not go together")
            return cls(ranks, told["cut_short"])
        except (msgspec.MsgspecError, ValueError, KeyError, TypeError) as error:
            raise TraceDamaged(f"what came is no trace: {error}") from error


@dataclass
class _Heard:
    host: str = ""
    clock: str = ""
    steps: list[Array] = field(default_factory=list)
    spans: list[Array] = field(default_factory=list)
    ended: TraceEnded | None = None


class TraceCollector:
    """One trace: `heard` all messages of its number, then `result` when `ended`."""

    def __init__(self, trace: int, num_ranks: int, wanted_steps: int) -> None:
        self.trace, self.wanted_steps = trace, wanted_steps
        self.nbytes = 0
        self._ranks = [_Heard() for _ in range(num_ranks)]

    def heard(self, message: FromRank) -> None:
        rank = self._ranks[message.rank]
        if isinstance(message, TraceEnded):
            rank.ended = message
            return
        rank.host, rank.clock = message.host, message.clock
        rank.steps.append(np.frombuffer(message.steps, STEP))
        rank.spans.append(np.frombuffer(message.spans, SPAN))
        self.nbytes += len(message.steps) + len(message.spans)

    @property
    def ended(self) -> bool:
        return all(rank.ended is not None for rank in self._ranks)

    @property
    def num_steps(self) -> int:
        """That every rank has sent."""
        return min(sum(map(len, rank.steps)) for rank in self._ranks)

    @property
    def silent(self) -> list[int]:
        """Ranks that have not ended."""
        return [number for number, rank in enumerate(self._ranks) if rank.ended is None]

    def result(self, cut_short: str | None = None) -> JobTrace:
        """The steps that all ranks have sent, whether or not it has ended."""
        ranks = [
            RankTrace(
                number,
                rank.host,
                rank.clock,
                np.concatenate(rank.steps) if rank.steps else np.zeros(0, STEP),
                np.concatenate(rank.spans) if rank.spans else np.zeros(0, SPAN),
            )
            for number, rank in enumerate(self._ranks)
        ]
        if cut_short is None and any(r.ended is not None and r.ended.full for r in self._ranks):
            cut_short = "a rank had no room for more spans"
        return JobTrace(same_steps(ranks), cut_short)


def same_steps(ranks: Sequence[RankTrace]) -> tuple[RankTrace, ...]:
    """Only the steps that every rank has."""
    common = ranks[0].steps["step"]
    for rank in ranks[1:]:
        common = np.intersect1d(common, rank.steps["step"])
    if all(len(rank.steps) == len(common) for rank in ranks):
        return tuple(ranks)
    return tuple(rank.only(common) for rank in ranks)
