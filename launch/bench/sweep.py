"""`moeserve bench sweep`: a ladder of rates up to the knee, goodput at each, a table and a picture.

The knee is the highest rate at which nearly all calls keep the limits and the server keeps up: what
was asked for, what it delivers then (never more), and what came of the whole run are named apart.
Without limits they are multiples of what one call alone takes. Knows runs; which rates come next is
decided purely (`next_rate`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launch.bench.serve_call import Fault
from launch.bench.serve_flags import Ask
from launch.bench.serve_load import Load
from launch.bench.serve_run import Run
from launch.bench.sweep_pace import LONG, pace_of
from launch.output import unwritable
from moeserve.errors import ConfigError, MoeserveError
from moeserve.terminal import say

FORMAT = "moeserve bench sweep 1"
KEPT = 0.9  # share of calls within the limits at which a rate still counts as served
ALONE_CALLS = 4  # one after another, to see what a call takes alone
TTFT_TIMES, TPOT_TIMES = 5.0, 3.0  # limits where none are given: times what a call takes alone
FINE = 1.2  # a knee is found where the rates around it are this near
MOST_POINTS = 12
REFUSALS = ("http 429", "http 503", Fault.TIMEOUT)  # of a server that has too much to do
POINT_SECONDS = 15.0  # longer where calls take long, so that a point can tell
SLOWER = 3.0  # times what a call takes alone, under load
POINT_CALLS = 20  # a point has at least so many calls


@dataclass(frozen=True)
class Sweep:
    """The command's own flags. rates: comma-separated; None: found by itself."""

    rates: str | None = None
    plot: Path | None = None

    def run(self, ask: Ask) -> None:
        """Raises SystemExit with the exit code of `bench serve`."""
        from launch.bench.serve import INTERRUPTED, need_pictures, write_json

        rates = self._rates()
        if problems := unwritable("--plot", self.plot):
            raise ConfigError(problems)
        load = replace(replace(ask, rate=1.0).load(), rate=None)
        if load.seconds is not None and ask.requests is not None:
            raise ConfigError(["sweep: give --seconds or --requests, of each rate"])
        for flag, file in (("--plot", self.plot), ("--html", ask.html)):
            if file is not None:
                need_pictures(flag)
        if self.plot is not None and self.plot.suffix not in (".png", ".svg"):
            raise ConfigError([f"--plot {self.plot}: must end in .png or .svg"])
        run = Run.open(ask, load)
        try:
            run.warm_up(load)
            report = _climb(run, load, rates)
        finally:
            run.peer.close()
        write_json(ask.out, report)
        self._show(report, ask)
        if report["interrupted"]:
            raise SystemExit(INTERRUPTED)
        if report["problems"] and not ask.allow_errors:
            raise SystemExit(1)

    def _rates(self) -> list[float] | None:
        if self.rates is None:
            return None
        try:
            rates = [float(x) for x in self.rates.split(",")]
        except ValueError:
            rates = []
        if not rates or min(rates) <= 0:
            raise ConfigError([f"--rates {self.rates!r}: must be numbers above 0, such as 1,2,4"])
        return rates

    def _show(self, report: dict[str, Any], ask: Ask) -> None:
        from launch.bench.screen import only_json, wide_console
        from launch.bench.sweep_show import draw, page, show

        if self.plot is not None:
            draw(report).savefig(self.plot)
        if ask.html is not None:
            ask.html.write_text(page(report), encoding="utf-8")
        if ask.json:
            only_json(report)
        else:
            show(report, wide_console())
        for file in (ask.out, ask.html, self.plot):
            if file is not None:
                say(f"written: {file}")
        for problem in report["problems"]:
            say(f"PROBLEM: {problem}")


def next_rate(
    points: Sequence[tuple[float, bool]], first: float, fine: float = FINE
) -> float | None:
    """The rate to try next, of those tried as (rate, whether it was served); None: the knee is
    found. Doubles until one is not served (halves, if the first is not), then goes between."""
    if not points:
        return first
    served = [rate for rate, fine_ in points if fine_]
    missed = [rate for rate, fine_ in points if not fine_]
    if len(points) >= MOST_POINTS:
        return None
    if not missed:
        return 2 * max(served)
    low = max((x for x in served if x < min(missed)), default=None)
    if low is None:
        lowest = min(missed)
        return lowest / 2 if lowest > first / 64 else None
    high = min(missed)
    return (low * high) ** 0.5 if high / low > fine else None


def _climb(run: Run, load: Load, rates: list[float] | None) -> dict[str, Any]:
    """All points, from low to high as they are found, and the knee."""
    alone = _alone(run, load)
    ttft, tpot, words = _limits(run.ask, alone)
    run = replace(run, ask=replace(run.ask, ttft_limit=ttft, tpot_limit=tpot))
    first = 0.5e3 / alone["latency_ms"]["e2e"]["mean"]
    least = max(POINT_SECONDS, LONG * SLOWER * 1e-3 * alone["latency_ms"]["e2e"]["mean"])
    points: list[dict[str, Any]] = []
    tried: list[tuple[float, bool]] = []
    while True:
        if rates is not None:
            rate = rates[len(points)] if len(points) < len(rates) else None
        else:
            rate = next_rate(tried, first)
        if rate is None:
            break
        point, stopped = _point(run, load, rate, least)
        points.append(point)
        tried.append((rate, is_served(point)))
        if stopped:
            break
    knee = max((x for x in points if is_served(x)), key=lambda x: float(x["rate"]), default=None)
    requests = run.ask.requests
    whole = dict(alone)
    for name in ("samples", "over_time", "steps", "latency_ms", "throughput", "errors", "tokens"):
        whole.pop(name)
    whole["settings"] |= {
        "when": "rates, " + load.arrivals,
        "requests": requests,
        "seconds": None if requests else load.seconds or least,
    }
    return whole | {
        "format": FORMAT,
        "limits": {"ttft_ms": ttft, "tpot_ms": tpot},
        "limits_are": words,
        "alone": {"latency_ms": alone["latency_ms"]},
        "points": sorted(points, key=lambda x: float(x["rate"])),
        "knee": None if knee is None else knee["rate"],  # asked for
        "knee_delivered": None if knee is None else knee["pace"]["delivered"] * load.turns,
        "knee_came": None if knee is None else knee["pace"]["offered"] * load.turns,
        "knee_whole_run": (
            None if knee is None else knee["throughput"]["all"]["requests_per_second"]
        ),
        "best_goodput_requests_per_second": max(
            (x["goodput_requests_per_second"] for x in points), default=0.0
        ),
        "interrupted": any(x["interrupted"] for x in points),
        "problems": [f"at {x['rate']:.3g} a second: {p}" for x in points for p in faults(x)],
        "caveats": _caveats(points),
    }


def faults(point: dict[str, Any]) -> list[str]:
    """Problems of a point, save that a server refuses or lets wait what is more than it can take:
    that is what the knee is about."""
    if is_served(point):
        return list(point["problems"])
    refusals = tuple(f": {kind}" for kind in REFUSALS)
    return [x for x in point["problems"] if not any(kind in x for kind in refusals)]


def _caveats(points: list[dict[str, Any]]) -> list[str]:
    """Those of all points once, the others with their rate."""
    told = list(dict.fromkeys(c for x in points for c in x["caveats"]))
    common = [c for c in told if all(c in x["caveats"] for x in points)]
    rest = [
        f"at {x['rate']:.3g} a second: {c}"
        for x in points
        for c in [*(c for c in x["caveats"] if c not in common), *_refused(x), *_behind(x)]
    ]
    return [*common, *rest]


def _refused(point: dict[str, Any]) -> list[str]:
    kept = faults(point)
    return [x for x in point["problems"] if x not in kept]


def _behind(point: dict[str, Any]) -> list[str]:
    """What its pace says, where it does not keep up."""
    pace = point["pace"]
    if pace["keeps_up"] is None:
        return [
            f"too short to tell whether the server keeps up (calls came for {pace['seconds']:.3g} "
            "s: more --seconds or --requests)"
        ]
    if pace["keeps_up"]:
        return []
    offered = "" if pace["offered"] is None else f" of {pace['offered']:.3g} that came"
    return [f"the server did not keep up: {pace['delivered']:.3g} a second{offered}"]


def keeps_limits(point: dict[str, Any]) -> bool:
    """Nearly all calls kept the limits."""
    sent = point["calls"]["sent"] - point["calls"]["cut_short_here"]
    return bool(sent) and point["calls"]["within_limits"] >= KEPT * sent


def is_served(point: dict[str, Any]) -> bool:
    """The limits were kept, and the server kept up for long enough to tell."""
    return keeps_limits(point) and point["pace"]["keeps_up"] is True


def _alone(run: Run, load: Load) -> dict[str, Any]:
    quiet = replace(load, rate=None, concurrency=1, seconds=None, requests=ALONE_CALLS)
    report, driven = run.measure(quiet, "one call at a time")
    if driven.interrupted:
        raise KeyboardInterrupt
    if report["latency_ms"]["e2e"] is None:
        raise MoeserveError("one call at a time: " + "; ".join(report["problems"]))
    return report


def _limits(ask: Ask, alone: dict[str, Any]) -> tuple[float | None, float | None, str]:
    if ask.ttft_limit is not None or ask.tpot_limit is not None:
        return ask.ttft_limit, ask.tpot_limit, "as given"
    held = alone["latency_ms"]
    ttft = TTFT_TIMES * held["ttft"]["p50"]
    tpot = None if held["tpot"] is None else TPOT_TIMES * held["tpot"]["p50"]
    words = f"{TTFT_TIMES:g} x the TTFT and {TPOT_TIMES:g} x the TPOT of one call alone"
    return ttft, tpot, words


def _point(run: Run, load: Load, rate: float, least_seconds: float) -> tuple[dict[str, Any], bool]:
    requests, seconds = run.ask.requests, load.seconds
    if requests is None:
        requests = max(POINT_CALLS, round(rate * (seconds or least_seconds)))
    asked = replace(load, rate=rate, concurrency=None, seconds=None, requests=requests)
    report, driven = run.measure(asked, f"{rate:.3g} a second")
    for name in ("samples", "over_time", "server", "client", "format", "url", "model", "settings"):
        report.pop(name)
    pace = pace_of(driven.calls).capped(rate).as_json()
    return {"rate": rate, "pace": pace} | report, driven.interrupted
