"""Messages about rebalancing, part of `wire`: an operator's wish, its answer, what ranks report.

An operator's wish goes to rank 0 and has a number; the answer comes when the rebalance has ended,
at once for one that is refused.
"""

from __future__ import annotations

from typing import Any

import msgspec

# ---- front end -> rank 0 ----------------------------------------------------------------------


class Rebalance(msgspec.Struct, frozen=True, tag=True):
    """Look at the load window now and move experts if that is worth it.

    dry_run: plan and explain, move nothing. force: whatever threshold, least gain and number of
    tokens say. options: of the planner, for this time only. table: this placement and no other:
    [L, P] int32, little-endian, in the job's shape, -1 for empty slots.
    """

    ask: int
    dry_run: bool = False
    force: bool = False
    options: dict[str, Any] = {}
    table: bytes = b""


# ---- rank -> front end ------------------------------------------------------------------------


class RebalanceReport(msgspec.Struct, frozen=True, tag=True):
    """result: done | nothing | abandoned | refused. explanation: plain data (balance before and
    after, slots and bytes to move, what the planner says); empty when refused."""

    rank: int
    ask: int
    result: str
    reason: str
    explanation: dict[str, Any] = {}


class RebalanceStats(msgspec.Struct, frozen=True):
    """Part of RankStats. Counters since start; slots and bytes of the whole job; seconds from the
    step that began a rebalance to the one that ended it. Balances are mean over largest rank load,
    mean over layers, on the window that was planned for: utilisation, 1 is perfect."""

    enabled: bool  # by itself; an operator may ask all the same
    state: str  # idle | planning | checking | moving
    seconds_in_state: float
    generation: int
    batch: int  # being moved, of `num_batches`
    num_batches: int
    done: int
    nothing: int
    abandoned: int
    moved_slots: int
    moved_bytes: int
    seconds: float
    gather_seconds: float  # spent in summing load windows over ranks, all in all
    switch_seconds: float  # spent by this rank in switching, all in all
    switch_seconds_most: float  # of one batch: what a step waited for
    refused_requests: int  # for bundles, by this rank's source: strangers
    last_result: str = ""  # of the last that did more than look: done | abandoned
    last_reason: str = ""
    last_seconds: float = 0.0
    utilisation: float = 0.0  # of the window when last looked at
    utilisation_before: float = 0.0  # of the last plan
    utilisation_after: float = 0.0
    look_reason: str = ""  # why the last look moved nothing
