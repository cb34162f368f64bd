"""What the front end knows of the ranks: which are up, loading, ready, stalled or gone.

Plain state fed with wire messages and clock readings; `report` is the part of /health about ranks.
Knows nothing of sockets or requests.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ep.placement import ExpertPlacement
from moeserve import speculation_report, wire
from moeserve.wire_experts import PlacementInUse

_COMPUTE = ("device", "dtype", "kernels", "weights", "kv_cache_dtype", "ahead")  # of a rank's info
RECENT_REPORTS = 12  # of expert load, every few seconds while there is work


class LossKind(enum.Enum):
    """How a rank left, as far as heard."""

    SILENT = "its connection broke without a word"
    FAULT = "it said what went wrong on it"
    PEER = "it said that it had lost another rank"


@dataclass(frozen=True)
class Loss:
    rank: int
    reason: str
    kind: LossKind


@dataclass
class RankState:
    """One rank as last heard of. `heard` and `progress` are monotonic seconds."""

    rank: int
    stage: str = "absent"  # absent, starting, rendezvous, weights, cache, warmup, ready, stopped
    hello: wire.Hello | None = None
    ready: wire.Ready | None = None
    stats: wire.RankStats | None = None
    done_bytes: int = 0
    total_bytes: int = 0
    heard: float = 0.0
    progress: float = 0.0  # when its last lockstep ended, as far as known
    lost: str | None = None  # why it is gone

    def report(self) -> dict[str, object]:
        view: dict[str, object] = {"rank": self.rank, "state": self.lost and "dead" or self.stage}
        if self.hello is not None:
            view |= {"host": self.hello.host, "pid": self.hello.pid}
        if self.ready is None and self.total_bytes:
            view |= {"done_bytes": self.done_bytes, "total_bytes": self.total_bytes}
        if self.lost:
            view["reason"] = self.lost
        if self.stats is not None:
            view |= {
                "waiting": self.stats.num_waiting,
                "running": self.stats.num_running,
                "step": self.stats.step,
                "placement_generation": self.stats.placement_generation,
            }
        return view


@dataclass
class Fleet:
    """All ranks of the job. Messages go in by `heard`, `lost`; questions are answered below."""

    num_ranks: int
    ranks: list[RankState] = field(default_factory=list)
    expert_load: dict[int, NDArray[np.int64]] = field(default_factory=dict)  # by rank, [L, E]
    placement: ExpertPlacement | None = None  # in use, as rank 0 last said
    # (when, totals) at the last reports, oldest first
    _earlier: deque[tuple[float, NDArray[np.int64]]] = field(
        default_factory=lambda: deque(maxlen=RECENT_REPORTS)
    )
    losses: dict[int, Loss] = field(default_factory=dict)  # by rank, in order of the first sign

    def __post_init__(self) -> None:
        self.ranks = [RankState(rank) for rank in range(self.num_ranks)]

    def heard(self, rank: int, message: wire.ToFrontEnd, now: float) -> None:
        state = self.ranks[rank]
        state.heard = now
        match message:
            case wire.Hello():
                state.hello, state.stage = message, "starting"
            case wire.Loading():
                state.stage = message.stage
                state.done_bytes, state.total_bytes = message.done_bytes, message.total_bytes
            case wire.Ready():
                state.ready, state.stage, state.progress = message, "ready", now
            case wire.RankStats():
                state.stats = message
                state.progress = max(state.progress, now - message.lockstep_age)
                if message.expert_load:
                    load = np.array(message.expert_load, np.int64)
                    self.expert_load[rank] = load.reshape(message.expert_shape)
                    if rank == 0:  # the others' are seconds old at most
                        self._earlier.append((now, self.expert_totals()))
            case wire.Outputs():
                state.progress = now
            case wire.Stopped():
                state.stage = "stopped"
            case wire.Fatal():
                kind = LossKind.PEER if message.peer_lost else LossKind.FAULT
                self.lost(rank, message.reason, kind)
            case PlacementInUse():
                self.placement = message.placement()
            case wire.CacheEvents():
                pass

    def lost(self, rank: int, reason: str, kind: LossKind) -> None:
        """The rank is gone. Last words may be read after the connection's end: they count."""
        known = self.losses.get(rank)
        if known is None or (known.kind is LossKind.SILENT and kind is not LossKind.SILENT):
            self.ranks[rank].lost = reason
            self.losses[rank] = Loss(rank, reason, kind)

    @property
    def _suspects(self) -> list[Loss]:
        return [x for x in self.losses.values() if x.kind is not LossKind.PEER]

    @property
    def is_clear(self) -> bool:
        """True when one rank alone can be the cause. Several that are gone without a word may yet
        turn out to have said that they lost a peer; one of whom nothing is known may be the one."""
        return len(self._suspects) == 1

    def first_cause(self) -> tuple[int, str]:
        """The rank to name and why: the first that did not leave for the loss of another."""
        assert self.losses
        silent = [x for x in self._suspects if x.kind is LossKind.SILENT]
        if self.num_ranks > 1 and len(silent) == self.num_ranks:
            first = min(silent, key=lambda x: x.rank)
            return first.rank, f"{first.reason}; all other ranks are gone as well"
        if self._suspects:
            return self._suspects[0].rank, self._suspects[0].reason
        unheard = [x.rank for x in self.ranks if x.rank not in self.losses]
        if len(unheard) == 1:
            return unheard[0], "all other ranks lost their connection to it"
        complaint = next(iter(self.losses.values()))
        return complaint.rank, complaint.reason

    @property
    def all_ready(self) -> bool:
        return all(x.ready is not None for x in self.ranks)

    @property
    def all_stopped(self) -> bool:
        """No rank is left that could still say Stopped; one that loads does not listen yet."""
        return all(x.stage == "stopped" or x.lost or x.ready is None for x in self.ranks)

    def stalled(self, now: float, timeout: float) -> tuple[int, float] | None:
        """The rank longest without a finished lockstep and its seconds, if over the timeout."""
        if not self.all_ready or any(x.stage == "stopped" for x in self.ranks):
            return None
        oldest = min(self.ranks, key=lambda x: x.progress)
        age = now - oldest.progress
        return (oldest.rank, age) if age > timeout else None

    def max_model_len(self) -> int:
        """The longest sequence that every rank can hold. Only when all are ready."""
        return min(x.ready.max_model_len for x in self.ranks if x.ready is not None)

    def block_size(self) -> int:
        assert self.ranks[0].ready is not None
        return self.ranks[0].ready.block_size

    def expert_totals(self) -> NDArray[np.int64]:
        """Tokens routed to each logical expert since start, summed over ranks: [L, E]."""
        loads = list(self.expert_load.values())
        return np.sum(loads, axis=0) if loads else np.zeros((0, 0), np.int64)

    def recent_expert_load(self) -> NDArray[np.int64]:
        """[L, E]: what was added to `expert_totals` over the last RECENT_REPORTS reports of rank 0
        (about a minute); all of it while there are fewer."""
        totals = self.expert_totals()
        if len(self._earlier) < RECENT_REPORTS:
            return totals
        recent: NDArray[np.int64] = totals - self._earlier[0][1]
        return recent

    def num_routed_experts(self) -> int:
        """Of the logical experts; the shared expert's pieces follow them where they lie in slots
        (every token picks those, so that they say nothing of the router's balance)."""
        for rank in self.ranks:
            placement = None if rank.ready is None else rank.ready.info.get("placement")
            if isinstance(placement, dict) and "num_routed_experts" in placement:
                return int(placement["num_routed_experts"])
        if self.placement is not None:
            return self.placement.num_logical_experts
        return int(self.expert_totals().shape[1])

    def compute(self) -> dict[str, object] | None:
        """On what ranks compute, and how, in short; None until rank 0 is ready. graphs: rows of
        captured steps, None where none are. All else: `/debug/state`."""
        ready, stats = self.ranks[0].ready, self.ranks[0].stats
        if ready is None or "device" not in ready.info:
            return None
        told = {name: ready.info.get(name) for name in _COMPUTE}
        graphs = ready.info.get("graphs") if stats is None else stats.graphs
        return told | {"graphs": graphs.get("rows") if isinstance(graphs, dict) else None}

    def dispatch(self) -> dict[str, object] | None:
        """Which dispatcher each phase has, why, why not others, and which ranks any rank leaves
        out; None until rank 0 is ready."""
        ready = self.ranks[0].ready
        told = None if ready is None else ready.info.get("dispatch")
        if not isinstance(told, dict):
            return None
        masked = {r for x in self.ranks if x.stats is not None for r in x.stats.masked_ranks}
        return told | {"masked_ranks": sorted(masked)}

    def speculation(self) -> dict[str, object] | None:
        """Who drafts, how deep, and what came of it on all ranks; None: off, or not ready yet."""
        ready = self.ranks[0].ready
        planned = None if ready is None else ready.info.get("speculate")
        told = [x.stats.speculation for x in self.ranks if x.stats is not None]
        return speculation_report.report(
            planned if isinstance(planned, dict) else None, [x for x in told if x is not None]
        )

    def launch(self) -> dict[str, object] | None:
        """How the job was started: by what, on which nodes over which interfaces, how often again;
        None until rank 0 is ready."""
        ready = self.ranks[0].ready
        told = None if ready is None else ready.info.get("launch")
        return told if isinstance(told, dict) else None

    def shared_replicas(self) -> int:
        """Slots that hold each piece of the shared expert, in the layer that has the fewest of one;
        0 where it lies in none."""
        if self.placement is None:
            return 0
        counts = self.placement.replica_count[:, self.num_routed_experts() :]
        return int(counts.min()) if counts.size else 0
