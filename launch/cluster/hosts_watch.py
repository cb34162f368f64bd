"""The hosts of a job as one: progress, logs, the first cause of a failure, how it is stopped."""

from __future__ import annotations

import contextlib
import queue
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.cluster import remote
from launch.cluster.interrupts import count_interrupts
from launch.cluster.screen import open_screen, tell_cause
from launch.cluster.stages import Record, write_failure
from launch.cluster.urls import public_url
from launch.cluster.watch import Cause, Progress
from launch.failure import LOST_PEER
from moeserve.errors import MoeserveError
from moeserve.terminal import PREFIX, counted, say

if TYPE_CHECKING:
    from launch.cluster.hosts import Host

LOOK_SECONDS = 0.25
MISSED_SECONDS = 1.0  # after the end of an ssh, for what it still delivered
MORE_REASONS = 1.5  # after the first failure: what others have to say
NOW_SECONDS = 8.0  # after a second Ctrl-C
INTERRUPTED = 130
# torchrun's table of failures: "rank      : 3 (local_rank: 1)", "exitcode  : -9 (pid: 815)"
_RANK = re.compile(r"^\s*rank\s*: (\d+) ")
_EXIT = re.compile(r"^\s*exitcode\s*: (-?\d+) ")


class NotReadyInTime(MoeserveError):
    """--wait has passed."""


def deaths_in_table(lines: Sequence[str]) -> dict[int, str]:
    """How ranks ended by torchrun's word; those that it ended itself and those that lost a peer are
    left out."""
    found: dict[int, str] = {}
    rank = -1
    for line in lines:
        if match := _RANK.match(line):
            rank = int(match[1])
        elif (match := _EXIT.match(line)) and rank >= 0:
            code = int(match[1])
            if code == -signal.SIGKILL:
                found.setdefault(rank, "Killed")
            elif code < 0 and code != -signal.SIGTERM:
                found.setdefault(rank, f"Killed by {signal.Signals(-code).name}")
            elif code > 0 and code != LOST_PEER:
                found.setdefault(rank, f"Exited with exit code {code}")
    return found


class HostsWatch:
    def __init__(
        self,
        hosts: Sequence[Host],
        news: queue.Queue[tuple[Host, dict[str, Any]]],
        num_ranks: int,
        folder: Path,
        drain_seconds: float,
        wait: float | None,
    ) -> None:
        self._hosts, self._news, self._num_ranks = hosts, news, num_ranks
        self._folder, self._drain_seconds, self._wait = folder, drain_seconds, wait
        self._progress = Progress()
        self._logs: dict[str, list[str]] = {host.name: [] for host in hosts}
        self._ended: dict[str, int] = {}
        self._cut: list[str] = []
        self._missed: dict[str, float] = {}
        self._ready = False

    def run(self) -> int:
        """Until all hosts have ended -> the exit code."""
        with count_interrupts() as interrupts:
            return self._follow(interrupts)

    def _follow(self, interrupts: Callable[[], int]) -> int:
        screen, began = open_screen(), time.monotonic()
        try:
            while True:
                if interrupts():
                    screen.close()
                    return self._stop(interrupts)
                self._hear()
                if self._progress.failing or self._cut or any(self._ended.values()):
                    screen.close()
                    return self._failed()
                if len(self._ended) == len(self._hosts):
                    screen.close()
                    say("stopped")
                    return 0
                if self._ready:
                    continue
                screen.show(self._headline(), self._progress.nodes())
                if self._progress.url:
                    screen.close()
                    self._ready = True
                    seconds = time.monotonic() - began
                    say(f"ready after {seconds:.0f} s: {public_url(self._progress)}")
                    say("Ctrl-C ends the job: running requests first, a second one at once")
                elif self._wait is not None and time.monotonic() - began > self._wait:
                    screen.close()
                    for node in self._progress.nodes():
                        say(f"{node.host}: {node.stage}")
                    raise NotReadyInTime(
                        f"not ready within --wait {self._wait:g} s; all hosts are told to end"
                    )
        finally:
            screen.close()

    def _headline(self) -> str:
        here = len(self._progress.ranks)
        if here < self._num_ranks:
            return f"{counted(len(self._hosts), 'host')}: ranks start"
        return f"all {counted(here, 'rank')} have started"

    def _hear(self) -> None:
        """All news that is here; waits a moment for the first."""
        with contextlib.suppress(queue.Empty):
            self._take(*self._news.get(timeout=LOOK_SECONDS))
            while True:
                self._take(*self._news.get_nowait())
        self._miss()

    def _miss(self) -> None:
        """An ssh that has ended although something holds its pipes: nobody will say so."""
        now = time.monotonic()
        for host in self._hosts:
            if host.process.poll() is None or host.name in (*self._ended, *self._cut):
                continue
            if now - self._missed.setdefault(host.name, now) > MISSED_SECONDS:
                self._cut.append(host.name)

    def _take(self, host: Host, said: dict[str, Any]) -> None:
        kind = said["kind"]
        if kind == remote.STAGE:
            record = Record.parse(said["line"])
            if record is not None:
                self._progress.feed(record)
                self._write(f"node-{host.name}.jsonl", said["line"])
        elif kind == remote.LOG:
            text = said["text"]
            self._logs[host.name].append(text)
            self._write(f"host-{host.name}.log", text + "\n")
            if self._ready and text.startswith(PREFIX) and not self._progress.failing:
                say(f"{host.name}: {text.removeprefix(PREFIX)}")
        elif kind == remote.END:
            self._ended[host.name] = said["code"]
        elif kind == "gone" and host.name not in (*self._ended, *self._cut):
            self._cut.append(host.name)

    def _write(self, name: str, text: str) -> None:
        # It is for `moeserve status` and for later; the job goes on without.
        with contextlib.suppress(OSError), (self._folder / name).open("a") as file:
            file.write(text)

    # ---- the end ------------------------------------------------------------------------------

    def _failed(self) -> int:
        began = time.monotonic()
        while time.monotonic() - began < MORE_REASONS and len(self._ended) < len(self._hosts):
            self._hear()
        deaths: dict[int, str] = {}
        for lines in self._logs.values():
            deaths |= deaths_in_table(lines)
        cause = self._progress.first_cause(deaths)
        for name in self._cut:  # with it went its ranks, whatever they are said to have died of
            host = next(h for h in self._hosts if h.name == name)
            said = [line for line in host.complaints if line.strip()]
            say(f"host {name}: the line to it was cut: {said[-1] if said else 'no word why'}")
        if cause is not None:
            name = self._host_name(cause)
            tell_cause(cause, self._folder / f"host-{name}.log")
            write_failure(self._folder, cause.rank, cause.host or name, cause.reason, cause.code)
            return cause.code if 0 < cause.code < 128 else 1
        if not self._cut:
            for name, code in self._ended.items():
                for line in self._logs[name][-12:] if code else []:
                    say(f"{name}: {line.removeprefix(PREFIX)}")
        return 1

    def _host_name(self, cause: Cause) -> str:
        """As the user called the host on which that rank ran."""
        per_host = max(1, self._num_ranks // len(self._hosts))
        return self._hosts[min(max(cause.rank, 0) // per_host, len(self._hosts) - 1)].name

    def _stop(self, interrupts: Callable[[], int]) -> int:
        if self._ready:
            say("stopping: running requests may end; Ctrl-C again ends it at once")
            self._hosts[0].send(remote.DRAIN)
            if self._wait_for_end(lambda: interrupts() > 1, self._drain_seconds + 15):
                say("stopped")
                return 0
            say("stopping at once")
            for host in self._hosts:
                host.send(remote.NOW)
            self._wait_for_end(lambda: interrupts() > 2, NOW_SECONDS)
        say("stopped before it was done" if not self._ready else "stopped")
        return INTERRUPTED

    def _wait_for_end(self, enough: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not enough():
            self._hear()
            if len(self._ended) + len(self._cut) == len(self._hosts):
                return True
        return False
