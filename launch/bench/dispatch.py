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
    from launch.bench.dispatch_rank import Measured


class NothingMeasured(MoeserveError):
    """A backend that was asked for by name refuses everything, or all do."""


class BackendFailed(MoeserveError):
    """A backend broke by an error that is no refusal; the others were measured."""


@dataclass(frozen=True)
class DispatchBench:
    """The command. as_json: one object on stdout, and nothing else there, instead of tables."""

    flags: DispatchFlags
    as_json: bool = False

    def run(self) -> None:
        """ConfigError, TraceError for flags and file; on ranks WrongResult,
        NothingMeasured, BackendFailed."""
        env = RankEnv.read(os.environ)
        asked = self.flags.check(None if env is None else env.size)
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
            self._show(asked, found, place.transport)

    def _show(self, asked: Asked, found: Measured, transport: str) -> None:
        """Everything that was measured, and why the rest was not: once, as the error where it is
        one."""
        from launch.bench import dispatch_refused as refused
        from launch.bench.dispatch_show import Result, as_json, show
        from launch.bench.machine import describe_machine
        from launch.bench.screen import only_json

        rows, entries = found.measured, refused.not_measured(asked, found.refused)
        result = Result(asked, rows, entries, found.loads, transport, describe_machine())
        missing = refused.missing(asked, entries, rows)
        if self.as_json:
            only_json(as_json(result))
        else:
            show(result, [entry for entry in entries if entry not in missing])
        if asked.plot is not None and rows:
            from launch.bench.dispatch_picture import draw

            draw(result, asked.plot)
            if not self.as_json:
                print(f"picture: {asked.plot}", flush=True)
        if missing:
            kind = BackendFailed if any(entry["failed"] for entry in missing) else NothingMeasured
            raise kind("\n".join(f"not measured: {line}" for line in refused.lines(missing, rows)))
