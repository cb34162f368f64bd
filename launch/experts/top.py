"""`moeserve experts top`: hottest experts, balance of layers, loads of ranks, replicas, links.

`top_report` makes the numbers from a View, `top_screen` (`experts_top_screen`) their picture; `Top`
shows it once, again and again, or for each interval of a recording.

Shape letters: L layers, E experts, G ranks.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ep.planning.replicate import balance_bound
from launch.experts.screen import console, emit, heat, table
from launch.experts.source import Source, recording_view
from launch.experts.top_screen import WIDE, top_screen
from launch.experts.units import show_count
from launch.experts.view import View
from moeserve.errors import ConfigError


@dataclass(frozen=True)
class Top:
    """The command's flags. every: seconds between looks at a job; once: do not look again.
    rows: of each table. intervals: a line for each interval of a recording."""

    source: Source
    rows: int = 10
    every: float = 2.0
    once: bool = False
    intervals: bool = False
    as_json: bool = False

    def run(self) -> None:
        if not 0.1 <= self.every <= 3600:
            raise ConfigError([f"--every {self.every:g}: must be 0.1 to 3600 seconds"])
        view = self.source.read()
        if self.intervals:
            self._intervals(view)
        elif self.as_json:
            emit(top_report(view, self.rows))
        elif view.kind == "job" and not self.once and sys.stdout.isatty():
            self._live(view)
        else:
            screen = console()
            screen.print(top_screen(top_report(view, self.rows), screen.width))

    def _live(self, view: View) -> None:
        from rich.live import Live

        screen = console()
        with Live(console=screen, screen=True, auto_refresh=False) as live:
            try:
                while True:
                    report = top_report(view, self._fitting(screen))
                    live.update(top_screen(report, screen.width, live=True), refresh=True)
                    time.sleep(self.every)
                    view = self.source.read()
            except KeyboardInterrupt:
                return  # how one leaves

    def _fitting(self, screen: Any) -> int:
        """Rows of each table, so that all of them are seen: what is below the screen is cut."""
        stacked = 2 if screen.width >= WIDE else 4
        return max(3, min(self.rows, (screen.height - 3) // stacked - 6))

    def _intervals(self, view: View) -> None:
        recording = view.recording
        if recording is None:
            raise ConfigError([f"--intervals: {view.name} is a {view.kind}, no recording"])
        reports = []
        for number in range(recording.num_intervals):
            part = recording.slice(number, number + 1)
            one = replace(recording_view(view.name, part, view.phase), num_routed=view.num_routed)
            if view.assumed and view.placement is not None:
                one = one.placed_as(view.placement)
            short = top_report(one, 1)
            reports.append(
                {
                    "interval": number,
                    "first_step": int(part.steps[0, 0]),
                    "last_step": int(part.steps[0, 1]),
                    "steps": int(part.num_steps[0]),
                    "seconds": float(part.seconds[0]),
                    "tokens": short["tokens"],
                    "generation": short["generation"],
                    "balance": short["balance"],
                    "hottest": short["hottest"][0] if short["hottest"] else None,
                }
            )
        if self.as_json:
            emit({"command": "top", **view.summary(), "over_time": reports})
            return
        rows = [_interval_row(report) for report in reports]
        columns = ("", "steps", "tokens", "gen", "balance", "worst", "layer", "hottest expert")
        title = f"{view.name}: {len(rows)} intervals, {view.phase} tokens"
        console().print(table(title, columns, rows))


def _interval_row(report: dict[str, Any]) -> list[Any]:
    balance, hottest = report["balance"], report["hottest"]
    where = "-"
    if hottest is not None:
        where = f"{hottest['layer']}: {hottest['expert']} ({hottest['times_mean']:.1f}x)"
    return [
        report["interval"],
        f"{report['first_step']}-{report['last_step']}",
        show_count(sum(report["tokens"].values())),
        "-" if report["generation"] is None else report["generation"],
        "-" if balance is None else heat(balance["mean"]),
        "-" if balance is None else heat(balance["worst"]),
        "-" if balance is None else balance["worst_layer"],
        where,
    ]


# -- the numbers --------------------------------------------------------------------------------


def top_report(view: View, rows: int = 10) -> dict[str, Any]:
    """As JSON. Parts that the source says nothing of are None: balance, ranks (no placement), links
    (no traffic)."""
    report: dict[str, Any] = {"command": "top", **view.summary()}
    report["tokens"] = view.about.get("tokens")
    report["picks"] = int(view.loads.sum())
    report["balance"] = _balance(view) if view.placement is not None else None
    report["layers"] = _layers(view)
    report["hottest"] = _hottest(view, rows)
    report["ranks"] = _ranks(view) if view.placement is not None else None
    report["links"] = _links(view, rows) if view.traffic is not None else None
    return report


def _balance(view: View) -> dict[str, Any]:
    """Busiest / mean rank, over the layers that have load."""
    busy = np.flatnonzero(view.busy)
    if not len(busy):
        return {"mean": 1.0, "worst": 1.0, "worst_layer": view.row_name(0), "utilisation": 1.0}
    worst = int(busy[view.balance[busy].argmax()])
    return {
        "mean": float(view.balance[busy].mean()),
        "worst": float(view.balance[worst]),
        "worst_layer": view.row_name(worst),
        "utilisation": float((1 / view.balance[busy]).mean()),
    }


def _layers(view: View) -> list[dict[str, Any]]:
    placed = view.placement
    bounds = None
    if placed is not None:
        slots = placed.num_physical_experts - placed.num_empty_slots
        loads = np.where(view.busy[:, None], view.loads, 1.0)
        bounds = balance_bound(loads, slots, placed.num_ranks)
    out = []
    for row in range(len(view.layers)):
        expert = int(view.times_mean[row, : view.num_routed].argmax())
        layer: dict[str, Any] = {
            "layer": view.layers[row],
            "mtp": view.is_mtp(row),
            "picks": int(view.loads[row].sum()),
            "hottest_expert": expert,
            "hottest_times_mean": float(view.times_mean[row, expert]),
        }
        if bounds is not None:
            layer |= {
                "balance": float(view.balance[row]),
                "bound": float(bounds[row]),
                "busiest_rank": int(view.rank_loads[row].argmax()),
            }
        out.append(layer)
    return out


def _hottest(view: View, rows: int) -> list[dict[str, Any]]:
    """By load over the mean of the layer's routed experts. split: of each replica."""
    heats = view.times_mean[:, : view.num_routed]
    order = np.argsort(-heats, axis=None, kind="stable")[:rows]
    out = []
    for row, expert in zip(*np.unravel_index(order, heats.shape), strict=True):
        if heats[row, expert] <= 0:
            break
        one: dict[str, Any] = {
            "layer": view.layers[row],
            "expert": int(expert),
            "share": float(view.loads[row, expert] / view.loads[row].sum()),
            "times_mean": float(heats[row, expert]),
        }
        if view.placement is not None:
            one["split"] = split_of(view, int(row), int(expert))
        out.append(one)
    return out


def split_of(view: View, row: int, expert: int) -> list[dict[str, Any]]:
    """The replicas of an expert: where, and what share of its load each takes (they take turns)."""
    placed = view.placed
    slots = [int(s) for s in placed.logical_to_physical[row, expert] if s >= 0]
    return [{"slot": s, "rank": placed.rank_of(s), "share": 1 / len(slots)} for s in slots]


def _ranks(view: View) -> list[dict[str, Any]]:
    busy = view.rank_times_mean[view.busy]
    out = []
    for rank in range(view.placed.num_ranks):
        mine = busy[:, rank] if len(busy) else np.zeros(1)
        worst = int(np.flatnonzero(view.busy)[mine.argmax()]) if len(busy) else 0
        out.append(
            {
                "rank": rank,
                "node": view.node_of(rank),
                "times_mean": float(mine.mean()),
                "worst_times_mean": float(mine.max()),
                "worst_layer": view.row_name(worst),
                "busiest_layers": int((view.rank_loads.argmax(axis=1) == rank)[view.busy].sum()),
            }
        )
    return out


def _links(view: View, rows: int) -> dict[str, Any]:
    """Rows sent from rank to rank by dispatch, all layers."""
    assert view.traffic is not None
    traffic = view.traffic.astype(np.float64)
    total = max(float(traffic.sum()), 1.0)
    ranks = np.arange(len(traffic))
    node = ranks // view.ranks_per_node
    same_rank, same_node = ranks[:, None] == ranks, node[:, None] == node
    apart = np.where(same_rank, -1.0, traffic)
    busiest = []
    for flat in np.argsort(-apart, axis=None, kind="stable")[:rows]:
        a, b = divmod(int(flat), len(traffic))
        if apart[a, b] <= 0:
            break
        busiest.append(
            {"from": a, "to": b, "rows": int(traffic[a, b]), "share": apart[a, b] / total}
        )
    return {
        "rows": int(traffic.sum()),
        "same_rank": float(traffic[same_rank].sum() / total),
        "same_node": float(traffic[same_node & ~same_rank].sum() / total),
        "between_nodes": float(traffic[~same_node].sum() / total),
        "sent": traffic.sum(axis=1).astype(int).tolist(),
        "received": traffic.sum(axis=0).astype(int).tolist(),
        "busiest": busiest,
    }
