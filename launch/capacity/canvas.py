"""A figure to draw on and a file to put it in: PNG, SVG, or a page that needs nothing else.

Knows matplotlib, colours, file endings. Knows nothing of plans. The same data gives the same bytes.
"""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moeserve.errors import ConfigError

INK, PAPER, FAINT, LINE = "#1b1f24", "#ffffff", "#6b7280", "#e5e7eb"
BAD, GOOD = "#b3261e", "#2e7d32"


def new_figure(width: float, height: float) -> Any:
    """Inches. ConfigError where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            [f"--plot: pictures need matplotlib ({error}); install moeserve[pictures]"]
        ) from None
    figure = Figure(figsize=(width, height), dpi=130, facecolor=PAPER)
    FigureCanvasAgg(figure)
    return figure


def plain(axis: Any) -> None:
    """Only what carries meaning."""
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color(FAINT)
    axis.tick_params(labelsize=8.5, colors=INK, length=3)
    axis.grid(color=LINE, linewidth=0.8)
    axis.set_axisbelow(True)


def head(figure: Any, title: str, lines: Sequence[str]) -> None:
    """Above everything, from the top: a title and lines below it."""
    inch = 1 / figure.get_figheight()
    figure.text(0.05, 1 - 0.38 * inch, title, fontsize=15, weight="bold", color=INK)
    for i, line in enumerate(lines):
        figure.text(0.05, 1 - (0.66 + 0.2 * i) * inch, line, fontsize=9.5, color=FAINT)


def save(
    figure: Any, path: Path, title: str, tables: Sequence[tuple[str, list[list[str]]]]
) -> None:
    """tables: heading, rows of cells with names first; only a page has them, below the picture.
    ConfigError where the file cannot be written."""
    try:
        if path.suffix == ".html":
            path.write_text(_page(title, _svg(figure), tables), encoding="utf-8")
        elif path.suffix == ".svg":
            path.write_text(_svg(figure), encoding="utf-8")
        else:
            path.write_bytes(_png(figure))
    except OSError as error:
        raise ConfigError([f"--plot={path}: cannot be written: {error}"]) from error


def _png(figure: Any) -> bytes:
    """In 256 colours: a third of the bytes."""
    from PIL import Image  # matplotlib needs it itself

    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", metadata={"Software": None})
    with Image.open(drawn) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(
            small, "PNG", optimize=True
        )
    return small.getvalue()


def _svg(figure: Any) -> str:
    import matplotlib

    held = io.StringIO()
    # Letters stay letters, and ids do not change from run to run.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "moeserve"}):
        figure.savefig(held, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in held.getvalue().splitlines()) + "\n"


def _page(title: str, svg: str, tables: Sequence[tuple[str, list[list[str]]]]) -> str:
    drawn = svg[svg.index("<svg") :]
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'>",
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style>",
        drawn,
    ]
    for heading, (names, *rows) in tables:
        parts.append(f"<h2>{html.escape(heading)}</h2><table><tr>")
        parts += [f"<th>{html.escape(name)}</th>" for name in names]
        for row in rows:
            marked = " class='best'" if "best" in row else ""
            parts.append(f"</tr><tr{marked}>")
            parts += [f"<td>{html.escape(cell)}</td>" for cell in row]
        parts.append("</tr></table>")
    return "\n".join(parts) + "\n</html>\n"


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;color:#1b1f24;background:#fff;max-width:1250px;"
    "margin:1.5rem auto;padding:0 1rem}svg{width:100%;height:auto}table{border-collapse:collapse}"
    "td,th{padding:.2rem .8rem;text-align:right;border-bottom:1px solid #e5e7eb}"
    ".best{font-weight:600;color:#2e7d32}h2{font-size:1.05rem;margin-top:1.6rem}"
)
