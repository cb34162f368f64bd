"""How the engine's figures on a device are shown: a table of phases, one of a step's parts.

Knows rows of engine_gpu.py and rich; nothing of how they were measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from launch.bench.engine_gpu import EngineReport
from launch.bench.engine_gpu_steps import EngineRow
from launch.bench.screen import wide_console

MOST_PARTS = 10


V3_MODEL = "DeepSeek-V3's dimensions"


def show_engine(report: EngineReport, device: str, layers: int, model: str = V3_MODEL) -> None:
    """model: whose dimensions these are, in words."""
    from rich.markup import escape
    from rich.table import Table

    console = wide_console()
    table = Table(
        title=f"engine on {device}: {model}, {layers} layers, EP 1",
        title_justify="left",
    )
    table.add_column("phase")
    for name in ("tokens/s", "ms a step", "predicted ms", "of it", "launches", "device idle"):
        table.add_column(name, justify="right")
    table.add_column("steps")
    for row in report.rows:
        table.add_row(*(escape(cell) for cell in cells(row)))
    console.print(table)
    parts = Table(title="ms of a step by kernel, where traced", title_justify="left")
    parts.add_column("phase")
    parts.add_column("kernels, the longest first")
    for row in report.rows:
        if row.parts:
            parts.add_row(title(row), escape(_told(row.parts)))
    if parts.row_count:
        console.print(parts)
    for line in lines(report):
        console.print(line, markup=False)


def title(row: EngineRow) -> str:
    count = f"{row.sequences} x {row.context}"
    return f"{row.mode} {row.what} {count}"


def cells(row: EngineRow) -> list[str]:
    if row.error:
        return [title(row), "failed", "", "", "", "", "", row.error]
    idle = "-" if row.idle is None else f"{row.idle:.0%}"
    how = "replayed" if row.replayed else "eager"
    return [
        title(row),
        f"{row.tokens_per_second:,.0f}",
        f"{row.step_seconds * 1e3:.2f}",
        f"{row.predicted * 1e3:.2f}",
        f"{row.predicted / row.step_seconds:.0%}" if row.step_seconds else "",
        str(row.launches),
        idle,
        f"{how}; {row.note}" if row.note else how,
    ]


def lines(report: EngineReport) -> list[str]:
    told = [
        "predicted: bytes and FLOPs of each launch at the rates measured here, one after the other",
        *dict.fromkeys(report.notes),
    ]
    done = len(report.rows) - len(report.failed)
    if report.left:
        told.append(f"measured in part: {done} of {len(report.rows) + len(report.left)} phases")
        told.append(f"not measured: {', '.join(report.left)}")
    told.append(f"{done} phases in {report.seconds:.0f} s")
    return told


def _told(parts: dict[str, float]) -> str:
    chosen: Sequence[tuple[str, float]] = list(parts.items())[:MOST_PARTS]
    return ", ".join(f"{name} {seconds * 1e3:.2f}" for name, seconds in chosen)
