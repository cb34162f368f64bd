"""A picture of what a search found: each layout, the front, the best.

Knows how it looks. Computes nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launch.capacity.asked import Asked
from launch.capacity.candidates import Candidate
from launch.capacity.canvas import BAD, FAINT, GOOD, INK, PAPER, head, new_figure, plain, save
from launch.capacity.parts import load_told, mode_of, model_short
from launch.capacity.screen_search import front_names, front_rows
from launch.capacity.search import Found, Ratio
from moeserve.terminal import counted


def draw_search(found: list[Found], shares: Ratio | None, asked: Asked, path: Path) -> None:
    """What each allowed layout gives against what users wait, a panel a phase."""
    d, work = asked.bases[0], asked.work
    figure = new_figure(6.6 * len(found) + 0.4, 7.1)
    axes = figure.subplots(1, len(found), squeeze=False)[0]
    figure.subplots_adjust(
        left=0.085 if len(found) > 1 else 0.13, right=0.975, top=0.82, bottom=0.2
    )
    figure.subplots_adjust(wspace=0.22)
    for axis, f in zip(axes, found, strict=True):
        _front(axis, f, f.limit)
    title, shown = f"{d.model} on {d.gpu.title}", "what a GPU gives against what users wait"
    pool = f"up to {counted(asked.most_gpus, 'GPU')} a pool"
    lines = [f"prompt of {work.input_tokens:,}, answer of {work.output_tokens:,} tokens"]
    if by := model_short(asked.by, mode_of(d), (f.phase for f in found)):
        lines[0] += f"   ·   {by}"
    if len(found) == 1:  # half as wide
        lines.insert(0, f"{shown}   ·   {pool}")
    else:
        title, lines[0] = f"{title}: {shown}", f"{pool}   ·   {lines[0]}"
    if shares is not None:
        lines.append(
            f"{shares.prefill} prefill : {shares.decode} decode instances keep up with each other: "
            f"{counted(shares.gpus, 'GPU')}, {shares.requests_per_s:.1f} requests/s"
        )
    head(figure, title, lines)
    save(figure, path, title, [_front_table(f) for f in found])


def _front(axis: Any, f: Found, limit: float | None) -> None:
    name = "TPOT" if f.phase == "decode" else "TTFT"
    plain(axis)
    axis.set_xscale("log")
    said = f"{f.phase}: {len(f.allowed):,} layouts that break no rule"
    axis.set_title(said, loc="left", pad=8, fontsize=10.5, color=INK)
    axis.set_xlabel(f"{name}, ms", fontsize=9.5, color=INK)
    what = "output" if f.phase == "decode" else "prompt"
    axis.set_ylabel(f"{what} tokens/s a GPU", fontsize=9.5, color=INK)
    if not f.allowed:
        axis.text(0.5, 0.5, "none fits", transform=axis.transAxes, ha="center", color=BAD)
        return
    sizes = sorted({x.deployment.gpus for x in f.allowed})
    shown = axis.scatter(
        [1e3 * x.latency for x in f.allowed],
        [x.prediction.per_gpu for x in f.allowed],
        c=[sizes.index(x.deployment.gpus) / max(len(sizes) - 1, 1) for x in f.allowed],
        cmap="viridis_r",
        s=9,
        alpha=0.35,
        linewidths=0,
        rasterized=True,
    )
    shown.set_gid(f"{f.phase}-allowed")
    axis.plot(
        [1e3 * x.latency for x in f.pareto],
        [x.prediction.per_gpu for x in f.pareto],
        "-o",
        color=INK,
        linewidth=1.4,
        markersize=4.5,
        label="no other beats these",
    )
    axis.set_ylim(0, 1.08 * max(x.prediction.per_gpu for x in f.pareto))
    low, high = axis.get_xlim()
    if limit is not None:
        low, high = min(low, 900 * limit), max(high, 1100 * limit)
        axis.axvline(1e3 * limit, color=BAD, linewidth=1.3, linestyle="--")
        axis.axvspan(1e3 * limit, high, color=BAD, alpha=0.05, linewidth=0)
        y = 0.015 * axis.get_ylim()[1]
        axis.text(1e3 * limit, y, f" limit {1e3 * limit:g} ms", color=BAD, fontsize=8.5)
    axis.set_xlim(low, high)
    if f.best is not None:
        _mark(axis, f.best)
    ticks = [t * 10**e for e in range(7) for t in (1, 2, 5) if low <= t * 10**e <= high]
    axis.xaxis.set_ticks(ticks, labels=[f"{t:,}" for t in ticks])
    axis.xaxis.set_ticks([], minor=True)
    small, large = (counted(sizes[i], "GPU") for i in (0, -1))
    axis.text(
        0.99,
        1.015,
        f"light: {small}, dark: {large}",
        transform=axis.transAxes,
        ha="right",
        fontsize=8,
        color=FAINT,
    )


def _mark(axis: Any, x: Candidate) -> None:
    """What it is stands below the axis, where it hides nothing."""
    d = x.deployment
    drafts = f", {counted(d.drafts, 'draft')}" if d.phase == "decode" else ""
    said = [
        f"best: {x.prediction.per_gpu:,.0f} tokens/s a GPU at {1e3 * x.latency:,.1f} ms   ·   "
        f"{load_told(d)}{drafts}",
        f"{counted(d.gpus, 'GPU')}, {counted(d.slots_per_gpu, 'slot')} each, shared {d.shared}   "
        f"·   balance {d.balance:.3f}, overlap {'on' if d.overlap else 'off'}, {d.dispatch}",
    ]
    at = (1e3 * x.latency, x.prediction.per_gpu)
    axis.plot(*at, "o", color=GOOD, markersize=11, markeredgecolor=PAPER, markeredgewidth=1.5)
    axis.text(
        0.0,
        -0.135,
        "\n".join(said),
        transform=axis.transAxes,
        ha="left",
        va="top",
        fontsize=8.6,
        color=INK,
        linespacing=1.4,
        bbox={"boxstyle": "round,pad=0.5", "facecolor": PAPER, "edgecolor": GOOD},
    )


def _front_table(f: Found) -> tuple[str, list[list[str]]]:
    return f"{f.phase}: layouts that no other beats", [front_names(f), *front_rows(f)]
