"""`moeserve launch slurm`, `moeserve launch hosts`: jobs on many machines, as command lines.

Parses and hands on, as `launch.cli` does; each command has files of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from launch.commands import Command, Group

JOB, SLURM_PANEL, FILES, WATCHING = "The job", "For Slurm", "Files", "Watching"

launch_app = typer.Typer(
    name="launch",
    cls=Group,
    help="Start a job on many machines, through Slurm or ssh, and watch it.",
    epilog="What to run stands last: `-- serve CHECKPOINT [flags]`.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- serve CHECKPOINT ...", help="What every rank runs, and its flags"),
]
_Output = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help=r"Its folder; under Slurm seen by all nodes [dim]\[default: moeserve-jobs/...][/]",
        rich_help_panel=FILES,
    ),
]
_Python = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help=r"Python with moeserve on each node [dim]\[default: this one][/]",
        rich_help_panel=FILES,
    ),
]


@launch_app.command(cls=Command)
def slurm(
    nodes: Annotated[int, typer.Option(metavar="N", min=1, help="Nodes", rich_help_panel=JOB)],
    gpus_per_node: Annotated[
        int, typer.Option(metavar="G", min=0, help="GPUs a node: a rank each", rich_help_panel=JOB)
    ] = 0,
    ranks_per_node: Annotated[
        int | None,
        typer.Option(
            metavar="R", min=1, help="Ranks a node, where they use CPUs", rich_help_panel=JOB
        ),
    ] = None,
    cpus_per_rank: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help=r"Cores a rank [dim]\[default: Slurm's][/]",
            rich_help_panel=JOB,
        ),
    ] = None,
    partition: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=r"Partition [dim]\[default: the cluster's][/]",
            rich_help_panel=SLURM_PANEL,
        ),
    ] = None,
    account: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Account to charge", rich_help_panel=SLURM_PANEL),
    ] = None,
    time: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Limit, such as 12:00:00 or 2-0", rich_help_panel=SLURM_PANEL
        ),
    ] = None,
    name: Annotated[
        str, typer.Option(metavar="NAME", help="In squeue", rich_help_panel=SLURM_PANEL)
    ] = "moeserve",
    extra: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LINE",
            help="A line for the file: '#SBATCH ...'; may be given several times",
            rich_help_panel=SLURM_PANEL,
        ),
    ] = None,
    output: _Output = None,
    python: _Python = None,
    submit: Annotated[
        bool,
        typer.Option("--submit", help="Submit it and watch the job", rich_help_panel=WATCHING),
    ] = False,
    wait: Annotated[
        float | None,
        typer.Option(
            metavar="SEC",
            min=0,
            help="Cancel a job that runs and is not ready by then; 0: submit, do not watch",
            rich_help_panel=WATCHING,
        ),
    ] = None,
    detach: Annotated[
        bool,
        typer.Option("--detach", help="Leave once it is ready", rich_help_panel=WATCHING),
    ] = False,
    words: _Words = None,
) -> None:
    """Write a batch file for Slurm; with --submit, submit it and watch the job.

    Watched, it is this terminal's: progress of each node, URL, why it failed; Ctrl-C ends it.
    """
    from launch.cluster.slurm import SlurmLaunch

    launch = SlurmLaunch(
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        ranks_per_node=ranks_per_node,
        cpus_per_rank=cpus_per_rank,
        partition=partition,
        account=account,
        time=time,
        name=name,
        extra=tuple(extra or ()),
        output=output,
        python=python,
        submit=submit,
        wait=wait,
        detach=detach,
        words=tuple(words or ()),
    )
    raise typer.Exit(launch.run())


@launch_app.command(cls=Command)
def hosts(
    hosts: Annotated[
        str, typer.Argument(metavar="HOSTS", help="Names or addresses: a,b,me@c; the first meets")
    ],
    ranks_per_node: Annotated[
        int | None,
        typer.Option(
            metavar="R",
            min=1,
            help=r"Ranks a host [dim]\[default: by --ep, else 1][/]",
            rich_help_panel=JOB,
        ),
    ] = None,
    ssh: Annotated[
        str | None,
        typer.Option(
            metavar="CMD", help="How a host is reached: CMD HOST COMMAND", rich_help_panel=JOB
        ),
    ] = None,
    output: _Output = None,
    python: _Python = None,
    wait: Annotated[
        float | None,
        typer.Option(
            metavar="SEC",
            min=0,
            help="Give up a job that is not ready by then",
            rich_help_panel=WATCHING,
        ),
    ] = None,
    words: _Words = None,
) -> None:
    """Run torchrun on each host over ssh, and watch the job.

    It is this terminal's: its ranks end with this command, however that ends.
    """
    from launch.cluster.hosts import SSH, HostsLaunch

    launch = HostsLaunch(
        hosts=hosts,
        ranks_per_node=ranks_per_node,
        ssh=ssh or SSH,
        python=python,
        wait=wait,
        output=output,
        words=tuple(words or ()),
    )
    raise typer.Exit(launch.run())


_Job = Annotated[
    str | None,
    typer.Argument(metavar="JOB", help="URL, id, Slurm's number or folder; or the only one here"),
]


def status(
    job: _Job = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout")] = False,
) -> None:
    """Show a job: nodes, ranks, stage, address, requests, dispatch, health. Or list all of them.

    Exit code 0 when the job takes requests, 1 when it does not.
    """
    from launch.cluster.status import status as run

    raise typer.Exit(run(job, json))


def stop(
    job: _Job = None,
    now: Annotated[bool, typer.Option("--now", help="Cut running requests off")] = False,
) -> None:
    """Stop a job: running requests may end first."""
    from launch.cluster.stop import stop as run

    raise typer.Exit(run(job, now))
