"""`moeserve experts show`: one layer or one expert: where it lives, why, what it carries.

Shape letters: L layers, E experts, P slots, G ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ep.placement import EMPTY
from ep.planning.replicate import balance_bound
from launch.experts.screen import console, emit, heat, meter, table
from launch.experts.source import Source
from launch.experts.top import split_of
from launch.experts.top_screen import head
from launch.experts.units import show_bytes, show_count
from launch.experts.view import View, ranges
from moeserve.errors import ConfigError


@dataclass(frozen=True)
class Show:
    """The command's flags. layer: by the model's number; expert None: the whole layer."""

    source: Source
    layer: int
    expert: int | None = None
    rows: int = 0  # of the layer's table; 0: all
    as_json: bool = False

    def run(self) -> None:
        if self.expert is not None and self.rows:
            raise ConfigError([f"--rows {self.rows}: of a layer's table; leave it out of --expert"])
        view = self.source.read()
        row = view.row_of(self.layer)
        if self.expert is not None and not 0 <= self.expert < view.num_experts:
            raise ConfigError([f"--expert {self.expert}: valid are 0 to {view.num_experts - 1}"])
        if self.expert is None:
            report = layer_report(view, row)
        else:
            report = expert_report(view, row, self.expert)
        if self.as_json:
            emit(report)
            return
        screen = console()
        screen.print(
            layer_screen(report, self.rows) if self.expert is None else expert_screen(report)
        )


# -- the numbers --------------------------------------------------------------------------------


def layer_report(view: View, row: int) -> dict[str, Any]:
    """As JSON. Loads are None for a placement alone, ranks where nobody knows the placement."""
    report = {"command": "show", **view.summary(), **_of_layer(view, row)}
    report["experts"] = [_expert(view, row, e) for e in range(view.num_experts)]
    report["ranks"] = _ranks(view, row) if view.placement is not None else None
    return report


def expert_report(view: View, row: int, expert: int) -> dict[str, Any]:
    report = {"command": "show", **view.summary(), **_of_layer(view, row)}
    report |= {"expert": _expert(view, row, expert)}
    if view.placement is None:
        report["replicas"] = None
        return report
    ranks = {x["rank"]: x for x in _ranks(view, row)}
    report["replicas"] = [
        {**one, **{k: v for k, v in ranks[one["rank"]].items() if k != "rank"}}
        for one in split_of(view, row, expert)
    ]
    return report


def _of_layer(view: View, row: int) -> dict[str, Any]:
    out: dict[str, Any] = {
        "layer": view.layers[row],
        "mtp": view.is_mtp(row),
        "expert_bytes": view.expert_bytes[row] if view.expert_bytes else None,
        "tokens": view.about.get("tokens"),
        "picks": int(view.loads[row].sum()) if view.history is not None else None,
    }
    placed = view.placement
    if placed is not None and view.has_load:
        slots = int((placed.physical_to_logical[row] != EMPTY).sum())
        loads = view.loads[row : row + 1] if view.busy[row] else np.ones((1, view.num_experts))
        out["balance"] = float(view.balance[row])
        out["bound"] = float(balance_bound(loads, slots, placed.num_ranks)[0])
    return out


def _expert(view: View, row: int, expert: int) -> dict[str, Any]:
    out: dict[str, Any] = {"expert": expert, "name": view.expert_name(expert)}
    loaded = view.history is not None and bool(view.busy[row])
    out["load"] = int(view.loads[row, expert]) if view.history is not None else None
    out["share"] = float(view.loads[row, expert] / view.loads[row].sum()) if loaded else None
    out["times_mean"] = float(view.times_mean[row, expert]) if loaded else None
    if view.placement is not None:
        split = split_of(view, row, expert)
        out["copies"] = len(split)
        out["slots"] = [x["slot"] for x in split]
        out["ranks"] = [x["rank"] for x in split]
        out["reason"], out["because"] = why(view, row, expert)
    return out


def why(view: View, row: int, expert: int) -> tuple[str, str]:
    """(reason, in words): why the expert has as many copies as it has.

    trivial: the placement is the one without regard to loads; shared: every token picks it; hot:
    one copy would keep a rank busier than the mean rank; eased: it has copies, and its rank would
    be busier than it is without them; spare: copies that its load does not ask for; single: one
    copy is enough; short: it needs more copies than it has.
    """
    placed = view.placed
    copies = int(placed.replica_count[row, expert])
    if view.is_trivial:
        text = "experts in order, then copies in order: loads were not looked at"
        return "trivial", text
    if expert >= view.num_routed:
        return "shared", f"every token picks it: {copies} copies share that"
    if view.history is None or not view.busy[row]:
        return "unknown", "no load is known that would say why"
    mean = float(view.rank_loads[row].mean())
    alone = float(view.loads[row, expert]) / mean
    each = alone / copies
    said = f"its load is {alone:.2f} of a mean rank's"
    if copies > 1 and alone > 1:
        return "hot", f"{said}: one copy would overload any rank; {copies} carry {each:.2f} each"
    if each > 1:
        return "short", f"{said}, more than {copies} {'copy' if copies == 1 else 'copies'} can even"
    if copies == 1:
        return "single", f"{said}: one copy is enough"
    slots = int((placed.physical_to_logical[row] != EMPTY).sum())
    fair = alone * slots / placed.num_ranks  # in slots of mean load
    if fair > copies - 1:
        return "eased", f"{said}, as {fair:.1f} mean slots: {copies} copies spread it"
    return "spare", f"{said}, as {fair:.1f} mean slots: {copies} copies, where slots were left"


def _ranks(view: View, row: int) -> list[dict[str, Any]]:
    placed = view.placed
    loaded = view.history is not None and bool(view.busy[row])
    return [
        {
            "rank": rank,
            "node": view.node_of(rank),
            "rank_times_mean": float(view.rank_times_mean[row, rank]) if loaded else None,
            "experts": placed.experts_of(rank, row),
        }
        for rank in range(placed.num_ranks)
    ]


# -- the picture --------------------------------------------------------------------------------


def _title(report: dict[str, Any]) -> Any:
    from rich.text import Text

    text: Text = head(report)
    text.append(f"\nlayer {report['layer']}{' (MTP)' if report['mtp'] else ''}", style="bold")
    said = []
    if report["picks"] is not None:
        said.append(f"{show_count(report['picks'])} picks")
    if "balance" in report:
        said.append(
            f"busiest rank {report['balance']:.3f} of the mean (bound {report['bound']:.3f})"
        )
    if report["expert_bytes"]:
        said.append(f"{show_bytes(report['expert_bytes'])} an expert")
    text.append("  " + ", ".join(said), style="dim")
    return text


def layer_screen(report: dict[str, Any], most: int = 0) -> Any:
    from rich.console import Group

    experts = sorted(report["experts"], key=lambda x: (-(x["load"] or 0), x["expert"]))
    shown = experts[: most or len(experts)]
    placed = "copies" in experts[0]
    rows = []
    full = max([3.0, *(x["times_mean"] or 0 for x in shown)])
    for x in shown:
        row: list[Any] = [x["name"]]
        if x["times_mean"] is not None:
            row += [meter(x["times_mean"], full, 12, mark=1.0), heat(x["times_mean"])]
            row += [f"{x['share']:.2%}"]
        if placed:
            row += [x["copies"], ", ".join(map(str, x["ranks"])), x["reason"]]
        rows.append(row)
    columns = ["expert"]
    if shown[0]["times_mean"] is not None:
        columns += ["<load / mean", "", "share"]
    if placed:
        columns += ["copies", "<on ranks", "<why"]
    note = f"{len(shown)} of {len(experts)}" if len(shown) < len(experts) else ""
    parts = [_title(report), table("Experts, the busiest first", columns, rows, note)]
    if report["ranks"]:
        parts.append(_rank_table(report["ranks"]))
    return Group(*parts)


def _rank_table(ranks: list[dict[str, Any]]) -> Any:
    loaded = ranks[0]["rank_times_mean"] is not None
    rows = []
    for x in ranks:
        row: list[Any] = [x["rank"], *([] if x["node"] is None else [x["node"]])]
        if loaded:
            row += [meter(x["rank_times_mean"], 2.0, 8, mark=1.0), heat(x["rank_times_mean"])]
        hosted = sorted(e for e in x["experts"] if e != EMPTY)
        empty = len(x["experts"]) - len(hosted)
        row.append(ranges(hosted) + (f", {empty} empty" if empty else ""))
        rows.append(row)
    columns = ["rank", *(["node"] if ranks[0]["node"] is not None else [])]
    columns += [*(["<load / mean", ""] if loaded else []), "<experts"]
    return table("Ranks", columns, rows)


def expert_screen(report: dict[str, Any]) -> Any:
    from rich.console import Group
    from rich.text import Text

    expert = report["expert"]
    text = Text(f"expert {expert['name']}", style="bold")
    said = []
    if expert["times_mean"] is not None:
        said.append(
            f"{expert['times_mean']:.2f} times the mean expert, {expert['share']:.2%} of picks"
        )
    if "copies" in expert:
        said.append(f"{expert['copies']} cop{'y' if expert['copies'] == 1 else 'ies'}")
    text.append("  " + ", ".join(said), style="dim")
    parts: list[Any] = [_title(report), text]
    if "reason" in expert:
        parts.append(Text(f"why: {expert['reason']}: {expert['because']}"))
    if report["replicas"]:
        rows = []
        for x in report["replicas"]:
            times = x["rank_times_mean"]
            others = sorted(e for e in x["experts"] if e not in (EMPTY, expert["expert"]))
            load = "-" if times is None else heat(times)
            node = [] if x["node"] is None else [x["node"]]
            where = [x["slot"], x["rank"], *node]
            rows.append([*where, f"{x['share']:.0%}", load, ranges(others) or "none"])
        node = [] if report["replicas"][0]["node"] is None else ["node"]
        columns = ["slot", "rank", *node, "of its load", "rank's load", "<beside experts"]
        parts.append(table("Copies", columns, rows, "rank's load: of the layer, 1 is the mean"))
    return Group(*parts)
