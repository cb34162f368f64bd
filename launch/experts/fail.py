"""`moeserve experts fail`: what a lost GPU or node does: experts lost, balance, what it takes.

Shape letters: L layers, E experts, G GPUs, k slots a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ep.planner import PlanOptions, plan
from ep.planning.balance import table_balance
from ep.planning.plan_loads import PlanError
from launch.experts.plan import mean_and_worst, moves
from launch.experts.screen import console, emit, heat, table
from launch.experts.source import Source
from launch.experts.top_screen import head
from launch.experts.units import parse_bytes, parse_numbers, show_bytes, show_seconds
from launch.experts.view import View, ranges
from moeserve.errors import ConfigError

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True)
class Fail:
    """The command's flags. gpus, nodes: numbers such as 3,4 or 0-7; neither: each alone in turn."""

    source: Source
    gpus: str | None = None
    nodes: str | None = None
    gpus_per_node: int | None = None
    rows: int = 10
    bandwidth: str = "50GB/s"
    as_json: bool = False

    def run(self) -> None:
        rate = parse_bytes("--bandwidth", self.bandwidth, rate=True)
        view = self.source.read()
        placed = view.placed
        if placed.num_ranks == 1:
            raise ConfigError([f"{view.name}: experts live on 1 GPU; none is left if it is lost"])
        if self.gpus_per_node is not None:
            self._check_per_node(placed.num_ranks)
            view = replace(view, ranks_per_node=self.gpus_per_node)
        if self.gpus is None and self.nodes is None:
            report = survey_report(view)
            screen_of = survey_screen
        else:
            live = np.ones(placed.num_ranks, dtype=bool)
            live[self._lost(view)] = False
            if not live.any():
                raise ConfigError([f"--gpu: all {placed.num_ranks} GPUs would be lost"])
            report = fail_report(view, live, rate)
            screen_of = fail_screen
        if self.as_json:
            emit(report)
            return
        console().print(screen_of(report, self.rows))

    def _check_per_node(self, ranks: int) -> None:
        flag = f"--gpus-per-node {self.gpus_per_node}"
        if self.gpus is not None and self.nodes is None:
            raise ConfigError([f"{flag}: says nothing of GPUs that are named one by one (--gpu)"])
        assert self.gpus_per_node is not None
        if ranks % self.gpus_per_node:
            raise ConfigError([f"{flag}: {ranks} GPUs do not divide by it"])

    def _lost(self, view: View) -> list[int]:
        ranks, per_node = view.placed.num_ranks, view.ranks_per_node
        lost = []
        if self.gpus is not None:
            lost = parse_numbers("--gpu", self.gpus)
            wrong = [gpu for gpu in lost if gpu >= ranks]
            if wrong:
                raise ConfigError([f"--gpu {wrong[0]}: valid are 0 to {ranks - 1}"])
        if self.nodes is not None:
            most = -(-ranks // per_node) - 1
            for node in parse_numbers("--node", self.nodes):
                if node > most:
                    raise ConfigError(
                        [f"--node {node}: valid are 0 to {most}, of {per_node} GPUs each"]
                    )
                lost += range(node * per_node, min((node + 1) * per_node, ranks))
        return lost


# -- the numbers --------------------------------------------------------------------------------


def fail_report(view: View, live: BoolArray, rate: float) -> dict[str, Any]:
    """As JSON. lost: experts without a replica on a live GPU. balance: before; of the survivors as
    they are (what lost experts had is left out); replanned over the live GPUs."""
    placed = view.placed
    lost = lost_experts(view, live)
    slots, num_live = placed.num_local_experts, int(live.sum())
    needed = -(-view.num_experts // num_live)
    report: dict[str, Any] = {"command": "fail", **view.summary()}
    report |= {
        "tokens": view.about.get("tokens"),
        "failed_gpus": np.flatnonzero(~live).tolist(),
        "num_live_gpus": num_live,
        "lost": {
            "experts": int(lost.sum()),
            "of": int(lost.size),
            "layers": int(lost.any(axis=1).sum()),
            "share_of_picks": _share(view, lost),
            "by_layer": [
                {"layer": view.layers[row], "experts": np.flatnonzero(lost[row]).tolist()}
                for row in np.flatnonzero(lost.any(axis=1))
            ],
        },
        "capacity": {
            "slots_per_gpu": slots,
            "slots": slots * num_live,
            "experts": view.num_experts,
            "enough": slots >= needed,
            "slots_per_gpu_needed": needed,
            "gpus_needed": -(-view.num_experts // slots),
        },
        "before": mean_and_worst(view, view.balance) if view.has_load else None,
        "survivors": None,
        "replanned": None,
    }
    if view.has_load:
        report["survivors"] = mean_and_worst(view, _survivors(view, live, lost))
    report["replanned"] = _replanned(view, live, max(slots, needed), rate)
    return report


def lost_experts(view: View, live: BoolArray) -> BoolArray:
    """[L, E]: no live GPU hosts it."""
    placed = view.placed
    table_ = placed.physical_to_logical.reshape(placed.num_layers, placed.num_ranks, -1)
    held = np.zeros((placed.num_layers, placed.num_logical_experts + 1), dtype=bool)
    held[np.arange(placed.num_layers)[:, None, None], table_[:, live]] = True
    return ~held[:, :-1]


def _share(view: View, lost: BoolArray) -> float | None:
    """Of all picks, those that named a lost expert."""
    if not view.has_load:
        return None
    return float(np.where(lost, view.loads, 0.0).sum() / view.loads.sum())


def _survivors(view: View, live: BoolArray, lost: BoolArray) -> Any:
    placed = view.placed
    table_ = placed.physical_to_logical.reshape(placed.num_layers, placed.num_ranks, -1)
    alive = np.where(live[:, None], table_, -1)
    return table_balance(np.where(lost, 0.0, view.loads), alive, live)


def _replanned(view: View, live: BoolArray, slots: int, rate: float) -> dict[str, Any]:
    """slots: a GPU, as many as hold every expert."""
    placed = view.placed
    loads = view.loads if view.has_load else np.ones((placed.num_layers, view.num_experts))
    try:
        made = plan(
            loads,
            num_gpus=placed.num_ranks,
            num_slots_per_gpu=slots,
            previous=placed,
            live_gpus=live,
            options=PlanOptions(num_ungrouped=view.num_experts - view.num_routed),
        )
    except PlanError as error:
        raise ConfigError([f"{view.name}: {error}"]) from None
    why = made.explanation
    out: dict[str, Any] = {"slots_per_gpu": slots}
    if view.has_load:
        out |= mean_and_worst(view, why.after)
        out["bound"] = mean_and_worst(view, why.bound)["mean"]
    return out | moves(placed, made.placement, view.expert_bytes, rate)


def survey_report(view: View) -> dict[str, Any]:
    """Each GPU alone, and each node where there are several, the worst first."""
    placed = view.placed
    report: dict[str, Any] = {"command": "fail", **view.summary()}
    report["tokens"] = view.about.get("tokens")
    report["before"] = mean_and_worst(view, view.balance) if view.has_load else None
    ranks, per_node = placed.num_ranks, view.ranks_per_node
    report["gpus"] = _each(view, [[gpu] for gpu in range(ranks)]) if ranks > 1 else []
    nodes = [list(range(n, min(n + per_node, ranks))) for n in range(0, ranks, per_node)]
    report["nodes"] = _each(view, nodes) if per_node > 1 and len(nodes) > 1 else []
    return report


def _each(view: View, losses: list[list[int]]) -> list[dict[str, Any]]:
    out = []
    for number, gpus in enumerate(losses):
        live = np.ones(view.placed.num_ranks, dtype=bool)
        live[gpus] = False
        lost = lost_experts(view, live)
        one: dict[str, Any] = {
            "number": number,
            "gpus": gpus,
            "lost_experts": int(lost.sum()),
            "lost_share_of_picks": _share(view, lost),
            "survivors": None,
        }
        if view.has_load:
            one["survivors"] = mean_and_worst(view, _survivors(view, live, lost))
        out.append(one)
    return sorted(out, key=lambda x: (-x["lost_experts"], -(x["lost_share_of_picks"] or 0)))


# -- the picture --------------------------------------------------------------------------------


def fail_screen(report: dict[str, Any], most: int) -> Any:
    from rich.console import Group
    from rich.text import Text

    lost, capacity = report["lost"], report["capacity"]
    text = Text(f"lost: GPU {ranges(report['failed_gpus'])}", style="bold")
    share = "" if lost["share_of_picks"] is None else f", {lost['share_of_picks']:.1%} of all picks"
    text.append(
        f"  {report['num_live_gpus']} live; {lost['experts']} of {lost['of']} experts have no "
        f"replica left, in {lost['layers']} layers{share}",
        style="",
    )
    parts: list[Any] = [head(report), text]
    rows = []
    for name, key in (
        ("before", "before"),
        ("survivors", "survivors"),
        ("replanned", "replanned"),
    ):
        x = report[key]
        if x is None or "mean" not in x:
            continue
        row = [name, heat(x["mean"], digits=3), heat(x["worst"], digits=3), x["worst_layer"]]
        bound = f"{x['bound']:.3f}" if "bound" in x else "-"
        moved = "-" if x.get("moved_slots") is None else x["moved_slots"]
        row += [bound, moved, show_bytes(x.get("moved_bytes")), show_seconds(x.get("seconds"))]
        rows.append(row)
    if rows:
        columns = ("<", "balance", "worst", "layer", "bound", "moved", "bytes", "time")
        notes = "survivors: as they are; replanned: over the live GPUs"
        if not capacity["enough"]:
            notes += f", with {capacity['slots_per_gpu_needed']} slots each"
        parts.append(table("Balance: busiest / mean live GPU", columns, rows, notes))
    if capacity["enough"]:
        left = capacity["slots"] - capacity["experts"]
        parts.append(
            Text(
                f"capacity: {capacity['slots']} slots on live GPUs hold {capacity['experts']} "
                f"experts; {left} are left for copies"
            )
        )
    else:
        parts.append(
            Text(
                f"capacity: {capacity['slots']} slots on live GPUs cannot hold "
                f"{capacity['experts']} experts: {capacity['slots_per_gpu_needed']} slots a GPU "
                f"are needed ({capacity['slots_per_gpu']} now), or {capacity['gpus_needed']} GPUs",
                style="bold",
            )
        )
    worst = sorted(lost["by_layer"], key=lambda x: -len(x["experts"]))[:most]
    if worst:
        rows = [[x["layer"], len(x["experts"]), ranges(x["experts"])] for x in worst]
        parts.append(table("Experts lost", ("layer", "lost", "<experts"), rows))
    return Group(*parts)


def survey_screen(report: dict[str, Any], most: int) -> Any:
    from rich.console import Group

    parts: list[Any] = [head(report)]
    for key, name in (("gpus", "GPU"), ("nodes", "node")):
        if not report[key]:
            continue
        rows = []
        for x in report[key][:most]:
            row = [x["number"], x["lost_experts"]]
            share, after = x["lost_share_of_picks"], x["survivors"]
            row.append("-" if share is None else f"{share:.1%}")
            row += ["-", "-"] if after is None else [heat(after["mean"]), heat(after["worst"])]
            rows.append(row)
        columns = (name, "experts lost", "of all picks", "balance after", "worst layer")
        every = len(report[key])
        note = f"{len(rows)} of {every}" if len(rows) < every else ""
        parts.append(table(f"If one {name} were lost, the worst first", columns, rows, note))
    return Group(*parts)
