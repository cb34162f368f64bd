"""The heat map as a PNG: layer x expert above, layer x rank below. Knows matplotlib, a report."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from launch.experts.top_screen import ranks_told, tokens_told
from moeserve.errors import ConfigError

HOT = 4.0  # times the mean: the end of the colour bar
INK, PAPER, FAINT, IDLE = "#1b1f24", "#ffffff", "#6b7280", "#e5e7eb"


def draw(report: dict[str, Any], path: Path) -> None:
    """Write the picture. ConfigError where matplotlib is not installed."""
    try:
        from matplotlib import colormaps
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import TwoSlopeNorm
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            [f"--output: pictures need matplotlib ({error}); install moeserve[pictures]"]
        ) from None
    shown = [
        (key, np.array(report[key])) for key in ("experts", "ranks") if report[key] is not None
    ]
    layers = report["layers"]
    tall = max(1.6, min(0.115 * len(layers), 7.0))
    height = 1.35 + len(shown) * (tall + 0.95)
    figure = Figure(figsize=(12.5, height), dpi=150, facecolor=PAPER)
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(shown), 1, squeeze=False)[:, 0]
    top, bottom = 1 - 1.05 / height, 0.62 / height
    figure.subplots_adjust(left=0.075, right=0.885, top=top, bottom=bottom, hspace=0.95 / tall)
    norm = TwoSlopeNorm(vcenter=1.0, vmin=0.0, vmax=HOT)
    colours = colormaps["RdBu_r"].with_extremes(bad=IDLE)
    for axis, (key, values) in zip(axes, shown, strict=True):
        seen = np.ma.masked_array(values, np.repeat(~values.any(axis=1), values.shape[1]))
        image = axis.imshow(seen, aspect="auto", interpolation="nearest", cmap=colours, norm=norm)
        _label(axis, key, values, report)
    long = min(4.2 / height, top - bottom)
    bar = figure.colorbar(
        image, cax=figure.add_axes((0.937, top - long, 0.011, long)), extend="max", extendfrac=0.03
    )
    bar.set_ticks([0, 0.5, 1, 2, 3, 4], labels=["0", "0.5", "1", "2", "3", "4"])
    bar.ax.tick_params(labelsize=8, colors=INK, length=2)
    bar.outline.set_visible(False)
    bar.set_label("times mean (of the layer)", fontsize=8.5, color=INK)
    inch = 1 / figure.get_figheight()
    figure.text(0.075, 1 - 0.36 * inch, "Expert load", fontsize=15, weight="bold", color=INK)
    figure.text(0.075, 1 - 0.62 * inch, _subtitle(report), fontsize=9.5, color=FAINT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a glyph of a file's name that the font lacks
        figure.savefig(path)


def _label(axis: Any, key: str, values: Any, report: dict[str, Any]) -> None:
    layers = report["layers"]
    rows, count = values.shape
    title = "by layer and expert" if key == "experts" else "by layer and rank"
    if key == "experts" and report["ordered"]:
        title += " (of each layer from the hottest to the coldest)"
    if key == "ranks":
        worst = int(values.max(axis=1).argmax())
        busy = values[values.max(axis=1) > 0].max(axis=1)
        mean = busy.mean() if len(busy) else 1.0
        title += f": busiest rank {mean:.2f} of the mean on average, {values.max():.2f} at worst"
        title += f" (layer {layers[worst]})"
    axis.set_title(title, loc="left", fontsize=10.5, color=INK, pad=6)
    every = max(1, -(-rows // 20))
    marks = [i for i in range(rows) if i % every == 0 or layers[i].endswith("MTP")]
    marks = [i for i in marks if layers[i].endswith("MTP") or not _near_mtp(layers, i, every)]
    axis.set_yticks(marks, labels=[layers[i] for i in marks])
    axis.set_ylabel("layer", fontsize=9, color=INK)
    routed = report["num_routed_experts"]
    if key == "experts" and count > routed:
        axis.axvline(routed - 0.5, color=INK, linewidth=1.2)
        axis.text(
            routed - 0.5,
            -0.7,
            "shared ",
            ha="right",
            va="bottom",
            fontsize=8,
            color=INK,
            clip_on=False,
        )
    first_mtp = next((i for i, name in enumerate(layers) if name.endswith("MTP")), None)
    if first_mtp:
        axis.axhline(first_mtp - 0.5, color=INK, linewidth=1.2)
    every = max(1, -(-count // 16))
    nice = next((n for n in (1, 2, 4, 8, 16, 32, 64) if n >= every), every)
    axis.set_xticks(range(0, count, nice))
    axis.set_xlabel("expert" if key == "experts" else "rank", fontsize=9, color=INK)
    axis.tick_params(labelsize=8, colors=INK, length=2)
    for side in axis.spines.values():
        side.set_visible(False)
    peak = values[:, : routed if key == "experts" else count].max(axis=1)
    right = axis.secondary_yaxis("right")
    step = max(1, -(-rows // 30))
    numbers = list(range(0, rows, step))
    right.set_yticks(numbers, labels=[f"{peak[i]:.1f}" for i in numbers])
    right.tick_params(labelsize=7, colors=FAINT, length=0, pad=2)
    right.spines["right"].set_visible(False)
    axis.text(1.004, 1.0, "busiest", transform=axis.transAxes, fontsize=7, color=FAINT, va="bottom")
    for row in np.flatnonzero(~values.any(axis=1)):
        axis.text(
            (count - 1) / 2, row, "no tokens", ha="center", va="center", fontsize=7, color=FAINT
        )


def _near_mtp(layers: list[str], row: int, every: int) -> bool:
    """Its label would touch that of an MTP layer."""
    return any(name.endswith("MTP") for name in layers[row + 1 : row + every]) and every > 1


def _subtitle(report: dict[str, Any]) -> str:
    said = [Path(report["source"]).name if "://" not in report["source"] else report["source"]]
    said += tokens_told(report)
    said.append(f"{report['num_layers']} layers, {report['num_experts']} experts")
    said += ranks_told(report)
    return "   ·   ".join(said)
