"""One measured run against a server: warm-up, the load, what server and calls tell, as one report.

What `bench serve` does once and `bench sweep` at each rate. Says in plain words what was simulated
or forced. Knows the parts; nothing of screens and files.
"""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from launch.bench.serve_call import Target
from launch.bench.serve_drive import Driven, Tally
from launch.bench.serve_figures import Limits, figures, generator, over_time, samples
from launch.bench.serve_flags import Ask
from launch.bench.serve_load import Load
from launch.bench.serve_peer import (
    Peer,
    Snapshot,
    acceptance,
    expert_balance,
    grown,
    step_breakdown,
)
from launch.bench.serve_progress import LoadProgress
from launch.bench.serve_prompts import Pool, PromptMaker
from launch.bench.serve_workers import drive_together
from moeserve.errors import ConfigError, MoeserveError

FORMAT = "moeserve bench serve 1"


@dataclass(frozen=True)
class Run:
    """A server and what it is asked; `measure` may be called again with another load."""

    ask: Ask
    peer: Peer
    pool: Pool
    target: Target

    @classmethod
    def open(cls, ask: Ask, load: Load) -> Run:
        """Look at the server. ConfigError, MoeserveError."""
        peer = Peer(ask.url, ask.api_key, ask.admin_key, ask.model)
        target = Target(
            url=peer.url,
            model=peer.model,
            chat=ask.is_chat or _holds_messages(load),
            headers=peer.headers,
            temperature=ask.temperature,
            ignore_eos=ask.ignore_eos,
            token_ids=peer.ours,
            extra=ask.extra(),
            timeout=ask.timeout,
        )
        _check_trace(load, target)
        run = cls(ask, peer, _pool(ask, load, peer), target)
        run.check_room(load)
        return run

    def check_room(self, load: Load) -> None:
        """What the server says cannot fit is refused before anything is sent."""
        limit = self.peer.max_model_len
        if limit is None or load.trace is not None:
            return
        need = load.turns * (load.input_tokens.typical + load.output_tokens.typical)
        if need > limit:
            raise ConfigError(
                [
                    f"--input-tokens {load.input_tokens} + --output-tokens {load.output_tokens}"
                    + (f", {load.turns} turns" if load.turns > 1 else "")
                    + f": {need} tokens, and {self.peer.model} holds {limit}"
                ]
            )

    @property
    def counts(self) -> tuple[int, int, list[str]]:
        """Nodes, GPUs, and what was assumed."""
        nodes, gpus, words = self.ask.nodes, self.ask.gpus, []
        if nodes is None:
            nodes = self.peer.num_nodes
            if nodes is None:
                nodes = 1
                words.append("the server tells no machines: 1 node is assumed (--nodes)")
        if gpus is None:
            gpus = len(self.peer.ranks) or None
            if gpus is None:
                gpus = 1
                words.append("the server tells no ranks: 1 GPU is assumed (--gpus)")
        return nodes, gpus, words

    @property
    def gpus_are(self) -> str:
        if self.peer.ours and not self.peer.info:
            return "ranks"
        return "CPU ranks" if self.peer.info.get("device") == "cpu" else "GPUs"

    def warm_up(self, load: Load) -> None:
        """Calls that do not count, with prompts of their own. MoeserveError if all of them fail."""
        if not self.ask.warmup:
            return
        count = self.ask.warmup
        small = replace(
            load, rate=None, trace=None, seconds=None, requests=count, concurrency=min(count, 8)
        )
        if load.trace is not None:
            small = replace(small, trace=tuple(replace(x, at=None) for x in load.trace[:count]))
        maker = self._maker(load, self.ask.seed + 1_000_003)
        done = drive_together(1, small, self.target, maker, Tally(), lambda: None)
        if done.interrupted:
            raise KeyboardInterrupt
        failed = [x for x in done.calls if not x.good]
        if failed and len(failed) == len(done.calls) and not self.ask.allow_errors:
            worst = failed[0]
            raise MoeserveError(f"warm-up: every call failed: {worst.fault}: {worst.detail}")

    def measure(self, load: Load, what: str = "calls") -> tuple[dict[str, Any], Driven]:
        """The report, and the calls themselves."""
        emptied = not self.ask.keep_cache and self.peer.reset_cache()
        before = self.peer.snapshot()
        tally = Tally()
        progress = LoadProgress(tally, what, load.total, load.seconds)
        began = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        try:
            driven = self._drive(load, tally, progress)
        finally:
            progress.close()
        output = sum(x.num_output for x in driven.calls)
        after = self.peer.settled(output, before)
        report = self._report(load, driven, before, after, began)
        report["caveats"].append(_cache_words(emptied, self.ask.keep_cache))
        return report, driven

    def _drive(self, load: Load, tally: Tally, watch: Callable[[], None]) -> Driven:
        maker = self._maker(load, self.ask.seed)
        keep = self.ask.record is not None
        return drive_together(self.ask.workers, load, self.target, maker, tally, watch, keep)

    def _maker(self, load: Load, seed: int) -> PromptMaker:
        as_ids = not self.target.chat and self.pool.ids is not None
        return PromptMaker(self.pool, seed, as_ids)

    # ---- the report ------------------------------------------------------------------------

    def _report(
        self, load: Load, driven: Driven, before: Snapshot, after: Snapshot, began: str
    ) -> dict[str, Any]:
        from launch.bench.machine import describe_machine

        nodes, gpus, assumed = self.counts
        limits = Limits(self.ask.ttft_limit, self.ask.tpot_limit)
        calls = driven.calls
        report: dict[str, Any] = {
            "format": FORMAT,
            "at": began,
            "url": self.peer.url,
            "model": self.peer.model,
            "settings": settings(self.ask, load, self.target, self.pool),
            "server": self.peer.describe(),
        }
        report |= figures(calls, nodes, gpus, limits, self.gpus_are)
        placement = self.peer.info.get("placement") or {}
        balance = expert_balance(before, after)
        if balance is not None:
            balance["redundant_experts"] = placement.get("num_redundant_experts")
        preempted = grown(before, after, "preemptions_total")
        report |= {
            "interrupted": driven.interrupted,
            "steps": step_breakdown(before, after),
            "experts": balance,
            "preemptions": None if preempted is None else int(preempted),
            "acceptance": acceptance(before, after, self.target.temperature),
            "generator": generator(calls, driven.lags, driven.cpu_share, driven.workers),
            "client": {"host": platform.node()} | describe_machine(),
            "over_time": over_time(calls),
        }
        report["caveats"] = [*assumed, *caveats(report, load, self.target, self.pool, self.peer)]
        report["problems"] = problems(report)
        report["samples"] = samples(calls)
        return report


def _cache_words(emptied: bool, kept: bool) -> str:
    if emptied:
        return "the server's prefix cache was emptied before"
    return "the server's prefix cache was " + (
        "left as it was"
        if kept
        else "not emptied: prompts of an earlier run with the same seed "
        "may still lie in it (take another --seed)"
    )


def _holds_messages(load: Load) -> bool:
    first = load.trace[0].turns[0].given if load.trace else None
    return isinstance(first, list) and isinstance(first[0], dict)


def _check_trace(load: Load, target: Target) -> None:
    for conversation in load.trace or ():
        for turn in conversation.turns:
            given = turn.given
            if given is None:
                continue
            messages = isinstance(given, list) and isinstance(given[0], dict)
            if messages != target.chat and (messages or not isinstance(given, str)):
                held, wants = ("messages", "chat") if messages else ("token ids", "completions")
                raise ConfigError([f"--trace: holds {held}, which need --endpoint {wants}"])


def _pool(ask: Ask, load: Load, peer: Peer) -> Pool:
    if ask.tokenizer is not None:
        return Pool.of_folder(ask.tokenizer)
    if load.trace is not None and all(t.given is not None for c in load.trace for t in c.turns):
        return Pool.guessed("all prompts are recorded ones")
    return peer.pool()


def settings(ask: Ask, load: Load, target: Target, pool: Pool) -> dict[str, Any]:
    """What two runs must have in common to be compared."""
    if load.trace is not None:
        when = f"trace of {len(load.trace)} conversations" + (
            f" at {ask.speed:g} times its speed" if ask.speed is not None else ""
        )
    elif load.rate is not None:
        when = f"{load.rate:g} a second, {load.arrivals}"
    else:
        when = f"{load.concurrency} clients at once"
    drawn = load.trace is None
    held = None if drawn else hashlib.sha256(repr(load.trace).encode()).hexdigest()[:16]
    return {
        "when": when,
        "trace": held,
        "requests": load.requests,
        "seconds": load.seconds,
        "input_tokens": str(load.input_tokens) if drawn else None,
        "output_tokens": str(load.output_tokens) if drawn else None,
        "shared_prefix": str(load.shared_prefix) if drawn else None,
        "turns": load.turns if drawn else None,
        "endpoint": "chat" if target.chat else "completions",
        "prompts": "token ids" if pool.ids is not None and not target.chat else "text",
        "temperature": target.temperature,
        "ignore_eos": target.ignore_eos,
        "extra_body": dict(target.extra),
        "seed": ask.seed,
        "warmup": ask.warmup,
    }


def caveats(
    report: dict[str, Any], load: Load, target: Target, pool: Pool, peer: Peer
) -> list[str]:
    """What was simulated, forced or is not known, in plain words."""
    said = []
    recorded = load.trace is not None and all(
        t.given is not None for c in load.trace for t in c.turns
    )
    if not recorded:
        said.append(
            "prompts are random tokens: what experts they choose and how soon answers end is not "
            "what real text does"
        )
        if not pool.exact:
            said.append(pool.source)
    if load.shared_prefix.share or load.shared_prefix.tokens:
        said.append(f"all prompts begin alike, as asked ({load.shared_prefix})")
    if load.turns > 1:
        said.append("the next turn of a conversation is asked as soon as the answer is there")
    if target.ignore_eos:
        said.append("answers were forced to their full length (ignore_eos)")
    if report["settings"]["warmup"]:
        said.append(f"{report['settings']['warmup']} calls before these do not count")
    if report["gpus_are"] == "CPU ranks":
        said.append(
            "the server computes on CPUs: 'a GPU' here is a rank, which is a process on the CPU"
        )
    if report["gpus_are"] == "ranks":
        said.append("what the ranks compute on is not known: /debug/state wants --admin-key")
    dispatch = (peer.health or {}).get("dispatch") or {}
    for phase in ("prefill", "decode"):
        part = dispatch.get(phase)
        if isinstance(part, dict) and part.get("emulated"):
            said.append(f"dispatch of {phase} is an emulation of {part['backend']} on CPUs")
    if peer.here:
        said.append("server and load generator share one machine and take its cores in turn")
    if not peer.ours:
        said.append(
            "the server is none of ours: steps of ranks, balance of experts, preemptions unknown"
        )
    if target.token_ids:
        said.append(
            "a token counts when it comes, also one without text (return_token_ids); of peers, and "
            "in other tools, the first text counts"
        )
    if report["tokens_are"] == "events":
        said.append("not all calls tell usage: an event was counted as one token there")
    if report["acceptance"]["accepted_share"] is None:
        said.append(f"no acceptance: {report['acceptance']['why']}")
    if 0 < report["calls"]["good"] < 100:
        said.append("p99 of fewer than a hundred calls is the slowest of them")
    if report["generator"]["was_limit"]:
        said.append("the load generator was the limit: " + report["generator"]["why"])
    if report["interrupted"]:
        said.append("the run was stopped before its end: figures are of what was done")
    return said


def problems(report: dict[str, Any]) -> list[str]:
    """Why the run is no measurement of what was asked; empty where it is."""
    calls = report["calls"]
    found = [
        f"{held['count']} of {calls['sent']} calls: {kind}"
        + (f" ({held['examples'][0]})" if held["examples"] else "")
        for kind, held in report["errors"].items()
    ]
    if not calls["good"] and not calls["failed"]:
        found.append("no call has ended" if calls["sent"] else "nothing was sent")
    return found
