"""The `serve ...` that a job on many machines will run, checked on the machine that starts it.

Knows the flags of `moeserve serve` and what a job of so many ranks asks of them. Knows nothing of
Slurm or ssh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from launch.commands import Command
from launch.settings import SERVING, Given, with_settings
from moeserve.errors import ConfigError

EXAMPLE = "-- serve CHECKPOINT [flags]"
ANYWHERE = "0.0.0.0"


@dataclass(frozen=True)
class Served:
    """words: what follows `moeserve serve` on each rank. The others: as they were checked here."""

    words: tuple[str, ...]
    checkpoint: Path
    host: str
    port: int
    drain_seconds: float
    max_restarts: int  # for whoever starts the ranks: not among the words
    listens_anywhere: bool  # --host was not given: see `check_served`


def check_served(words: Sequence[str], num_ranks: int, problems: list[str]) -> Served | None:
    """The words after `--`; adds every problem that can be known here.

    A server of several machines is of little use on loopback: where no --host was given, it
    listens on all addresses of its machine. Paths become absolute: ranks start elsewhere.
    """
    if not words:
        problems.append(f"what to run is missing: {EXAMPLE}")
        return None
    first, *rest = words
    if first != "serve":
        problems.append(f"{first!r}: only `serve` runs on a cluster: {EXAMPLE}")
        return None
    given = _parse(rest, problems)
    if given is None:
        return None
    flags = {section: dict(fields) for section, fields in given.flags.items()}
    if num_ranks:
        asked = _ep_asked(given)
        if asked is not None and asked != num_ranks:
            problems.append(
                f"--ep {asked} (by a flag, --layout or --config): this job has {num_ranks} ranks; "
                f"leave it out, or start {asked} ranks"
            )
        elif asked is None:
            flags.setdefault("parallel", {})["ep"] = str(num_ranks)
    whole = Given(given.checkpoint, given.config, flags, given.sections)
    try:
        config = whole.resolve(needs_text=True, ranks_here=0)
    except ConfigError as error:
        problems += [_as_typed(given, p) for p in error.problems]
        return None
    run = _absolute(
        _without(rest, "--max-restarts"), [given.checkpoint, given.config, *_files(flags)]
    )
    server = config.server
    anywhere = "host" not in server.model_fields_set
    if anywhere:
        run += ["--host", ANYWHERE]
    return Served(
        tuple(run),
        config.model.checkpoint.absolute(),
        ANYWHERE if anywhere else server.host,
        server.port,
        server.drain_seconds,
        server.max_restarts,
        anywhere,
    )


def _ep_asked(given: Given) -> int | None:
    """The number of ranks that a flag, a layout or the file names; None: none of them, or that
    cannot be read, which is told with the other problems."""
    from moeserve.config import ServeConfig

    parallel = {"parallel": given.flags.get("parallel", {})}
    try:
        section = ServeConfig.load(given.config, parallel).parallel
    except ConfigError:
        return None
    return section.ep if "ep" in section.model_fields_set else None


def _parse(words: Sequence[str], problems: list[str]) -> Given | None:
    """The words as `moeserve serve` reads them. The parser stops at the first unknown flag: each is
    told and left out, until the rest can be read."""
    caught: list[Given] = []

    @with_settings(SERVING)
    def serve(given: Given) -> None:
        caught.append(given)

    app = typer.Typer(add_completion=False)
    app.command(name="serve", cls=Command)(serve)
    command = typer.main.get_command(app)
    left, failed = list(words), False
    while True:
        try:
            command.main(args=left, prog_name="moeserve serve", standalone_mode=False)
            return caught[0] if caught else None
        except ConfigError as error:
            problems += error.problems
            return None
        except Exception as error:  # the parser's own types lie in a private module of typer
            if not hasattr(error, "format_message"):
                raise
            name = getattr(error, "option_name", None)
            if name is not None or not failed:  # else: the value of a flag that was left out
                problems.append(f"serve: {error.format_message()}")
            failed = True
            without = [w for w in left if name is None or w.split("=")[0] != name]
            if len(without) == len(left):
                return None
            left = without


def _as_typed(given: Given, problem: str) -> str:
    return problem if problem.startswith("--") else given.in_users_words(problem)


def _without(words: Sequence[str], option: str) -> list[str]:
    """The words without an option and its value."""
    left, skip = [], False
    for word in words:
        if skip or word == option or word.startswith(f"{option}="):
            skip = word == option and not skip
            continue
        left.append(word)
    return left


def _files(flags: dict[str, dict[str, Any]]) -> list[Path | None]:
    named = (
        flags.get("model", {}).get("chat_template"),
        flags.get("model", {}).get("kernel_table"),
        flags.get("parallel", {}).get("placement"),
    )
    return [Path(x) if x is not None else None for x in named]


def _absolute(words: Sequence[str], paths: Sequence[Path | None]) -> list[str]:
    texts = {str(p): str(p.absolute()) for p in paths if p is not None}
    found = []
    for word in words:
        head, equals, value = word.partition("=")
        if equals and head.startswith("--") and value in texts:
            word = f"{head}={texts[value]}"
        found.append(texts.get(word, word))
    return found
