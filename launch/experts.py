"""`moeserve experts ...`: where experts live and what they do, on a running job or a recording.

Parses and hands on, as `launch.cli` does; each command has a file of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

experts_app = typer.Typer(
    name="experts",
    help="See where experts live and what they do; record it.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Url = Annotated[
    str, typer.Argument(metavar="URL", help="Of a server, such as http://127.0.0.1:8000")
]
AdminKey = Annotated[
    str | None,
    typer.Option(metavar="KEY", envvar="MOESERVE_ADMIN_KEY", help="If the server asks for one"),
]
Json = Annotated[bool, typer.Option("--json", metavar=" ", help="One JSON object on stdout")]


@experts_app.command()
def record(
    url: Url,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where to save it; ends in .npz")
    ],
    seconds: Annotated[float | None, typer.Option(metavar="SEC", help="End after so long")] = None,
    steps: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="End after so many steps with tokens")
    ] = None,
    interval_steps: Annotated[
        int, typer.Option(metavar="N", min=1, help="Steps that are counted together")
    ] = 64,
    json: Json = False,
    admin_key: AdminKey = None,
) -> None:
    """Record the load of each expert: by layer, phase and interval of steps.

    Ends after --seconds or --steps, or at Ctrl-C; what was recorded is saved in any case.
    """
    from launch.experts_record import Record

    Record(url, output, seconds, steps, interval_steps, json, admin_key).run()
