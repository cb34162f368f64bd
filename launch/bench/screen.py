"""How results of `moeserve bench` are shown: tables on stdout, the last line one JSON object. Knows
rich; nothing of what is measured."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

_WIDTH = 150


def wide_console() -> Console:
    """stdout; a table in a file or a pipe is not cut to a terminal's width."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH
    return console


def last_line(result: dict[str, Any]) -> None:
    """One line of JSON, the last."""
    print(json.dumps(result, default=str), flush=True)
