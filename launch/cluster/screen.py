"""The progress of each node on the terminal that started the job: a table that is drawn anew, or,
where no terminal is, a line whenever a node gets further.

Knows rich, stderr and `NodeView`; nothing of where these come from.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from launch.cluster.stages import CACHE, READY, RENDEZVOUS, SERVING, STARTING, WARMUP, WEIGHTS
from launch.cluster.watch import Cause, NodeView
from moeserve.terminal import say

LINE_SECONDS = 5.0  # between two lines of one node's weights
TAIL_LINES = 12
SHOWN_NODES = 24  # of a table on a terminal; the slowest are shown
_WORDS = {
    STARTING: "starting",
    RENDEZVOUS: "rendezvous",
    WEIGHTS: "weights",
    CACHE: "KV cache",
    WARMUP: "warm-up, graphs",
    READY: "ready",
    SERVING: "ready",
}


class Screen(Protocol):
    def show(self, headline: str, nodes: Sequence[NodeView]) -> None:
        """headline: what the whole job is doing."""
        ...

    def close(self) -> None: ...


def open_screen() -> Screen:
    return TableScreen() if sys.stderr.isatty() else LineScreen()


def describe(node: NodeView) -> str:
    """weights: 45 % of 1.2 GB, 310 MB/s"""
    words = _WORDS[node.stage]
    if node.stage == WEIGHTS and node.total:
        rate = f", {node.rate / 1e6:.0f} MB/s" if node.rate else ""
        return f"{words}: {100 * node.done // node.total} % of {_size(node.total)}{rate}"
    if node.stage in (READY, SERVING) and node.total:
        return f"{words} ({_size(node.total)} of weights at {node.rate / 1e6:.0f} MB/s)"
    return words


def ranks_in_words(ranks: Sequence[int]) -> str:
    """ranks 0-7; ranks 0-1, 4; rank 3"""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(f"{low}-{high}" if high > low else str(low) for low, high in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def tell_cause(cause: Cause, log: Path) -> None:
    """Why a job failed, one line a reason; then the end of that rank's log."""
    who = f"rank {cause.rank} on {cause.host or '?'}: " if cause.rank >= 0 else ""
    for line in cause.reason.splitlines():
        say(f"{who}{line}")
    if cause.rank >= 0:
        tell_tail(log)


def tell_tail(log: Path) -> None:
    """The last lines of a log, as they stand there."""
    try:
        lines = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
    except OSError:
        return
    if lines:
        say(f"the end of {log}:")
        print("".join(f"  | {line}\n" for line in lines), end="", file=sys.stderr, flush=True)


class LineScreen:
    def __init__(self) -> None:
        self._headline = ""
        self._told: dict[str, tuple[str, float]] = {}

    def show(self, headline: str, nodes: Sequence[NodeView]) -> None:
        if headline != self._headline:
            self._headline = headline
            say(headline)
        now = time.monotonic()
        for node in nodes:
            stage, when = self._told.get(node.host, ("", 0.0))
            counting = node.stage == WEIGHTS and now - when > LINE_SECONDS
            if node.stage == stage and not counting:
                continue
            self._told[node.host] = (node.stage, now)
            say(f"{node.host} ({ranks_in_words(node.ranks)}): {describe(node)}")

    def close(self) -> None:
        pass


class TableScreen:
    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._live = Live(console=Console(stderr=True), refresh_per_second=8)
        self._live.start()

    def show(self, headline: str, nodes: Sequence[NodeView]) -> None:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        for title in ("node", "ranks", "stage", ""):
            table.add_column(title)
        order = list(_WORDS)
        slowest = sorted(nodes, key=lambda n: order.index(n.stage))[:SHOWN_NODES]
        for node in nodes:
            if node not in slowest:
                continue
            counts = node.stage == WEIGHTS and node.total
            bar = ProgressBar(node.total, node.done, width=24) if counts else ""
            table.add_row(node.host, ranks_in_words(node.ranks)[5:].strip(), describe(node), bar)
        if len(nodes) > len(slowest):
            table.add_row(f"and {len(nodes) - len(slowest)} more", "", "", "")
        self._live.update(Group(headline, table))

    def close(self) -> None:
        self._live.stop()
