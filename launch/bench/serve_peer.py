"""The server under `moeserve bench serve`: its model, its ranks, and what it counts itself.

Ours tells all of it (/health, /metrics, /v1/experts, and /debug/state where the admin key allows);
of a peer only /v1/models is asked, and what is not known is None. Knows HTTP and the names of our
metrics; nothing of load.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np

from launch.bench.serve_prompts import Pool
from moeserve.errors import ConfigError, MoeserveError

SETTLE_SECONDS = 4.0  # ranks report once a second, and when they have nothing to do
_SAMPLE = re.compile(r"^moeserve_(\w+?)(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
# name -> values of the labels, by the order of their names -> number
Samples = dict[str, dict[tuple[str, ...], float]]


@dataclass(frozen=True)
class Snapshot:
    """What our server had counted at a moment. experts [L][E]."""

    samples: Samples = field(default_factory=dict)
    experts: dict[str, Any] | None = None

    def total(self, name: str) -> float:
        return sum(self.samples.get(name, {}).values())


class Peer:
    """A server by its URL. MoeserveError where nothing answers, ConfigError for what is no URL."""

    def __init__(
        self, url: str, api_key: str | None, admin_key: str | None, model: str | None
    ) -> None:
        if "://" not in url:
            url = "http://" + url
        try:
            parsed = httpx.URL(url)
        except (httpx.InvalidURL, ValueError) as error:
            raise ConfigError([f"URL {url!r}: {error}"]) from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            valid = "must be a server's address, such as http://127.0.0.1:8000"
            raise ConfigError([f"URL {url!r}: {valid}"])
        self.url = url.rstrip("/").removesuffix("/v1")
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._admin = {"Authorization": f"Bearer {admin_key or api_key}"}
        if not (admin_key or api_key):
            self._admin = {}
        timeout = httpx.Timeout(60, connect=5)
        self._http = httpx.Client(
            base_url=self.url,
            headers=self.headers,
            timeout=timeout,
            verify=parsed.scheme == "https",
        )
        card = self._card(model)
        self.model = str(card["id"])
        self.max_model_len: int | None = card.get("max_model_len")
        self.health = self._health()
        self.info = self._info() if self.ours else {}

    @property
    def ours(self) -> bool:
        return self.health is not None

    @property
    def ranks(self) -> list[dict[str, Any]]:
        return [] if self.health is None else list(self.health["ranks"])

    @property
    def num_nodes(self) -> int | None:
        """As the job was started; of a job that does not tell, machines by the names that ranks
        give (two nodes may have one name)."""
        told = ((self.health or {}).get("launch") or {}).get("nodes")
        hosts = {x.get("host") for x in self.ranks}
        return len(told or hosts) or None

    @property
    def here(self) -> bool:
        """By its address, it runs on this machine."""
        host = urlsplit(self.url).hostname or ""
        return host in ("localhost", "::1") or host.startswith("127.")

    def describe(self) -> dict[str, Any]:
        """As JSON, for the report."""
        if self.health is None:
            return {"ours": False}
        told = {
            name: self.info[name]
            for name in (
                "checkpoint",
                "model_type",
                "device",
                "dtype",
                "weights",
                "deterministic",
                "kernels",
                "dispatcher",
                "kv_tokens",
                "placement",
                "ranks_per_node",
            )
            if name in self.info
        }
        return {
            "ours": True,
            "ranks": len(self.ranks),
            "hosts": sorted({str(x.get("host")) for x in self.ranks}),
            "dispatch": self.health.get("dispatch"),
            "rebalancing": bool((self.health.get("rebalance") or {}).get("enabled")),
        } | told

    def pool(self) -> Pool:
        """Tokens to make prompts of, by the server's /tokenize; a guess where it has none."""

        def tokenize(text: str) -> list[int]:
            body = {"prompt": text, "add_special_tokens": False, "model": self.model}
            answer = self._http.post("/tokenize", json=body)
            answer.raise_for_status()
            return [int(x) for x in answer.json()["tokens"]]

        try:
            return Pool.of_server(tokenize)
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            return Pool.guessed(f"no /tokenize there: {type(error).__name__}; see --tokenizer")

    def snapshot(self) -> Snapshot:
        if not self.ours:
            return Snapshot()
        text, experts = "", None
        with contextlib.suppress(httpx.HTTPError):
            text = self._http.get("/metrics").text
        with contextlib.suppress(httpx.HTTPError, ValueError):
            answer = self._http.get("/v1/experts", headers=self._admin)
            experts = answer.json() if answer.is_success else None
        return Snapshot(parse_samples(text), experts)

    def settled(self, output_tokens: int, before: Snapshot) -> Snapshot:
        """Once ranks have reported what they did: output_tokens at least, since before."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            now = self.snapshot()
            told = now.total("output_tokens_total") - before.total("output_tokens_total")
            idle = not now.total("requests_in_flight") and not now.total("running")
            silent = "output_tokens_total" not in now.samples  # ranks that never report
            # Ranks take the same steps: one that is behind has not told its last ones yet.
            level = len({*_grown(before, now, "steps_total").values()}) <= 1
            done = idle and level and told >= output_tokens
            if silent or done or time.monotonic() > deadline:
                return now
            time.sleep(0.2)

    def reset_cache(self) -> bool:
        """Empty our server's prefix cache: prompts of earlier runs may be in it -> done."""
        if not self.ours:
            return False
        with contextlib.suppress(httpx.HTTPError):
            return self._http.post("/reset_prefix_cache", headers=self._admin).is_success
        return False

    def close(self) -> None:
        self._http.close()

    def _card(self, model: str | None) -> dict[str, Any]:
        try:
            answer = self._http.get("/v1/models")
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise MoeserveError(f"no server answers at {self.url}: {reason}") from None
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            raise MoeserveError(f"{self.url}: wants a key: --api-key, or MOESERVE_API_KEY")
        try:
            cards = answer.json()["data"]
            names = [str(x["id"]) for x in cards]
        except (ValueError, LookupError, TypeError):
            if model is not None:
                return {"id": model}
            raise MoeserveError(
                f"{self.url}/v1/models: HTTP {answer.status_code}, no list of models; say --model"
            ) from None
        if model is None and names:
            return dict(cards[0])
        if model in names:
            return dict(cards[names.index(model)])
        served = ", ".join(names) or "nothing"
        if model is None:
            raise MoeserveError(f"{self.url}/v1/models: lists no model; say --model")
        raise ConfigError([f"--model {model!r}: not served at {self.url}; served there: {served}"])

    def _health(self) -> dict[str, Any] | None:
        try:
            told = self._http.get("/health").json()
            return told if "requests_in_flight" in told and "ranks" in told else None
        except (httpx.HTTPError, ValueError, TypeError):
            return None

    def _info(self) -> dict[str, Any]:
        try:
            answer = self._http.get("/debug/state", headers=self._admin)
            return dict(answer.json()["ranks"][0]["info"]) if answer.is_success else {}
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return {}


def parse_samples(text: str) -> Samples:
    """Our metrics in Prometheus' text form."""
    found: Samples = defaultdict(dict)
    for name, labels, value in _SAMPLE.findall(text):
        key = tuple(x for _, x in sorted(_LABEL.findall(labels)))
        found[name][key] = float(value)
    return dict(found)


def step_breakdown(before: Snapshot, after: Snapshot) -> list[dict[str, Any]]:
    """A row a rank: steps, milliseconds of one, and of each part of it. A step is all of it, as in
    `moeserve trace` and `bench offline`: planning, waiting in lockstep, forward, sampling, commit.
    The server's counter of steps begins after lockstep, so that what lies before is added."""
    rows = []
    steps = _grown(before, after, "steps_total")
    seconds = _grown(before, after, "step_seconds_total")
    parts = _grown(before, after, "step_part_seconds_total")
    sent = _grown(before, after, "dispatch_bytes_total")
    for key in sorted(steps, key=lambda x: int(x[0])):
        count = steps[key]
        per_step = 1e3 / count if count else 0.0
        own = {part: value for (part, rank), value in sorted(parts.items()) if rank == key[0]}
        whole = max(seconds.get(key, 0.0) + own.get("lockstep", 0.0), sum(own.values()))
        rows.append(
            {
                "rank": int(key[0]),
                "steps": int(count),
                "step_ms": whole * per_step,
                "parts_ms": {part: value * per_step for part, value in own.items()},
                "dispatch_bytes": int(sent.get(key, 0)),
            }
        )
    return rows


def expert_balance(before: Snapshot, after: Snapshot) -> dict[str, Any] | None:
    """Of the tokens in between: busiest routed expert over the mean one, mean and worst of layers;
    ranks: the same of ranks over their last window. None where nothing was counted."""
    if before.experts is None or after.experts is None:
        return None
    new = np.array(after.experts["totals"], np.int64)
    old = np.array(before.experts["totals"], np.int64)
    added = new - old if old.shape == new.shape else new
    added = added[:, : after.experts["num_routed_experts"]] if added.ndim == 2 else added
    added = added[added.sum(axis=1) > 0] if added.size else added
    if not added.size:
        return None
    busiest = added.max(axis=1) / added.mean(axis=1)
    ranks = [float(x["balance"]) for x in after.experts["ranks"] if x["balance"]]
    generations = after.experts["placement_generation"] - before.experts["placement_generation"]
    return {
        "experts_max_over_mean": float(busiest.mean()),
        "experts_max_over_mean_worst_layer": float(busiest.max()),
        "ranks_max_over_mean": max(ranks) if ranks else None,
        "placements_changed": generations,
    }


def acceptance(before: Snapshot, after: Snapshot, temperature: float) -> dict[str, Any]:
    """Of drafted tokens the share that was accepted, at the run's temperature; None with the reason
    where the server counts none (moeserve_drafted_tokens_total, moeserve_accepted_tokens_total)."""
    drafted = grown(before, after, "drafted_tokens_total")
    accepted = grown(before, after, "accepted_tokens_total")
    share, why = None, ""
    if drafted is None or accepted is None:
        why = "the server tells nothing of speculation"
    elif not drafted:
        why = "nothing was drafted"
    else:
        share = accepted / drafted
    return {
        "accepted_share": share,
        "drafted_tokens": drafted,
        "accepted_tokens": accepted,
        "temperature": temperature,
        "why": why,
    }


def _grown(before: Snapshot, after: Snapshot, name: str) -> dict[tuple[str, ...], float]:
    old = before.samples.get(name, {})
    return {key: value - old.get(key, 0.0) for key, value in after.samples.get(name, {}).items()}


def grown(before: Snapshot, after: Snapshot, name: str) -> float | None:
    """What a counter grew by, all ranks; None where the server does not tell it."""
    if name not in after.samples:
        return None
    return sum(_grown(before, after, name).values())
