"""Messages about traces, part of `wire`: which spans of time a rank spent on what, step by step.

A trace has a number (from 1, given by the front end). Ranks begin and end it at steps they agree on
in lockstep, so that all have the same steps. Spans travel as the bytes of arrays, little-endian.

Shape letters: S steps, N spans.
"""

from __future__ import annotations

import msgspec
import numpy as np

MAX_TRACE_STEPS = 1000

# Spans. name: number in `NAMES`; thread: number in `THREADS`; layer: of the model, -1 where none;
# start: nanoseconds of the rank's own monotonic clock.
SPAN = np.dtype(
    [("name", "<u1"), ("thread", "<u1"), ("layer", "<i2"), ("start", "<i8"), ("ns", "<i8")]
)
# Steps. step: number in lockstep; tokens: of this rank; spans: how many of the array are its.
STEP = np.dtype([("step", "<i8"), ("tokens", "<i8"), ("phase", "<i8"), ("spans", "<i8")])

NAMES = (
    "step",
    "schedule",
    "lockstep",
    "rebalance",
    "forward",
    "sampling",
    "commit",
    "drafting",
    "attention",
    "gate",
    "dispatch",
    "experts",
    "combine",
    "part",  # of the model, by a name that is not among these
)
THREADS = ("host", "parts", "parts of the second half")
HOST, PARTS, SECOND = range(3)


class StartTrace(msgspec.Struct, frozen=True, tag=True):
    """End by itself after so many steps with tokens, MAX_TRACE_STEPS at most."""

    trace: int
    steps: int


class StopTrace(msgspec.Struct, frozen=True, tag=True):
    trace: int


class TraceSteps(msgspec.Struct, frozen=True, tag=True):
    """Some complete steps of one rank. host: its machine; clock: the same where two ranks read one
    monotonic clock. steps [S] of STEP, spans [N] of SPAN, in order of steps."""

    rank: int
    trace: int
    host: str
    clock: str
    steps: bytes
    spans: bytes


class TraceEnded(msgspec.Struct, frozen=True, tag=True):
    """All steps of this rank have been sent. full: it ended early, for want of room."""

    rank: int
    trace: int
    num_steps: int
    full: bool = False


FromFrontEnd = StartTrace | StopTrace
FromRank = TraceSteps | TraceEnded
