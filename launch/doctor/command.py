"""`moeserve doctor`: its flags, and the way to what it says. Knows typer; looks nowhere itself."""

from __future__ import annotations

import json as jsons
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launch.choices import not_one_of
from launch.doctor.device import DEVICES
from moeserve.errors import ConfigError, MoeserveError

if TYPE_CHECKING:
    from ep.group import EPGroup
    from launch.env import RankEnv

MOST_RANKS = 1024


class SomethingFails(MoeserveError):
    """Said after the table."""


def doctor(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(metavar="CHECKPOINT", help="A folder, to be looked at and read from"),
    ] = None,
    nodes: Annotated[
        bool,
        typer.Option(
            "--nodes",
            help="All ranks of a job (torchrun, srun) take part: links, clocks, all-to-all",
        ),
    ] = False,
    ranks: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Ask dispatchers as if for so many ranks (8); with --nodes outside of a job: "
            "start so many here",
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="What it is for: cuda: fails where anything is missing that ranks on GPUs need; "
            r"cpu: nothing that is for GPUs alone is looked at; auto: what is here "
            r"[dim]\[default: auto][/]",
            show_default=False,
        ),
    ] = "auto",
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout")] = False,
) -> None:
    """Look at this machine, or at all nodes of a job: what is there, what is not, what to do.

    Exit code 0: nothing fails for what the machine can do; missing GPU libraries on a machine
    without GPUs do not. 1: something fails. 2: wrong flags.
    """
    problems = []
    if ranks is not None and not 1 <= ranks <= MOST_RANKS:
        problems.append(f"--ranks {ranks}: must be 1 to {MOST_RANKS}")
    if device not in DEVICES:
        problems.append(not_one_of("--device", device, DEVICES))
    if problems:
        raise ConfigError(problems)
    if nodes:
        _on_nodes(checkpoint, ranks, device, json)
        return
    from launch.doctor.check import exit_code
    from launch.doctor.local import DEFAULT_RANKS, local_checks
    from launch.doctor.screen import as_json, show_checks

    def tell(section: str) -> None:
        if sys.stderr.isatty() and not json:
            print(f"\rlooking at {section:<20}", end="", file=sys.stderr, flush=True)

    found = local_checks(checkpoint, ranks or DEFAULT_RANKS, tell, device=device)
    if sys.stderr.isatty() and not json:
        print("\r" + " " * 40 + "\r", end="", file=sys.stderr)
    if json:
        print(jsons.dumps(as_json(found, ranks=ranks or DEFAULT_RANKS, device=device)))
    else:
        show_checks(found, "this machine")
    if exit_code(found):
        raise _failure([f"{c.section}: {c.name}: {c.reason}" for c in found if _is_bad(c)])


def _on_nodes(checkpoint: Path | None, ranks: int | None, device: str, json: bool) -> None:
    from launch.bench.ranks import run_ranks
    from launch.env import RankEnv

    env = RankEnv.read(os.environ)
    if env is None and (ranks or 0) < 2:
        raise ConfigError(
            [
                "--nodes: wants the ranks of a job; start it by `torchrun ... -m moeserve doctor "
                "--nodes` or `srun moeserve doctor --nodes` on every node, or give --ranks 2 up "
                "to try it here"
            ]
        )
    if env is not None and env.size < 2:
        raise ConfigError(["--nodes: this job has one rank, which has nobody to talk to"])
    if env is not None and ranks not in (None, env.size):
        raise ConfigError([f"--ranks {ranks}: this job was started with {env.size} ranks"])
    run_ranks(ranks or 2, lambda env, group: _on_rank(env, group, checkpoint, device, json))


def _on_rank(
    env: RankEnv, group: EPGroup, checkpoint: Path | None, device: str, json: bool
) -> None:
    from launch.bench.ranks import open_place
    from launch.doctor.check import exit_code
    from launch.doctor.local import node_report
    from launch.doctor.nodes import examine

    # Where cuda cannot be had the table says so, with all else.
    over = "cpu" if device == "cpu" else "auto"
    place = open_place(env, group, over, [group.size])
    whole = place.groups[group.size]
    report = examine(
        whole,
        place.device,
        lambda: node_report(checkpoint, whole, device),
        place.transport,
    )
    if group.rank == 0:
        if json:
            print(jsons.dumps(report.as_json()), flush=True)
        else:
            report.show()
            sys.stdout.flush()
    if exit_code(report.checks):
        bad = [c for c in report.checks if _is_bad(c)]
        raise _failure([f"{c.node or 'all'}: {c.name}: {c.reason}" for c in bad])


def _is_bad(check: object) -> bool:
    from launch.doctor.check import Check, State

    return isinstance(check, Check) and check.state is State.FAILS


def _failure(lines: list[str]) -> SomethingFails:
    word = "check fails" if len(lines) == 1 else "checks fail"
    return SomethingFails("\n".join([f"{len(lines)} {word}:", *lines]))
