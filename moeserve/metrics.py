"""/metrics in Prometheus' text form: what the front end measured and what the ranks last reported.

Series stay few whatever the model: labels are the rank, a kind of block or a finish reason; layers
and the hottest experts are in `expert_metrics`, which bounds them. Knows nothing of HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moeserve.expert_metrics import expert_series
from moeserve.request import FinishReason
from moeserve.speculation_metrics import speculation_series

if TYPE_CHECKING:
    from moeserve.client import EngineClient
    from moeserve.streams import Flight

# How old what ranks told may be (rank_loop.STATS_EVERY); said with each of their series.
_AGE = "as last told by the rank, once a second while it works and when it falls idle"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)


class Metrics:
    """A registry of its own, so that two servers in one process do not mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a time of birth for each series, which nobody asks for

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"moeserve_{name}", text, buckets=buckets, registry=self.registry)

        self.ttft = histogram(
            "time_to_first_token_seconds", "From arrival to the first token", _SECONDS
        )
        self.tpot = histogram(
            "time_per_output_token_seconds",
            "Mean time between tokens of a request, after its first",
            _TOKEN_SECONDS,
        )
        self.e2e = histogram("request_seconds", "From arrival to the last token", _SECONDS)
        self.prompt_length = histogram("request_prompt_tokens", "Prompt length", _TOKENS)
        self.output_length = histogram("request_output_tokens", "Output length", _TOKENS)
        self.requests = Counter(
            "moeserve_requests",
            "Sequences that ended, by finish reason",
            ["finish_reason"],
            registry=self.registry,
        )
        self.http_errors = Counter(
            "moeserve_http_errors", "Refused or failed calls", ["status"], registry=self.registry
        )
        for reason in ("stop", "length", "tool_calls", "abort", "error"):
            self.requests.labels(reason)
        # Requests whose words may be tool calls: True once the engine has ended one by a stop,
        # which is counted when its words are known.
        self._unread: dict[str, bool] = {}

    def wait_for_words(self, request_ids: Iterable[str]) -> None:
        """Count these by what `words_ended` will say, where the engine says that they stopped."""
        self._unread |= dict.fromkeys(request_ids, False)

    def words_ended(self, request_id: str, reason: str | None) -> None:
        """reason: the answer's; None where nobody read it to its end."""
        if self._unread.pop(request_id, False):
            self.requests.labels("tool_calls" if reason == "tool_calls" else "stop").inc()

    def first_token(self, flight: Flight) -> None:
        self.ttft.observe(max(0.0, time.time() - flight.request.arrival))

    def finished(self, flight: Flight) -> None:
        reason = flight.finish_reason
        if reason is FinishReason.STOP and flight.request.request_id in self._unread:
            self._unread[flight.request.request_id] = True
        else:
            self._unread.pop(flight.request.request_id, None)
            self.requests.labels(reason.value if reason is not None else "error").inc()
        self.prompt_length.observe(len(flight.request.prompt_token_ids))
        self.output_length.observe(flight.num_output_tokens)
        if flight.first_token_at is None or flight.last_token_at is None:
            return
        self.e2e.observe(max(0.0, flight.last_token_at - flight.request.arrival))
        if flight.num_output_tokens > 1:
            span = flight.last_token_at - flight.first_token_at
            self.tpot.observe(max(0.0, span) / (flight.num_output_tokens - 1))

    def watch(self, client: EngineClient) -> None:
        """Report this client's ranks from now on."""
        self.registry.register(_FleetCollector(client))

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _FleetCollector(Collector):
    """Reads the client's state when asked; keeps none."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        client, fleet = self._client, self._client.fleet
        now = time.monotonic()
        plain = {
            "ready": ("1 when requests are taken", fleet.all_ready and client.failing is None),
            "requests_in_flight": ("Sequences waiting or running", client.num_in_flight),
            "queue_limit": ("Most sequences in flight (max_queue)", client.max_queue),
            "lockstep_stalled": (
                "1 when no step has ended for lockstep_timeout",
                fleet.stalled(now, client.lockstep_timeout) is not None,
            ),
            "expert_balance": (
                "Most loaded over mean routed expert, mean of layers",
                _balance(client),
            ),
            "shared_expert_replicas": (
                "Slots that hold the shared expert, in the layer with the fewest; 0: it is in none",
                fleet.shared_replicas(),
            ),
        }
        for name, (text, value) in plain.items():
            yield GaugeMetricFamily(f"moeserve_{name}", text, value=float(value))
        yield CounterMetricFamily(
            "moeserve_requests_rejected", "Sequences refused by a full queue", client.num_rejected
        )
        states = [(str(x.rank), x) for x in fleet.ranks if x.stats is not None]
        cached = sum(x.stats.cached_tokens for _, x in states if x.stats)
        prompt = sum(x.stats.prompt_tokens for _, x in states if x.stats)
        yield GaugeMetricFamily(
            "moeserve_prefix_cache_hit_ratio",
            "Share of prompt tokens found in the cache",
            value=cached / prompt if prompt else 0.0,
        )
        blocks = GaugeMetricFamily(
            "moeserve_kv_blocks",
            "KV blocks: used (by sequences), free (the others), cached (of the free: prefix "
            f"cache); {_AGE}",
            labels=["rank", "state"],
        )
        for rank, state in states:
            assert state.stats is not None
            blocks.add_metric([rank, "used"], state.stats.num_used_blocks)
            blocks.add_metric([rank, "cached"], state.stats.num_cached_blocks)
            blocks.add_metric([rank, "free"], state.stats.num_free_blocks)
        yield blocks
        gauges = {
            "queue_waiting": ("Sequences waiting on the rank", "num_waiting"),
            "running": ("Sequences running on the rank", "num_running"),
            "kv_wasted_slots": ("Unfilled slots in last blocks", "num_wasted_slots"),
            "last_step_seconds": ("Duration of the last step", "step_seconds_last"),
            "rank_expert_balance": ("Most loaded over mean rank, last window", "rank_balance"),
            "placement_generation": ("Expert placement in use", "placement_generation"),
            "resident_bytes": ("Resident memory of the rank", "rss_bytes"),
        }
        for name, (text, field) in gauges.items():
            gauge = GaugeMetricFamily(f"moeserve_{name}", f"{text}; {_AGE}", labels=["rank"])
            for rank, state in states:
                gauge.add_metric([rank], getattr(state.stats, field))
            yield gauge
        age = GaugeMetricFamily(
            "moeserve_lockstep_age_seconds", "Since the rank's last step ended", labels=["rank"]
        )
        usage = GaugeMetricFamily(
            "moeserve_kv_usage_ratio", "Share of KV blocks held by sequences", labels=["rank"]
        )
        for rank, state in states:
            assert state.stats is not None
            age.add_metric([rank], max(0.0, now - state.progress))
            total = state.ready.num_blocks if state.ready is not None else 0
            usage.add_metric([rank], state.stats.num_used_blocks / total if total else 0.0)
        yield age
        yield usage
        counters = {
            "steps": ("Steps", "step"),
            "prompt_tokens": ("Prompt tokens taken", "prompt_tokens"),
            "computed_prompt_tokens": ("Prompt tokens computed", "computed_prompt_tokens"),
            "cached_tokens": ("Prompt tokens found in the prefix cache", "cached_tokens"),
            "output_tokens": ("Tokens sampled", "output_tokens"),
            "preemptions": ("Sequences put back to the queue", "preemptions"),
            "finished": ("Sequences finished", "finished"),
            "aborted": ("Sequences aborted", "aborted"),
            "step_seconds": ("Time spent in steps", "step_seconds_total"),
            "dispatch_bytes": ("Bytes sent to other ranks by dispatch", "dispatch_bytes"),
        }
        for name, (text, field) in counters.items():
            counter = CounterMetricFamily(f"moeserve_{name}", f"{text}; {_AGE}", labels=["rank"])
            for rank, state in states:
                counter.add_metric([rank], getattr(state.stats, field))
            yield counter
        parts = CounterMetricFamily(
            "moeserve_step_part_seconds",
            f"Time spent in steps, by part; lockstep is waiting for other ranks' votes; {_AGE}",
            labels=["rank", "part"],
        )
        for rank, state in states:
            assert state.stats is not None
            for part, seconds in state.stats.part_seconds.items():
                parts.add_metric([rank, part], seconds)
        yield parts
        yield from expert_series(fleet)
        yield from _dispatch(client)
        yield from _rebalancing(client)
        told = [(rank, x.stats.speculation) for rank, x in states if x.stats is not None]
        yield from speculation_series([(rank, x) for rank, x in told if x is not None])


def _dispatch(client: EngineClient) -> Iterator[Metric]:
    """Which backend each phase has, as labels of a series that is always 1."""
    told = client.fleet.dispatch()
    if told is None:
        return
    phases = {name: told.get(name) for name in ("prefill", "decode")}
    labels = {n: str(x["backend"]) for n, x in phases.items() if isinstance(x, dict)}
    for name, value in (("wire", "format"), ("overlap", "from_tokens")):
        part = told.get(name)
        if isinstance(part, dict):
            given = part.get(value)
            labels |= {name: "off" if given is None else str(given)}
            labels |= {f"{name}_reason": str(part.get("reason"))}
    if "deterministic" in told:
        labels["deterministic"] = str(told["deterministic"]).lower()
    info = GaugeMetricFamily(
        "moeserve_dispatch_info",
        "How tokens travel; overlap: tokens a rank from which steps go in halves, or off",
        labels=[*labels],
    )
    info.add_metric([*labels.values()], 1)
    yield info
    masked = told["masked_ranks"]
    assert isinstance(masked, list)
    yield GaugeMetricFamily(
        "moeserve_masked_ranks", "Ranks that dispatchers leave out", value=len(masked)
    )


def _rebalancing(client: EngineClient) -> Iterator[Metric]:
    """Of the whole job, as rank 0 tells it; nothing where experts cannot move."""
    first = client.fleet.ranks[0].stats
    stats = None if first is None else first.rebalance
    if stats is None:
        return
    results = CounterMetricFamily(
        "moeserve_rebalances", "Looks at the expert load, by what came of them", labels=["result"]
    )
    for result in ("done", "nothing", "abandoned"):
        results.add_metric([result], getattr(stats, result))
    yield results
    counters = {
        "moved_slots": "Expert slots that got another expert",
        "moved_bytes": "Bytes of experts that went from rank to rank",
        "seconds": "From the step that began a rebalance to the one that ended it",
        "switch_seconds": "What steps waited while moved experts were put to use",
        "gather_seconds": "What steps waited while loads were summed over ranks",
    }
    for name, text in counters.items():
        yield CounterMetricFamily(f"moeserve_rebalance_{name}", text, getattr(stats, name))
    yield GaugeMetricFamily(
        "moeserve_rebalance_running", "1 while experts move", value=float(stats.state != "idle")
    )
    yield GaugeMetricFamily(
        "moeserve_rebalance_stage_seconds",
        "How long the stage of a rebalance has lasted; 0 while there is none",
        value=0.0 if stats.state == "idle" else stats.seconds_in_state,
    )
    balance = GaugeMetricFamily(
        "moeserve_expert_utilisation",
        "Mean over busiest rank load, mean of layers: at the last look, before and after the last "
        "plan",
        labels=["when"],
    )
    balance.add_metric(["last"], stats.utilisation)
    balance.add_metric(["before"], stats.utilisation_before)
    balance.add_metric(["after"], stats.utilisation_after)
    yield balance


def _balance(client: EngineClient) -> float:
    """Load of the busiest routed expert over the mean one, mean over layers; 0 before any load."""
    totals = client.fleet.expert_totals()[:, : client.fleet.num_routed_experts()]
    totals = totals[totals.sum(axis=1) > 0]
    return float((totals.max(axis=1) / totals.mean(axis=1)).mean()) if len(totals) else 0.0
