"""How results of `moeserve bench` are shown: tables on stdout, or one JSON document and no more.
Knows rich; nothing of what is measured."""

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


def only_json(result: dict[str, Any]) -> None:
    """One JSON document, on one line."""
    print(json.dumps(result, default=str), flush=True)
