"""One measured run against a server: warm-up, the load, what server and calls tell, as one report.

What `bench serve` does once and `bench sweep` at each rate. Knows the parts; nothing of screens and
files.
"""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from launch.bench.serve_call import Target
from launch.bench.serve_caveats import cache_words, caveats, of_turns, text_words
from launch.bench.serve_drive import Driven, Tally
from launch.bench.serve_figures import Limits, figures, generator, over_time, samples
from launch.bench.serve_flags import Ask
from launch.bench.serve_load import Conversation, Load, Turn
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
from launch.bench.serve_text import Count, check_texts, token_counter
from launch.bench.serve_workers import Warm, drive_together
from launch.bench.sweep_pace import pace_of
from moeserve.errors import ConfigError, MoeserveError

FORMAT = "moeserve bench serve 1"


@dataclass(frozen=True)
class Run:
    """A server and what it is asked; `measure` may be called again with another load. count: tokens
    of a text, where a tokenizer was given."""

    ask: Ask
    peer: Peer
    pool: Pool
    target: Target
    count: Count | None = None

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
            keep_text=ask.tokenizer is not None and not peer.ours,
            extra=ask.extra(),
            timeout=ask.timeout,
        )
        _check_trace(load, target)
        count = token_counter(ask.tokenizer) if ask.tokenizer and target.keep_text else None
        run = cls(ask, peer, _pool(ask, load, peer), target, count)
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
        warm = self._warm(load)
        if warm is None:
            return
        done = drive_together(1, warm[0], self.target, warm[1], Tally(), lambda: None, warm=warm)
        if done.interrupted:
            raise KeyboardInterrupt
        failed = [x for x in done.calls if not x.good]
        if failed and len(failed) == len(done.calls) and not self.ask.allow_errors:
            said = dict.fromkeys(f"{x.fault}: {x.detail}" for x in failed)
            example = ", for example" if len(said) > 1 else ""
            raise MoeserveError(f"warm-up: every call failed{example}: {next(iter(said))}")

    def _warm(self, load: Load) -> Warm | None:
        """One turn a call. Of a trace the lengths are taken, not the prompts: a server that keeps
        prefixes would have those of the run already."""
        count = self.ask.warmup
        if not count:
            return None
        small = replace(
            load,
            rate=None,
            trace=None,
            seconds=None,
            requests=count,
            concurrency=min(count, 8),
            turns=1,
        )
        if load.trace is not None:
            turns = (x.turns[0] for x in load.trace[:count])
            small = replace(small, trace=tuple(_like(k, turn) for k, turn in enumerate(turns)))
        return small, self._maker(load, self.ask.seed + 1_000_003)

    def measure(self, load: Load, what: str = "calls") -> tuple[dict[str, Any], Driven]:
        """The report, and the calls themselves."""
        emptied, before, began = False, Snapshot(), ""

        def ready() -> None:
            nonlocal emptied, before, began
            emptied = not self.ask.keep_cache and self.peer.reset_cache()
            before = self.peer.settled(0, before)  # what warmed up is counted by then
            began = time.strftime("%Y-%m-%dT%H:%M:%S%z")

        tally = Tally()
        progress = LoadProgress(tally, what, load.total, load.seconds)
        try:
            driven = self._drive(load, tally, progress, ready)
        finally:
            progress.close()
        checked = None if self.count is None else check_texts(driven.calls, self.count)
        output = sum(x.num_output for x in driven.calls)
        after = self.peer.settled(output, before)
        report = self._report(load, driven, before, after, began)
        report["caveats"] += text_words(checked)
        report["caveats"].append(cache_words(emptied, self.ask.keep_cache))
        return report, driven

    def _drive(
        self, load: Load, tally: Tally, watch: Callable[[], None], ready: Callable[[], None]
    ) -> Driven:
        return drive_together(
            self.ask.workers,
            load,
            self.target,
            self._maker(load, self.ask.seed),
            tally,
            watch,
            keep_prompts=self.ask.record is not None,
            warm=self._warm(load),
            ready=ready,
        )

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
        kept_up = None if load.rate is None else pace_of(calls).keeps_up
        report |= {
            "interrupted": driven.interrupted,
            "steps": step_breakdown(before, after),
            "experts": balance,
            "preemptions": None if preempted is None else int(preempted),
            "acceptance": acceptance(before, after, self.target.temperature),
            "generator": generator(calls, driven.lags, driven.cpu_share, driven.workers, kept_up),
            "client": {"host": platform.node()} | describe_machine(),
            "over_time": over_time(calls),
        }
        said = caveats(report, load, self.target, self.pool, self.peer)
        report["caveats"] = [*assumed, *said, *of_turns(driven, load)]
        report["problems"] = problems(report)
        report["samples"] = samples(calls)
        return report


def _like(number: int, turn: Turn) -> Conversation:
    """A call as long as this one, with a prompt of its own, as soon as a client is free."""
    return Conversation(number, None, (Turn(max(1, turn.input_tokens), turn.output_tokens),))


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


def problems(report: dict[str, Any]) -> list[str]:
    """Why the run is no measurement of what was asked; empty where it is."""
    calls = report["calls"]
    found = [
        f"{held['count']} of {calls['sent']} calls: {kind}" + _example(held["examples"])
        for kind, held in report["errors"].items()
    ]
    if not calls["good"] and not calls["failed"]:
        found.append("no call has ended" if calls["sent"] else "nothing was sent")
    return found


def _example(said: list[str]) -> str:
    if not said:
        return ""
    return f" ({'for example: ' if len(said) > 1 else ''}{said[0]})"
