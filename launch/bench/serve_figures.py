"""What the calls of `moeserve bench serve` come to: tokens a second of node and GPU, latencies,
errors by kind. Pure: from calls to plain data. Knows nothing of HTTP or of screens.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from launch.bench.figures import percentile
from launch.bench.serve_call import CUT, Call

BINS = 60  # of the picture of throughput over time
EXAMPLES = 3  # of what a kind of error said
_BUSY, _COARSE = 0.85, 0.25  # share of a core; of a figure that timers may be late by


@dataclass(frozen=True)
class Limits:
    """Milliseconds within which a call is good service; None: no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def kept_by(self, call: Call) -> bool:
        """A call of one token has no time a token; one of more that came at once hides it, and
        keeps no limit of it."""
        if not call.good or call.ttft is None:
            return False
        if self.tpot_ms is not None and call.at_once:
            return False
        if self.ttft_ms is not None and 1e3 * call.ttft > self.ttft_ms:
            return False
        return self.tpot_ms is None or call.tpot is None or 1e3 * call.tpot <= self.tpot_ms

    def as_json(self) -> dict[str, float | None]:
        return {"ttft_ms": self.ttft_ms, "tpot_ms": self.tpot_ms}


def latency(values: Iterable[float]) -> dict[str, float] | None:
    """Milliseconds, of seconds; None of none."""
    ordered = sorted(1e3 * x for x in values)
    if not ordered:
        return None
    return {
        "mean": sum(ordered) / len(ordered),
        "p50": percentile(ordered, 50),
        "p90": percentile(ordered, 90),
        "p99": percentile(ordered, 99),
        "least": ordered[0],
        "most": ordered[-1],
        "count": len(ordered),
    }


def gaps(call: Call) -> list[float]:
    """Seconds between events of a call, whatever number of tokens each brought: what can be seen of
    every server alike. How many they bring is told beside it (`tokens_an_event`). None of an answer
    whose events were read at one moment."""
    if call.in_one_piece:
        return []
    return [b - a for a, b in zip(call.times, call.times[1:], strict=False)]


def tokens_an_event(calls: Sequence[Call]) -> float | None:
    """Of good calls; None where nothing tells how many tokens there were. Above 1: several came at
    once, or some had no text to be seen by."""
    seen = [x for x in calls if x.good and x.times]
    if not seen or any(x.output_tokens is None and x.counts is None for x in seen):
        return None
    return sum(x.num_output for x in seen) / sum(len(x.times) for x in seen)


def ended(calls: Sequence[Call]) -> list[Call]:
    """Those whose end was waited for."""
    return [x for x in calls if x.fault != CUT]


def figures(
    calls: Sequence[Call], nodes: int, gpus: int, limits: Limits, gpus_are: str = "GPUs"
) -> dict[str, Any]:
    """Everything that calls alone tell. Rates are over the time from the first sending to the last
    end; tokens of calls that failed or were cut count as far as they came, their latencies not."""
    done = ended(calls)
    good = [x for x in done if x.good]
    begin = min((x.sent for x in calls), default=0.0)
    end = max((x.ended for x in calls), default=0.0)
    seconds = max(end - begin, 1e-9)
    kept = sum(limits.kept_by(x) for x in good)
    tokens = _tokens(calls)
    rates: dict[str, float | None] = {
        "requests_per_second": len(good) / seconds,
        "input_tokens_per_second": _over(tokens["input"], seconds),
        "computed_input_tokens_per_second": _over(tokens["computed_input"], seconds),
        "cached_input_tokens_per_second": _over(tokens["cached_input"], seconds),
        "output_tokens_per_second": tokens["output"] / seconds,
    }
    latencies = {
        "ttft": latency(x.ttft for x in good if x.ttft is not None),
        "tpot": latency(x.tpot for x in good if x.tpot is not None),
        "itl": latency(gap for x in good for gap in gaps(x)),
        "e2e": latency(x.seconds for x in good),
    }
    known = tokens["cached_input"] is not None and tokens["input_with_cached_told"]
    return {
        "seconds": seconds,
        "nodes": nodes,
        "gpus": gpus,
        "gpus_are": gpus_are,
        "calls": {
            "sent": len(calls),
            "good": len(good),
            "failed": len(done) - len(good),
            "cut_short_here": len(calls) - len(done),
            "within_limits": kept,
        },
        "errors": errors_by_kind(calls),
        "tokens": tokens,
        "throughput": {
            "all": rates,
            "per_node": {name: _over(value, nodes) for name, value in rates.items()},
            "per_gpu": {name: _over(value, gpus) for name, value in rates.items()},
        },
        "latency_ms": latencies,
        "limits": limits.as_json(),
        "goodput_requests_per_second": kept / seconds,
        "cache_hit_share": (
            tokens["cached_input"] / tokens["input_with_cached_told"] if known else None
        ),
        "tokens_an_event": tokens_an_event(good),
        "not_streamed": {
            "in_one_event": sum(x.in_one_event for x in good),
            "in_one_piece": sum(x.in_one_piece for x in good),
        },
        "tokens_are": tokens_are(calls),
    }


def tokens_are(calls: Sequence[Call]) -> str:
    """By what output tokens of good calls were counted: usage, ids or events; or nothing was."""
    said = [x for x in calls if x.good]
    if not said:
        return "nothing"
    if all(x.output_tokens is not None for x in said):
        return "usage"
    return "ids" if all(x.counts is not None for x in said) else "events"


def errors_by_kind(calls: Sequence[Call]) -> dict[str, dict[str, Any]]:
    """Most frequent first, with some of what was said."""
    failed = [x for x in ended(calls) if not x.good]
    counts = Counter(str(x.fault) for x in failed)
    kinds: dict[str, dict[str, Any]] = {}
    for kind, count in counts.most_common():
        said = dict.fromkeys(x.detail for x in failed if x.fault == kind and x.detail)
        kinds[kind] = {"count": count, "examples": list(said)[:EXAMPLES]}
    return kinds


def _tokens(calls: Sequence[Call]) -> dict[str, Any]:
    """None for what the server did not tell of any call; cached and computed ones are of the calls
    that told them."""
    known = [x for x in calls if x.prompt_tokens is not None]
    prompt = sum(x.prompt_tokens or 0 for x in known) if known else None
    told = [x for x in known if x.cached_tokens is not None]
    cached = sum(x.cached_tokens or 0 for x in told) if told else None
    theirs = sum(x.prompt_tokens or 0 for x in told) if told else None
    computed = None if theirs is None or cached is None else theirs - cached
    output = sum(x.num_output for x in calls)
    return {
        "input": prompt,
        "computed_input": computed,
        "cached_input": cached,
        "input_with_cached_told": theirs,
        "calls_with_input_told": len(known),
        "calls_with_cached_told": len(told),
        "output": output,
        "asked_input": sum(x.asked_input for x in calls),
        "asked_output": sum(x.asked_output for x in calls),
    }


def _over(value: float | None, by: float) -> float | None:
    return None if value is None else value / by


def over_time(calls: Sequence[Call], bins: int = BINS) -> dict[str, list[float]]:
    """Bins of equal width from the first sending on: output tokens a second, calls in flight."""
    begin = min((x.sent for x in calls), default=0.0)
    end = max((x.ended for x in calls), default=0.0)
    width = max(end - begin, 1e-9) / bins
    edges = [begin + i * width for i in range(1, bins)]
    tokens = [0.0] * bins
    flight = [0.0] * bins
    for call in calls:
        weight = call.num_output / len(call.times) if call.times else 0.0
        for i, when in enumerate(call.times):
            count = weight if call.counts is None else call.counts[i]
            tokens[bisect.bisect_right(edges, when)] += count
        first = bisect.bisect_right(edges, call.sent)
        last = bisect.bisect_right(edges, call.ended)
        for place in range(first, last + 1):
            low, high = begin + place * width, begin + (place + 1) * width
            flight[place] += max(0.0, min(high, call.ended) - max(low, call.sent)) / width
    return {
        "seconds": [(i + 0.5) * width for i in range(bins)],
        "output_tokens_per_second": [x / width for x in tokens],
        "in_flight": flight,
    }


def samples(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """A row a call, ordered by conversation and turn: what `compare` pairs and pictures show."""
    return [
        {
            "conversation": x.conversation,
            "turn": x.turn,
            "sent": round(x.sent, 6),
            "input": x.prompt_tokens,
            "cached": x.cached_tokens,
            "output": x.num_output,
            "ttft_ms": _ms(x.ttft),
            "tpot_ms": _ms(x.tpot),
            "e2e_ms": _ms(x.seconds),
            "fault": x.fault,
        }
        for x in sorted(calls, key=lambda x: (x.conversation, x.turn))
    ]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)


def generator(
    calls: Sequence[Call],
    lags: Sequence[float],
    cpu_share: float,
    workers: int,
    kept_up: bool | None = None,
) -> dict[str, Any]:
    """Was it the load generator that was measured? late_ms: sent after the time that was due (open
    loop only); loop_late_ms: how late a timer of the event loop came, which every time that was
    taken may be off by. kept_up: whether the server did; where it did not, timers that come late
    explain nothing, only a generator without a core to itself would. why: in words, "" where it was
    not the limit. coarse: figures that are hardly longer than timers are late."""
    late = latency(max(0.0, x.sent - x.due) for x in calls if x.due is not None)
    loop = latency(lags)
    good = [x for x in calls if x.good]
    ttft = latency(x.ttft for x in good if x.ttft is not None)
    spans = {  # what is read off the clock for each: of TPOT all tokens together
        "ttft": ttft,
        "tpot": latency(x.times[-1] - x.times[0] for x in good if x.tpot is not None),
        "itl": latency(gap for x in good for gap in gaps(x)),
    }
    coarse = {
        name: span["p50"]
        for name, span in spans.items()
        if loop is not None and span is not None and loop["p90"] > max(2.0, _COARSE * span["p50"])
    }
    why = []
    if cpu_share > _BUSY:
        why.append(f"it used {cpu_share:.0%} of a core: give it more --workers")
    if kept_up is not False:
        for name, words in (("ttft", "of the TTFT"), ("tpot", "from first to last token")):
            if name in coarse and loop is not None:
                why.append(
                    f"its event loop was {loop['p90']:.1f} ms late in one of ten cases, beside a "
                    f"median of {coarse[name]:.1f} ms {words} that it measured"
                )
        if late is not None and ttft is not None and late["p99"] > max(20.0, _COARSE * ttft["p50"]):
            why.append(f"one of a hundred calls was sent {late['p99']:.0f} ms after its time")
    if why and cpu_share < 0.5:
        why.append(f"its own work is {cpu_share:.0%} of a core: this machine is busy with others")
    return {
        "workers": workers,
        "cpu_share": cpu_share,
        "late_ms": late,
        "loop_late_ms": loop,
        "coarse": list(coarse),
        "server_kept_up": kept_up,
        "was_limit": bool(why),
        "why": "; ".join(why),
    }
