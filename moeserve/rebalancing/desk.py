"""RebalanceDesk: the front end's side of a wish to rebalance: ask rank 0, await the end.

Lives in the client's event loop. Knows wire messages. Knows nothing of sockets, HTTP or plans.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from moeserve import wire
from moeserve.errors import NotReady
from moeserve.wire_rebalance import Rebalance, RebalanceReport, RebalanceStats

PATIENCE = 600.0  # seconds: a rebalance has deadlines of its own and always ends


class RebalanceDesk:
    """send(rank, message) reaches a rank; stats() is what rank 0 last reported."""

    def __init__(
        self,
        send: Callable[[int, wire.ToRank], None],
        stats: Callable[[], RebalanceStats | None],
    ) -> None:
        self._send, self._stats = send, stats
        self._asks = 0
        self._answers: dict[int, asyncio.Future[RebalanceReport]] = {}
        self._lost = False

    async def ask(
        self,
        *,
        dry_run: bool = False,
        force: bool = False,
        options: Mapping[str, Any] | None = None,
        table: bytes = b"",
        seconds: float = PATIENCE,
    ) -> RebalanceReport:
        """See `wire_rebalance.Rebalance`. Returns when it has ended, or was refused. NotReady: the
        job ended, or rank 0 has not answered in time (the rebalance may go on)."""
        self._asks += 1
        number = self._asks
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(0, Rebalance(number, dry_run, force, dict(options or {}), table))
            return await asyncio.wait_for(answer, seconds)
        except TimeoutError:
            raise NotReady(f"rank 0 has not answered within {seconds:g} s") from None
        finally:
            del self._answers[number]

    def state(self) -> dict[str, Any] | None:
        """The part of /health about rebalancing; None before rank 0 reported, or where experts
        cannot move (one rank). After the end of the job its state is `ended`; counters stay."""
        stats = self._stats()
        if stats is None:
            return None
        return {
            "enabled": stats.enabled,
            "state": "ended" if self._lost else stats.state,
            "seconds_in_state": round(stats.seconds_in_state, 3),
            "batch": stats.batch,
            "num_batches": stats.num_batches,
            "generation": stats.generation,
            "done": stats.done,
            "nothing": stats.nothing,
            "abandoned": stats.abandoned,
            "moved_slots": stats.moved_slots,
            "moved_bytes": stats.moved_bytes,
            "seconds": round(stats.seconds, 3),
            "last_result": stats.last_result,
            "last_reason": stats.last_reason,
            "last_seconds": round(stats.last_seconds, 3),
            "utilisation": round(stats.utilisation, 4),
            "utilisation_before": round(stats.utilisation_before, 4),
            "utilisation_after": round(stats.utilisation_after, 4),
            "look_reason": stats.look_reason,
        }

    def heard(self, report: RebalanceReport) -> None:
        answer = self._answers.get(report.ask)
        if answer is not None and not answer.done():
            answer.set_result(report)

    def lost(self, reason: str) -> None:
        """The job ends: nobody waits any longer."""
        self._lost = True
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(NotReady(reason))
