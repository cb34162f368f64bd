"""Messages between the front end and the ranks, and their encoding (msgspec msgpack over ZMQ).

The front end binds one ROUTER socket; each rank connects a DEALER whose identity is "rank-<n>".
Multipart frames: front end -> rank [payload]; rank -> front end [payload].

Knows: message types and bytes. Knows nothing of HTTP, text or scheduling.
"""

from __future__ import annotations

from typing import Any

import msgspec

from moeserve import wire_experts, wire_rebalance, wire_trace
from moeserve.request import FinishReason, Request, TokenOutput
from moeserve.wire_speculation import SpeculationStats

# ---- front end -> rank ------------------------------------------------------------------------


class Submit(msgspec.Struct, frozen=True, tag=True):
    request: Request


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Drop these requests. reason: what they count as: STOP where the front end found a stop string
    (finished), ABORT where the client left (aborted), ERROR where the server cut them off."""

    request_ids: tuple[str, ...]
    reason: FinishReason = FinishReason.ABORT


class Wake(msgspec.Struct, frozen=True, tag=True):
    """Another rank got work: enter the lockstep now instead of at the next idle tick."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Leave the step loop. All ranks stop at the same step, agreed in lockstep. drain: finish the
    running requests first."""

    drain: bool = True


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    """Drop every unreferenced cached block (operators and benchmarks)."""


ToRank = (
    Submit
    | Abort
    | Wake
    | Stop
    | ResetPrefixCache
    | wire_experts.FromFrontEnd
    | wire_rebalance.Rebalance
    | wire_trace.FromFrontEnd
)

# ---- rank -> front end ------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A rank is up (not loaded yet)."""

    rank: int
    size: int
    pid: int
    host: str


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Start-up progress of a rank: stage is rendezvous | weights | cache | warmup."""

    rank: int
    stage: str
    done_bytes: int = 0
    total_bytes: int = 0


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A rank may be given requests. info: what /health and the demo show (JSON-able): memory by
    kind, kernels, dispatcher and refusals, placement, KV blocks, deterministic, dtype."""

    rank: int
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_sequences: int
    info: dict[str, object] = {}


class Outputs(msgspec.Struct, frozen=True, tag=True):
    rank: int
    outputs: tuple[TokenOutput, ...]


class CacheEvents(msgspec.Struct, frozen=True, tag=True):
    """Blocks that entered or left a rank's prefix cache, by chain hash (see cache.block_hash):
    what the router's longest-prefix choice is made from. cleared: drop all known first."""

    rank: int
    added: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
    cleared: bool = False


class RankStats(msgspec.Struct, frozen=True, tag=True):
    """Sent about once a second and at idle. Counters are totals since start; times in seconds.

    expert_load: totals per MoE layer and logical expert of real tokens routed by this rank
    (flattened [L, E]); sent every few seconds only (empty otherwise).
    """

    rank: int
    step: int
    num_waiting: int
    num_running: int
    num_used_blocks: int  # held by running sequences
    num_cached_blocks: int  # of the prefix cache, held by none
    num_free_blocks: int  # that can be had now: empty or only cached
    num_wasted_slots: int  # unfilled slots in the last blocks of running sequences
    prompt_tokens: int
    computed_prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    preemptions: int
    finished: int  # whatever ended them, a stop string or an error too, but not an abort
    aborted: int  # by their clients
    step_seconds_total: float
    step_seconds_last: float
    lockstep_age: float  # seconds since the last finished lockstep
    placement_generation: int = 0
    expert_shape: tuple[int, int] = (0, 0)
    expert_load: tuple[int, ...] = ()
    rank_balance: float = 0.0  # max/mean load over ranks, mean over layers, of the last window
    dispatch_bytes: int = 0
    rss_bytes: int = 0
    rebalance: wire_rebalance.RebalanceStats | None = None  # None: experts cannot move here
    masked_ranks: tuple[int, ...] = ()  # that the dispatcher leaves out
    part_seconds: dict[str, float] = {}  # of steps, by part (`StepRecorder.seconds`)
    speculation: SpeculationStats | None = None  # None: off
    kernel_choices: tuple[str, ...] = ()  # now: a library that fails is left
    graphs: dict[str, Any] | None = None  # captured steps, now; None: none are


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """A rank cannot go on; first cause first. The job ends. peer_lost: only because another rank is
    gone, which is the one to blame."""

    rank: int
    reason: str
    peer_lost: bool = False


class Stopped(msgspec.Struct, frozen=True, tag=True):
    rank: int


ToFrontEnd = (
    Hello
    | Loading
    | Ready
    | Outputs
    | CacheEvents
    | RankStats
    | Fatal
    | Stopped
    | wire_experts.FromRank
    | wire_experts.PlacementInUse
    | wire_rebalance.RebalanceReport
    | wire_trace.FromRank
)


def encode(message: ToRank | ToFrontEnd) -> bytes:
    return msgspec.msgpack.encode(message)


def decode_to_rank(payload: bytes) -> ToRank:
    return msgspec.msgpack.decode(payload, type=ToRank)


def decode_to_front_end(payload: bytes) -> ToFrontEnd:
    return msgspec.msgpack.decode(payload, type=ToFrontEnd)


def rank_identity(rank: int) -> bytes:
    return f"rank-{rank}".encode()
