"""The commands of `moeserve experts` that ask what if, or act: plan, diff, compare, fail, apply.

Parses and hands on; each command has a file of its own. `launch.experts.app` adds them to its app.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from launch.commands import Command
from launch.experts.flags import (
    HOW,
    WHAT,
    WHERE,
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

LAYOUT, COST = "Layouts to ask about", "Cost"

Gpus = Annotated[
    str | None,
    typer.Option(metavar="N,N,...", help="Numbers of GPUs", rich_help_panel=LAYOUT),
]
Copies = Annotated[
    str | None,
    typer.Option(
        "--redundant",
        metavar="N,N,...",
        help="Copies a layer, over all GPUs",
        rich_help_panel=LAYOUT,
    ),
]
Slots = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Instead of --redundant", rich_help_panel=LAYOUT),
]
Nodes = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Nodes in all", rich_help_panel=LAYOUT)
]
PerNode = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="GPUs a node", rich_help_panel=LAYOUT)
]
Groups = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Groups of the router", rich_help_panel=LAYOUT),
]
GroupPolicy = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="free, node (groups stay on nodes) or priced", rich_help_panel=LAYOUT
    ),
]
Shared = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="replicated on each GPU, or hosted in slots", rich_help_panel=LAYOUT
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Routed experts a token picks", rich_help_panel=LAYOUT),
]
Bandwidth = Annotated[str, typer.Option(metavar="RATE", help="Into a GPU", rich_help_panel=COST)]
ThenNumbers = "such as 3,4 or 0-7"


def add_whatif(app: typer.Typer) -> None:
    """Add the commands of this file."""
    for command in (plan, diff, compare, fail, apply):
        app.command(cls=Command)(command)


def plan(
    source: SourceArgument,
    gpus: Gpus = None,
    redundant: Copies = None,
    slots_per_gpu: Slots = None,
    nodes: Nodes = None,
    gpus_per_node: PerNode = None,
    groups: Groups = None,
    group_policy: GroupPolicy = None,
    shared_expert: Shared = None,
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="prefill-ep32, decode-ep144 or decode-ep320: sets the above",
            rich_help_panel=LAYOUT,
        ),
    ] = None,
    top_k: TopK = None,
    policy: Annotated[
        str, typer.Option(metavar="NAME", help="ours, eplb or contiguous", rich_help_panel=LAYOUT)
    ] = "ours",
    robust: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="How intervals join: mean, max, mean+Z*std",
            rich_help_panel=LAYOUT,
        ),
    ] = "mean",
    extra_slots: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Slots a GPU more, where they help most",
            rich_help_panel=LAYOUT,
        ),
    ] = 0,
    max_moved: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Most slots to move", rich_help_panel=COST),
    ] = None,
    bandwidth: Bandwidth = "50GB/s",
    expert_bytes: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Of an expert; a job knows", rich_help_panel=COST),
    ] = None,
    phase: Phase = "all",
    since: Since = "window",
    array: Array = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Save the placement (.json, .npz)",
            rich_help_panel=HOW,
        ),
    ] = None,
    placement: PlacementFile = None,
    ranks: Ranks = None,
    json: Json = False,
    admin_key: AdminKey = None,
    api_key: ApiKey = None,
) -> None:
    """What if: other GPUs, copies, nodes or groups; balance before and after, moves, memory."""
    from launch.experts.cases import Wanted
    from launch.experts.plan import WhatIf
    from launch.experts.source import Source

    seen = Source(source, phase, array, placement, ranks, 0, since, admin_key or api_key)
    wanted = Wanted(
        gpus,
        redundant,
        slots_per_gpu,
        nodes,
        gpus_per_node,
        groups,
        group_policy,
        shared_expert,
        layout,
        top_k,
    )
    WhatIf(
        seen, wanted, policy, robust, max_moved, extra_slots, bandwidth, expert_bytes, output, json
    ).run()


def diff(
    first: SourceArgument,
    second: Annotated[
        str, typer.Argument(metavar="SOURCE", help="The same: what it is compared with")
    ],
    phase: Phase = "all",
    since: Since = "window",
    array: Array = None,
    second_array: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The same, of the second", rich_help_panel=WHAT),
    ] = None,
    rows: Rows = 10,
    json: Json = False,
    admin_key: AdminKey = None,
    api_key: ApiKey = None,
) -> None:
    """Two placements, recordings or jobs: how far loads drifted, how many slots changed."""
    from launch.experts.diff import Diff
    from launch.experts.source import Source

    key = admin_key or api_key
    a = Source(first, phase, array, since=since, key=key)
    b = Source(second, phase, second_array, since=since, key=key)
    Diff(a, b, rows, json).run()


def compare(
    source: SourceArgument,
    array: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Of several in a dump; may be given again", rich_help_panel=WHAT
        ),
    ] = None,
    layouts: Annotated[
        bool,
        typer.Option(
            "--layouts", help="All published layouts (256 experts)", rich_help_panel=LAYOUT
        ),
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Of these, those whose name begins so", rich_help_panel=LAYOUT
        ),
    ] = None,
    gpus: Gpus = None,
    redundant: Copies = None,
    slots_per_gpu: Slots = None,
    nodes: Nodes = None,
    gpus_per_node: PerNode = None,
    groups: Groups = None,
    group_policy: GroupPolicy = None,
    shared_expert: Shared = None,
    top_k: TopK = None,
    policies: Annotated[
        str, typer.Option(metavar="NAME,...", help="Which, in this order", rich_help_panel=LAYOUT)
    ] = "ours,eplb,contiguous",
    then: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE", help="What the loads become: moves under drift", rich_help_panel=WHAT
        ),
    ] = None,
    then_array: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="One for each --array", rich_help_panel=WHAT),
    ] = None,
    drift: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Only so far toward it (total variation)", rich_help_panel=WHAT
        ),
    ] = None,
    repeat: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Plans timed, the quickest counts", rich_help_panel=HOW
        ),
    ] = 1,
    phase: Phase = "all",
    since: Since = "window",
    markdown: Annotated[
        bool, typer.Option("--markdown", help="The table as markdown", rich_help_panel=HOW)
    ] = False,
    json: Json = False,
    admin_key: AdminKey = None,
    api_key: ApiKey = None,
) -> None:
    """Policies side by side on the same loads: contiguous, EPLB-equivalent, ours."""
    from launch.experts.cases import Wanted
    from launch.experts.compare import Compare
    from launch.experts.source import Source

    wanted = Wanted(
        gpus,
        redundant,
        slots_per_gpu,
        nodes,
        gpus_per_node,
        groups,
        group_policy,
        shared_expert,
        None,
        top_k,
    )
    Compare(
        Source(source, phase, since=since, key=admin_key or api_key),
        tuple(array or ()),
        wanted,
        layouts,
        tuple(only or ()),
        policies,
        then,
        tuple(then_array or ()),
        drift,
        repeat,
        markdown,
        json,
    ).run()


def fail(
    source: SourceArgument,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            "--gpus",
            metavar="N,N,...",
            help=f"GPUs that are lost, {ThenNumbers}",
            rich_help_panel=WHAT,
        ),
    ] = None,
    node: Annotated[
        str | None,
        typer.Option(
            "--node",
            "--nodes",
            metavar="N,N,...",
            help="Nodes that are lost",
            rich_help_panel=WHAT,
        ),
    ] = None,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="GPUs a node; a job knows", rich_help_panel=WHERE),
    ] = None,
    phase: Phase = "all",
    since: Since = "window",
    array: Array = None,
    placement: PlacementFile = None,
    ranks: Ranks = None,
    redundant: Redundant = 0,
    bandwidth: Bandwidth = "50GB/s",
    rows: Rows = 10,
    json: Json = False,
    admin_key: AdminKey = None,
    api_key: ApiKey = None,
) -> None:
    """A lost GPU or node: experts without a replica, balance after, what it takes to go on.

    Without --gpu and --node: each of them alone, the worst first.
    """
    from launch.experts.fail import Fail
    from launch.experts.source import Source

    key = admin_key or api_key
    seen = Source(source, phase, array, placement, ranks, redundant, since, key)
    Fail(seen, gpu, node, gpus_per_node, rows, bandwidth, json).run()


def apply(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="Of a server, such as http://127.0.0.1:8000")
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Plan and explain; move nothing")
    ] = False,
    placement: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="To this placement instead of planning one"),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Until experts have moved")] = False,
    group_policy: Annotated[
        str | None, typer.Option(metavar="NAME", help="free, node or priced")
    ] = None,
    robust: Annotated[
        str | None, typer.Option(metavar="NAME", help="mean, max or mean+Z*std")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(metavar="NAME", help="ours, eplb or contiguous")
    ] = None,
    max_moved: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Most slots to move")
    ] = None,
    if_worth: Annotated[
        bool,
        typer.Option("--if-worth", help="Only if the job's own threshold and least gain say so"),
    ] = False,
    json: Json = False,
    admin_key: AdminKey = None,
    api_key: ApiKey = None,
) -> None:
    """Rebalance a running job now: plan on the load of its last steps, move experts.

    Requests go on meanwhile, and their tokens are what they would have been.
    """
    from launch.experts.apply import Apply

    key = admin_key or api_key
    Apply(
        url, dry_run, placement, wait, group_policy, robust, policy, max_moved, if_worth, json, key
    ).run()
