"""Arguments and flags that several `moeserve experts` commands share. Knows typer, nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

WHAT, WHERE, HOW = "What to look at", "Where experts live", "Output"

SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="URL of a server, a recording, a placement file, or another tool's dump of loads",
    ),
]
AdminKey = Annotated[
    str | None,
    typer.Option(
        metavar="KEY",
        envvar="MOESERVE_ADMIN_KEY",
        help="If the server asks for one",
        rich_help_panel=WHAT,
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        metavar="KEY",
        envvar="MOESERVE_API_KEY",
        help="The same, of a server that has no admin key",
        rich_help_panel=WHAT,
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="One JSON object on stdout", rich_help_panel=HOW)
]
Phase = Annotated[
    str, typer.Option(metavar="NAME", help="prefill, decode or all", rich_help_panel=WHAT)
]
Since = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="Of a job: window (its last steps) or start", rich_help_panel=WHAT
    ),
]
Array = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="One of several arrays in a dump", rich_help_panel=WHAT),
]
PlacementFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="As if experts lived as this file says", rich_help_panel=WHERE
    ),
]
Ranks = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, help="As if they lived in order over N ranks", rich_help_panel=WHERE
    ),
]
Redundant = Annotated[
    int,
    typer.Option(metavar="N", min=0, help="Copies a layer, with --ranks", rich_help_panel=WHERE),
]
Rows = Annotated[
    int, typer.Option(metavar="N", min=1, help="Lines of each table", rich_help_panel=HOW)
]
