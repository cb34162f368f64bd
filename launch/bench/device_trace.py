"""What a device did while something ran: spans of its kernels, by torch's profiler.

Knows the profiler's events. Where it sees no device (CPUs, or a machine on which counters may not
be read) there are no spans, and a line that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

MOST_NAMES = 14  # by_kernel: the rest is one entry


@dataclass(frozen=True)
class Span:
    """A kernel or a copy; seconds since some moment that all spans share."""

    name: str
    start: float
    end: float


def device_spans(device: torch.device, call: Callable[[], object]) -> tuple[list[Span], str]:
    """Run it under the profiler -> spans of the device, and why there are none."""
    if device.type != "cuda":
        call()
        return [], "not traced: no device"
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize(device)
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            call()
            torch.cuda.synchronize(device)
        spans = spans_of(profiled.events() or ())
    except RuntimeError as error:  # the profiler's own: counters are taken, or not allowed
        return [], f"not traced: {(str(error).splitlines() or [''])[0][:80]}"
    return spans, "" if spans else "not traced: the profiler saw no kernel"


def spans_of(events: Iterable[Any]) -> list[Span]:
    """Of the profiler's events those of a device (microseconds there)."""
    return [
        Span(str(e.name), e.time_range.start / 1e6, e.time_range.end / 1e6)
        for e in events
        if "cuda" in str(e.device_type).lower() and e.time_range.end > e.time_range.start
    ]


def busy_seconds(spans: Iterable[Span]) -> float:
    """Time in which at least one runs."""
    busy, until = 0.0, float("-inf")
    for span in sorted(spans, key=lambda s: s.start):
        busy += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return busy


def by_kernel(spans: Iterable[Span], most: int = MOST_NAMES) -> dict[str, float]:
    """Seconds by name, the longest first; those beyond `most` together as "other"."""
    total: dict[str, float] = {}
    for span in spans:
        name = short_name(span.name)
        total[name] = total.get(name, 0.0) + span.end - span.start
    ordered = sorted(total.items(), key=lambda item: -item[1])
    kept = dict(ordered[:most])
    rest = sum(seconds for _, seconds in ordered[most:])
    return kept | ({"other": rest} if rest else {})


def short_name(name: str) -> str:
    """A C++ kernel's without its namespaces and template arguments."""
    head = name.removeprefix("void ").split("<")[0].split("(")[0]
    return head.rsplit("::", 1)[-1][:40] or name[:40]
