"""A JobTrace as a file for Perfetto and chrome://tracing: JSON trace events. Pure.

A process for each rank (pid), a thread for the host, one for the parts of the layers and, with
overlap, one for those of the second half. Times are microseconds since the first span, by the
clock of rank 0. A span is a complete event ("X"): spans of a thread follow or contain each other.
Dispatch and combine of a layer are two spans each; `side` says what they do: rows leave (send),
rows are waited for (receive). What the host does itself (schedule, commit) lies within spans
named host.

Knows the format. Knows nothing of how spans came.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from moeserve.tracing_clocks import Offset
from moeserve.tracing_job import JobTrace, RankTrace
from moeserve.wire_trace import HOST, NAMES, SECOND, THREADS

# What stands before the sending half: of a layer's dispatch the gate, of its combine the experts.
SENDS = {"dispatch": NAMES.index("gate"), "combine": NAMES.index("experts")}
HOST_WORK = ("schedule", "commit")
STEP_NAME = NAMES.index("step")
TIMES = "of the host: of a GPU's kernels a span tells when they were asked for"
PHASES = ("idle", "prefill", "decode", "mixed")  # moeserve.lockstep.Phase


def chrome_json(trace: JobTrace, offsets: Sequence[Offset], about: dict[str, Any]) -> str:
    """The file. about: whatever is to be known of it, under otherData."""
    return "".join(chrome_pieces(trace, offsets, about))


def chrome_pieces(
    trace: JobTrace, offsets: Sequence[Offset], about: dict[str, Any]
) -> Iterator[str]:
    """The same in pieces: a line an event, so that a large one need not be held as text."""
    events = _events(trace, offsets)
    head = {"times": TIMES} | about
    yield '{"displayTimeUnit":"ms","otherData":' + json.dumps(head) + ',"traceEvents":[\n'
    comma = ""
    for event in events:
        yield comma + json.dumps(event, separators=(",", ":"))
        comma = ",\n"
    yield "\n]}\n"


def _events(trace: JobTrace, offsets: Sequence[Offset]) -> Iterator[dict[str, Any]]:
    starts = [
        int(rank.spans["start"].min()) - offset.ns
        for rank, offset in zip(trace.ranks, offsets, strict=True)
        if len(rank.spans)
    ]
    zero = min(starts, default=0)
    for rank, offset in zip(trace.ranks, offsets, strict=True):
        yield from _names(rank, offset)
        yield from _spans(rank, zero + offset.ns)


def _names(rank: RankTrace, offset: Offset) -> Iterator[dict[str, Any]]:
    where = f"rank {rank.rank} ({rank.host})"
    yield _meta(rank.rank, 0, "process_name", {"name": where})
    yield _meta(rank.rank, 0, "process_sort_index", {"sort_index": rank.rank})
    if offset.error:
        label = f"clock {offset.ns / 1e3:+.1f} us, +- {offset.error / 1e3:.1f} us"
        yield _meta(rank.rank, 0, "process_labels", {"labels": label})
    used = set(np.unique(rank.spans["thread"]).tolist()) | {HOST}
    for thread in sorted(used):
        yield _meta(rank.rank, thread, "thread_name", {"name": THREADS[thread]})
        yield _meta(rank.rank, thread, "thread_sort_index", {"sort_index": thread})


def _meta(pid: int, tid: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": name, "args": arguments}


def _spans(rank: RankTrace, zero: int) -> Iterator[dict[str, Any]]:
    """Thread by thread, in order of their starts, what contains before what is contained."""
    spans, steps = rank.spans, rank.steps
    order = np.lexsort((-spans["ns"], spans["start"], spans["thread"]))
    of_step = rank.step_of_span
    numbers, tokens, phases = (steps[x].tolist() for x in ("step", "tokens", "phase"))
    before = dict.fromkeys(range(len(THREADS)), -1)
    for index in order.tolist():
        name, thread, layer, start, length = spans[index].item()
        title = NAMES[name]
        side = ""
        if title in SENDS:
            side = "send" if before[thread] == SENDS[title] else "receive"
        before[thread] = name
        step = of_step[index]
        arguments: dict[str, Any] = {"step": numbers[step]}
        if name == STEP_NAME:
            arguments |= {"tokens": tokens[step], "phase": PHASES[phases[step] & 3]}
        if layer >= 0:
            arguments["layer"] = layer
        if side:
            arguments["side"] = side
        if thread == SECOND:
            arguments["half"] = 1
        span = {
            "ph": "X",
            "name": title,
            "cat": "host" if thread == HOST else "layer",
            "pid": rank.rank,
            "tid": thread,
            "ts": (start - zero) / 1000,
            "dur": max(length, 0) / 1000,
            "args": arguments,
        }
        if title in HOST_WORK:  # under the name that the step's breakdown has for it
            yield span | {"name": "host"}
        yield span
