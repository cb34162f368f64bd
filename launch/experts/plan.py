"""`moeserve experts plan`: what if there were other GPUs, copies, nodes: balance, moves, seconds.

Shape letters: L layers, E experts, G GPUs, k slots a GPU.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ep.placement import ExpertPlacement
from ep.planner import Plan, PlanOptions, plan
from ep.planning.plan_loads import PlanError
from ep.presets import Layout
from launch.experts.cases import Wanted, pieces
from launch.experts.screen import console, emit, heat, table
from launch.experts.source import Source
from launch.experts.top_screen import head
from launch.experts.units import parse_bytes, show_bytes, show_seconds
from launch.experts.view import IntArray, View
from launch.output import unwritable
from moeserve.errors import ConfigError


@dataclass(frozen=True)
class WhatIf:
    """The command's flags. bandwidth: into a GPU. output: where the plan of one case is saved."""

    source: Source
    wanted: Wanted
    policy: str = "ours"
    robust: str = "mean"
    max_moved: int | None = None
    extra_slots: int = 0
    bandwidth: str = "50GB/s"
    expert_bytes: str | None = None
    output: Path | None = None
    as_json: bool = False

    def run(self) -> None:
        rate = parse_bytes("--bandwidth", self.bandwidth, rate=True)
        each = (
            None if self.expert_bytes is None else parse_bytes("--expert-bytes", self.expert_bytes)
        )
        self._check_output()
        view = self.source.read()
        if not view.has_load:
            raise ConfigError([f"{view.name}: no expert had any load: nothing to plan for"])
        if each is not None:
            view = replace(view, expert_bytes=(int(each),) * len(view.layers))
        cases = self.wanted.cases(view)
        if self.output is not None and len(cases) > 1:
            raise ConfigError(
                [f"--output {self.output}: one plan is saved; {len(cases)} were asked"]
            )
        made = [self._plan(view, case) for case in cases]
        report = plan_report(view, cases, made, rate)
        if self.output is not None:
            made[0][1].placement.save(self.output)
            report["file"] = str(self.output)
        if self.as_json:
            emit(report)
            return
        screen = console()
        screen.print(plan_screen(report, screen.width))
        if len(made) == 1:
            for note in made[0][1].explanation.notes:
                screen.print(note)
        if self.output is not None:
            screen.print(f"{self.output}: saved, as generation {made[0][1].placement.generation}")

    def _check_output(self) -> None:
        if self.output is not None and self.output.suffix not in (".json", ".npz"):
            raise ConfigError([f"--output {str(self.output)!r}: must end in .json or .npz"])
        if problems := unwritable("--output", self.output):
            raise ConfigError(problems)

    def _plan(self, view: View, case: Layout) -> tuple[View, Plan, float]:
        fitted = self.wanted.fitted(view, case)
        start = time.perf_counter()
        try:
            options = PlanOptions(
                policy=self.policy,
                group_policy=case.group_policy,
                robust=self.robust,
                extra_slots_per_gpu=self.extra_slots,
                max_moved_slots=self.max_moved,
                num_ungrouped=pieces(view) if case.shared == "hosted" else 0,
            )
            made = plan(
                fitted.loads if self.robust == "mean" else fitted.history,
                num_gpus=case.num_gpus,
                num_slots_per_gpu=case.slots_per_gpu,
                num_nodes=case.num_nodes,
                num_groups=case.num_groups,
                previous=fitted.placement,
                options=options,
            )
        except PlanError as error:
            raise ConfigError([f"{case.name}: {error}"]) from None
        return fitted, made, time.perf_counter() - start


# -- the numbers --------------------------------------------------------------------------------


def plan_report(
    view: View, cases: list[Layout], made: list[tuple[View, Plan, float]], rate: float
) -> dict[str, Any]:
    """As JSON. now: the placement in use on these loads, None without one."""
    report: dict[str, Any] = {"command": "plan", **view.summary()}
    report["tokens"] = view.about.get("tokens")
    report["bandwidth"] = rate
    report["now"] = None
    if view.placement is not None:
        placed = view.placement
        report["now"] = {
            "num_gpus": placed.num_ranks,
            "slots_per_gpu": placed.num_local_experts,
            "num_redundant": placed.num_redundant_experts,
            **mean_and_worst(view, view.balance),
        }
    report["cases"] = [
        _case(view, case, *parts, rate) for case, parts in zip(cases, made, strict=True)
    ]
    if len(made) == 1:
        report["explanation"] = made[0][1].explanation.to_dict()
    return report


def mean_and_worst(view: View, balance: Any) -> dict[str, Any]:
    """Over the layers that have load."""
    busy = np.flatnonzero(view.busy)
    worst = int(busy[balance[busy].argmax()])
    return {
        "mean": float(balance[busy].mean()),
        "worst": float(balance[worst]),
        "worst_layer": view.row_name(worst),
    }


def _case(
    view: View, case: Layout, fitted: View, made: Plan, seconds: float, rate: float
) -> dict[str, Any]:
    why = made.explanation
    experts = fitted.num_experts
    slots = int(why.slots_per_gpu.sum())  # of all layers, a GPU
    out: dict[str, Any] = {
        "name": case.name,
        "num_gpus": case.num_gpus,
        "num_nodes": case.num_nodes,
        "slots_per_gpu": case.slots_per_gpu,
        "num_slots": case.num_slots,
        "num_redundant": case.num_slots - experts,
        "shared_expert": case.shared,
        "policy": why.policy,
        "group_policy": case.group_policy,
        "grouped_layers": int(why.grouped.sum()),
        "after": mean_and_worst(fitted, why.after),
        "bound": mean_and_worst(fitted, why.bound)["mean"],
        "duplicates": int(why.duplicates.sum()),
        "extra_slots_per_gpu": why.extra_slots_per_gpu,
        "plan_seconds": seconds,
        "notes": list(why.notes),
    }
    out |= moves(fitted.placement, made.placement, view.expert_bytes, rate)
    sizes = view.expert_bytes
    mean_bytes = sum(sizes) / len(sizes) if sizes else None
    least = -(-experts // case.num_gpus) * len(view.layers)
    out["bytes_per_gpu"] = None if mean_bytes is None else slots * mean_bytes
    out["extra_bytes_per_gpu"] = None if mean_bytes is None else (slots - least) * mean_bytes
    return out


def moves(
    old: ExpertPlacement | None, new: ExpertPlacement, sizes: tuple[int, ...], rate: float
) -> dict[str, Any]:
    """What going from old to new costs. A slot has moved if its expert was not on that GPU; seconds
    are of the GPU that gets most bytes. None without an old placement, or where an expert's bytes
    are not known."""
    out: dict[str, Any] = dict.fromkeys(
        ("moved_slots", "moved_share", "moved_bytes", "most_bytes_into_a_gpu", "seconds")
    )
    if old is None:
        return out
    into = moved_into(old, new)
    filled = int((new.physical_to_logical >= 0).sum())
    out["moved_slots"] = int(into.sum())
    out["moved_share"] = float(into.sum() / filled)
    if sizes:
        weights = into * np.array(sizes, np.float64)[:, None]
        most = float(weights.sum(axis=0).max())
        out["moved_bytes"] = float(weights.sum())
        out["most_bytes_into_a_gpu"] = most
        out["seconds"] = most / rate
    return out


def moved_into(old: ExpertPlacement, new: ExpertPlacement) -> IntArray:
    """[L, G]: slots of each GPU whose expert was not on it."""
    layers, gpus = new.num_layers, new.num_ranks
    table = new.physical_to_logical.reshape(layers, gpus, -1)
    before = old.physical_to_logical.reshape(layers, old.num_ranks, -1)
    had = np.zeros((layers, gpus, new.num_logical_experts + 1), dtype=bool)
    shared = min(gpus, old.num_ranks)
    at = (np.arange(layers)[:, None, None], np.arange(shared)[:, None], before[:, :shared])
    had[at] = True  # -1 lands in the last column, which no expert reads
    kept = had[np.arange(layers)[:, None, None], np.arange(gpus)[:, None], table]
    moved: IntArray = (~kept & (table >= 0)).sum(axis=2)
    return moved


# -- the picture --------------------------------------------------------------------------------


WIDE = 112  # columns from which balance and cost share a table


def plan_screen(report: dict[str, Any], columns: int) -> Any:
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [head(report)]
    now = report["now"]
    if now is not None:
        gpus, slots, copies = now["num_gpus"], now["slots_per_gpu"], now["num_redundant"]
        text = Text("now  ", style="bold")
        text.append(
            f"{gpus} GPUs x {slots} slots, {copies} copies; balance {now['mean']:.3f}, worst "
            f"{now['worst']:.3f} (layer {now['worst_layer']})"
        )
        parts.append(text)
    cases = report["cases"]
    moving = any(x["moved_slots"] is not None for x in cases)
    sized = any(x["extra_bytes_per_gpu"] is not None for x in cases)
    what = ["GPUs", "slots", "copies"]
    which = [[x["num_gpus"], x["slots_per_gpu"], x["num_redundant"]] for x in cases]
    even = ["<groups", "balance", "worst", "bound"]
    evens = [_even(x) for x in cases]
    cost = ["moved", "share"] if moving else []
    cost += ["bytes", "time"] if moving and sized else []
    cost += ["copies' memory"] if sized else []
    costs = [_cost(x, moving, sized) for x in cases]
    notes = "; ".join(_notes(report, moving, sized))
    if columns >= WIDE or not cost:
        rows = [a + b + c for a, b, c in zip(which, evens, costs, strict=True)]
        parts.append(table("What if", [*what, *even, *cost], rows, notes))
        return Group(*parts)
    rows = [a + b for a, b in zip(which, evens, strict=True)]
    parts.append(table("What if: balance", [*what, *even], rows))
    rows = [a + b for a, b in zip(which, costs, strict=True)]
    parts.append(table("What if: cost", [*what, *cost], rows, notes))
    return Group(*parts)


def _even(x: dict[str, Any]) -> list[Any]:
    groups = x["group_policy"]
    if x["grouped_layers"] and groups == "priced":
        groups += f" (node in {x['grouped_layers']} layers)"
    after = x["after"]
    return [
        groups,
        heat(after["mean"], digits=3),
        heat(after["worst"], digits=3),
        f"{x['bound']:.3f}",
    ]


def _cost(x: dict[str, Any], moving: bool, sized: bool) -> list[Any]:
    row: list[Any] = []
    if moving:
        known = x["moved_slots"] is not None
        row += [x["moved_slots"], f"{x['moved_share']:.1%}"] if known else ["-", "-"]
    if moving and sized:
        row += [show_bytes(x["moved_bytes"]), show_seconds(x["seconds"])]
    return [*row, show_bytes(x["extra_bytes_per_gpu"])] if sized else row


def _notes(report: dict[str, Any], moving: bool, sized: bool) -> list[str]:
    notes = ["balance: busiest GPU / mean, mean of layers"]
    if moving and sized:
        notes.append(f"time: of the GPU that gets most, at {show_bytes(report['bandwidth'])}/s")
    if sized:
        notes.append("copies' memory: a GPU, all layers")
    else:
        notes.append("bytes and memory are not known: give --expert-bytes")
    if any(x["shared_expert"] == "hosted" for x in report["cases"]):
        notes.append("the shared expert is hosted in slots")
    if not moving:
        notes.append("no placement is known to move from")
    return notes
