"""`moeserve experts ...`: where experts live and what they do, on a running job or a recording.

Parses and hands on, as `launch.cli` does; each command has a file of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from launch.commands import Command, Group
from launch.experts.flags import (
    HOW,
    WHAT,
    AdminKey,
    ApiKey,
    Array,
    Json,
    Phase,
    PlacementFile,
    Ranks,
    Redundant,
    Rows,
    Since,
    SourceArgument,
)
from launch.experts.whatif import add_whatif

experts_app = typer.Typer(
    name="experts",
    cls=Group,
    help="See where experts live and what they do; ask what if; move them; record their load.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Url = Annotated[
    str, typer.Argument(metavar="URL", help="Of a server, such as http://127.0.0.1:8000")
]


@experts_app.command(cls=Command)
def top(
    source: SourceArgument,
    phase: Phase = "all",
    since: Since = "window",
    array: Array = None,
    intervals: Annotated[
        bool,
        typer.Option(
            "--intervals", help="A line for each interval of a recording", rich_help_panel=WHAT
        ),
    ] = False,
    placement: PlacementFile = None,
    ranks: Ranks = None,
    redundant: Redundant = 0,
    rows: Rows = 10,
    every: Annotated[
        float,
        typer.Option(metavar="SEC", help="Between two looks at a job", rich_help_panel=HOW),
    ] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Do not look again", rich_help_panel=HOW)
    ] = False,
    json: Json = False,
    admin_key: AdminKey = None,
    api_key: ApiKey = None,
) -> None:
    """Hottest experts, balance of layers, loads of ranks, copies, links; of a job again and again.

    On a terminal the table of a running job is renewed until Ctrl-C.
    """
    from launch.experts.source import Source
    from launch.experts.top import Top

    key = admin_key or api_key
    seen = Source(source, phase, array, placement, ranks, redundant, since, key)
    Top(seen, rows, every, once, intervals, json).run()


@experts_app.command(cls=Command)
def show(
    source: SourceArgument,
    layer: Annotated[
        int, typer.Option(metavar="N", help="By the model's number", rich_help_panel=WHAT)
    ],
    expert: Annotated[
        int | None,
        typer.Option(metavar="N", help="One expert of the layer", rich_help_panel=WHAT),
    ] = None,
    phase: Phase = "all",
    since: Since = "window",
    array: Array = None,
    placement: PlacementFile = None,
    ranks: Ranks = None,
    redundant: Redundant = 0,
    rows: Annotated[
        int, typer.Option(metavar="N", min=0, help="Experts to list; 0: all", rich_help_panel=HOW)
    ] = 0,
    json: Json = False,
    admin_key: AdminKey = None,
    api_key: ApiKey = None,
) -> None:
    """One layer, or one expert: on which ranks, why, what share of the load, how many copies."""
    from launch.experts.show import Show
    from launch.experts.source import Source

    key = admin_key or api_key
    seen = Source(source, phase, array, placement, ranks, redundant, since, key)
    Show(seen, layer, expert, rows, json).run()


@experts_app.command(cls=Command)
def heatmap(
    source: SourceArgument,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="A picture too; ends in .png",
            rich_help_panel=HOW,
        ),
    ] = None,
    by: Annotated[
        str, typer.Option(metavar="NAME", help="expert, rank or both", rich_help_panel=HOW)
    ] = "both",
    ordered: Annotated[
        bool,
        typer.Option(
            "--ordered", help="Experts from hottest to coldest, not by number", rich_help_panel=HOW
        ),
    ] = False,
    phase: Phase = "all",
    since: Since = "window",
    array: Array = None,
    placement: PlacementFile = None,
    ranks: Ranks = None,
    redundant: Redundant = 0,
    json: Json = False,
    admin_key: AdminKey = None,
    api_key: ApiKey = None,
) -> None:
    """Load by layer and expert, and by layer and rank: in the terminal, and as a picture."""
    from launch.experts.heatmap import Heatmap
    from launch.experts.source import Source

    key = admin_key or api_key
    seen = Source(source, phase, array, placement, ranks, redundant, since, key)
    Heatmap(seen, output, by, ordered, json).run()


add_whatif(experts_app)


@experts_app.command(cls=Command)
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
    api_key: ApiKey = None,
) -> None:
    """Record the load of each expert: by layer, phase and interval of steps.

    Ends after --seconds or --steps, or at Ctrl-C; what was recorded is saved in any case.
    """
    from launch.experts.record import Record

    key = admin_key or api_key
    Record(url, output, seconds, steps, interval_steps, json, key).run()
