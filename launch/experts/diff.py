"""`moeserve experts diff`: two placements, recordings or jobs: drift of loads, churn of slots.

Shape letters: L layers, E experts, G ranks, P slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ep.load import balancedness
from ep.placement import EMPTY
from launch.experts.plan import mean_and_worst, moved_into
from launch.experts.screen import console, emit, heat, meter, table
from launch.experts.source import Source, since_of_jobs
from launch.experts.units import show_count
from launch.experts.view import FloatArray, View
from moeserve.errors import ConfigError


@dataclass(frozen=True)
class Diff:
    """The command's flags: from the first to the second."""

    first: Source
    second: Source
    rows: int = 10
    as_json: bool = False

    def run(self) -> None:
        first, second = since_of_jobs(self.first, self.second)
        report = diff_report(first.read(), second.read())
        if self.as_json:
            emit(report)
            return
        console().print(diff_screen(report, self.rows))


# -- the numbers --------------------------------------------------------------------------------


def diff_report(a: View, b: View) -> dict[str, Any]:
    """As JSON. drift: where both have loads; churn: where both know a placement; balance: loads of
    each under the placement of each, as far as known."""
    mine, theirs = (len(a.layers), a.num_experts), (len(b.layers), b.num_experts)
    if mine != theirs:
        raise ConfigError(
            [
                f"{a.name} has {mine[0]} layers of {mine[1]} experts, {b.name} has {theirs[0]} of "
                f"{theirs[1]}: they do not compare"
            ]
        )
    named = b if a.kind == "placement" else a  # a placement does not know the model's numbers
    report: dict[str, Any] = {
        "command": "diff",
        "first": a.summary(),
        "second": b.summary(),
        "drift": None,
        "churn": None,
        "balance": _balances(a, b),
    }
    if a.has_load and b.has_load:
        report["drift"] = _drift(a, b)
    if a.placement is not None and b.placement is not None:
        report["churn"] = _churn(a, b, named)
    if report["drift"] is None and report["churn"] is None and not report["balance"]:
        raise ConfigError(
            [f"{a.name} and {b.name} have nothing in common: neither both loads nor placements"]
        )
    return report


def total_variation(a: FloatArray, b: FloatArray) -> FloatArray:
    """[L, E] twice -> [L]: half the sum of differences of shares; 0 the same, 1 nothing in common.
    NaN where one of them has no load."""
    p, q = _shares(a), _shares(b)
    out: FloatArray = np.abs(p - q).sum(axis=1) / 2
    return out


def _shares(loads: FloatArray) -> FloatArray:
    total = loads.sum(axis=1, keepdims=True)
    out = np.full_like(loads, np.nan)
    np.divide(loads, total, out=out, where=total > 0)
    return out


def _drift(a: View, b: View) -> dict[str, Any]:
    apart = total_variation(a.loads, b.loads)
    both = np.flatnonzero(~np.isnan(apart))
    layers = []
    for row in both:
        p, q = a.loads[row], b.loads[row]
        same = p.std() == 0 or q.std() == 0
        most = int(np.abs(p / p.sum() - q / q.sum()).argmax())
        layers.append(
            {
                "layer": a.layers[row] if a.kind != "placement" else b.layers[row],
                "mtp": a.is_mtp(int(row)),
                "total_variation": float(apart[row]),
                "correlation": None if same else float(np.corrcoef(p, q)[0, 1]),
                "most_changed_expert": most,
                "share_before": float(p[most] / p.sum()),
                "share_after": float(q[most] / q.sum()),
            }
        )
    known = [x["correlation"] for x in layers if x["correlation"] is not None]
    return {
        "total_variation": float(apart[both].mean()) if len(both) else None,
        "worst_total_variation": float(apart[both].max()) if len(both) else None,
        "correlation": float(np.mean(known)) if known else None,
        "layers": layers,
    }


def _churn(a: View, b: View, named: View) -> dict[str, Any]:
    """changed: slots with another expert, None where slots differ in number; moved: slots whose
    expert was not on that rank before."""
    old, new = a.placed, b.placed
    moved = moved_into(old, new)
    filled = (new.physical_to_logical != EMPTY).sum(axis=1)
    changed = None
    if old.physical_to_logical.shape == new.physical_to_logical.shape and (
        old.num_ranks == new.num_ranks
    ):
        changed = (old.physical_to_logical != new.physical_to_logical).sum(axis=1)
    copies = np.abs(old.replica_count - new.replica_count).sum(axis=1)
    layers = [
        {
            "layer": named.layers[row],
            "slots": int(filled[row]),
            "moved": int(moved[row].sum()),
            "changed": None if changed is None else int(changed[row]),
            "copies_changed": int(copies[row]),
        }
        for row in range(new.num_layers)
    ]
    return {
        "ranks": [old.num_ranks, new.num_ranks],
        "generations": [old.generation, new.generation],
        "slots": int(filled.sum()),
        "moved": int(moved.sum()),
        "moved_share": float(moved.sum() / filled.sum()),
        "changed": None if changed is None else int(changed.sum()),
        "layers_changed": int((moved.sum(axis=1) > 0).sum()),
        "layers": layers,
    }


def _balances(a: View, b: View) -> list[dict[str, Any]]:
    out = []
    for loads, name in ((a, "first"), (b, "second")):
        if not loads.has_load:
            continue
        for placed, of in ((a, "first"), (b, "second")):
            if placed.placement is not None:
                balance = balancedness(loads.loads, placed.placement)
                out.append({"loads": name, "placement": of, **mean_and_worst(loads, balance)})
    return out


# -- the picture --------------------------------------------------------------------------------


def diff_screen(report: dict[str, Any], most: int) -> Any:
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = []
    for name in ("first", "second"):
        x = report[name]
        text = Text(f"{name:<7}", style="dim")
        text.append(str(x["source"]), style="bold")
        placed = f", placement {x['generation']}" if x["generation"] is not None else ""
        ranks = f", {x['num_ranks']} ranks" if x["num_ranks"] else ""
        text.append(f"  {x['kind']}{ranks}{placed}", style="dim")
        parts.append(text)
    if report["drift"] is not None:
        parts.append(_drift_table(report["drift"], most))
    if report["churn"] is not None:
        parts.append(_churn_table(report["churn"], most))
    if report["balance"]:
        rows = [
            [x["loads"], x["placement"], heat(x["mean"], digits=3), heat(x["worst"], digits=3)]
            for x in report["balance"]
        ]
        columns = ("<loads of", "<placement of", "balance", "worst")
        parts.append(table("Balance: busiest rank / mean", columns, rows))
    return Group(*parts)


def _drift_table(drift: dict[str, Any], most: int) -> Any:
    layers = sorted(drift["layers"], key=lambda x: -x["total_variation"])
    full = max([0.2, *(x["total_variation"] for x in layers[:1])])
    rows = []
    for x in layers[:most]:
        correlation = "-" if x["correlation"] is None else f"{x['correlation']:.3f}"
        rows.append(
            [
                f"{x['layer']}{' MTP' if x['mtp'] else ''}",
                meter(x["total_variation"], full, 12),
                f"{x['total_variation']:.3f}",
                correlation,
                x["most_changed_expert"],
                f"{x['share_before']:.1%} -> {x['share_after']:.1%}",
            ]
        )
    columns = ("layer", "<total variation", "", "correlation", "expert", "<its share")
    title = "Drift: no layer has load in both"
    if layers:
        title = f"Drift: total variation {drift['total_variation']:.4f} on average"
        title += f", {drift['worst_total_variation']:.4f} at worst"
        if drift["correlation"] is not None:
            title += f"; correlation {drift['correlation']:.3f}"
    note = f"the worst {len(rows)} of {len(layers)} layers" if len(rows) < len(layers) else ""
    return table(title, columns, rows, note)


def _churn_table(churn: dict[str, Any], most: int) -> Any:
    from rich.text import Text

    layers = sorted(churn["layers"], key=lambda x: (-x["moved"], x["layer"]))
    rows = [
        [
            x["layer"],
            x["slots"],
            x["moved"],
            "-" if x["changed"] is None else x["changed"],
            x["copies_changed"],
        ]
        for x in layers[:most]
        if x["moved"] or x["changed"] or x["copies_changed"]
    ]
    title = (
        f"Churn: {show_count(churn['moved'])} of {show_count(churn['slots'])} slots "
        f"({churn['moved_share']:.1%}) got an expert that was not on their rank, in "
        f"{churn['layers_changed']} layers"
    )
    if not rows:
        return Text("Churn: none, the same experts on every rank\n", style="bold")
    columns = ("layer", "slots", "moved", "changed", "copies +/-")
    note = f"{len(rows)} of {len(layers)} layers" if len(rows) < len(layers) else ""
    return table(title, columns, rows, note)
