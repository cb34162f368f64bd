"""`moeserve bench dispatch`: starts ranks, has them measure, shows what came of it.

Knows the way from flags to results. What is measured: launch/bench/dispatch_rank.py.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launch.bench.dispatch_flags import Asked, DispatchFlags
from launch.bench.ranks import open_place, run_ranks
from launch.env import RankEnv
from moeserve.errors import MoeserveError

if TYPE_CHECKING:
    from ep.group import EPGroup


class NothingMeasured(MoeserveError):
    """Each backend that was asked for refuses."""


class BackendFailed(MoeserveError):
    """A backend broke by an error that is no refusal; the others were measured."""


@dataclass(frozen=True)
class DispatchBench:
    """The command. as_json: one object on stdout, its last line, instead of tables."""

    flags: DispatchFlags
    as_json: bool = False

    def run(self) -> None:
        """ConfigError, TraceError for flags and file; on ranks WrongResult,
        NothingMeasured, BackendFailed."""
        env = RankEnv.read(os.environ)
        asked = self.flags.check(None if env is None else env.size)
        if env is None and asked.skew.trace is not None:
            from launch.bench.dispatch_work import read_loads

            read_loads(asked.skew, asked.experts, asked.seed)  # a bad file is told once
        run_ranks(asked.ranks[-1], lambda env, group: self._on_rank(asked, env, group))

    def _on_rank(self, asked: Asked, env: RankEnv, group: EPGroup) -> None:
        from launch.bench.dispatch_rank import measure
        from launch.bench.steps import StepProgress

        place = open_place(env, group, asked.device, asked.ranks)
        progress = StepProgress(shown=group.rank == 0)
        try:
            found = measure(asked, place, progress)
        finally:
            progress.close()
        if group.rank == 0:
            self._show(asked, found.rows, found.loads, place.transport)
            if not any(row["ok"] for row in found.rows):
                raise NothingMeasured("\n".join(found.refusals()))
            if failures := found.failures():
                raise BackendFailed("\n".join(failures))

    def _show(
        self, asked: Asked, rows: list[dict[str, object]], loads: str, transport: str
    ) -> None:
        from launch.bench.dispatch_show import as_json, show
        from launch.bench.machine import describe_machine
        from launch.bench.screen import last_line

        machine = describe_machine()
        if asked.plot is not None and any(row["ok"] for row in rows):
            from launch.bench.dispatch_picture import draw

            draw(rows, f"{transport}; {loads}", asked.plot)
        if self.as_json:
            last_line(as_json(asked, rows, loads, transport, machine))
        else:
            show(asked, rows, loads, transport, machine)
            if asked.plot is not None:
                print(f"picture: {asked.plot}")
