"""A rank that serves: on rank 0 the front end beside it, on every rank the engine's loop.

Knows the order of starting and who hears of a stop: a signal to any rank reaches rank 0, which has
the front end drain; the front end stops all ranks. What runs is `moeserve.rank_loop`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import Thread
from typing import TYPE_CHECKING, NoReturn

from launch.cluster.jobs import JobRecord, Registry
from launch.cluster.stages import READY as RANK_READY
from launch.cluster.stages import SERVING
from launch.env import RankEnv
from launch.failure import describe_exit
from launch.front_end import FrontEndProcess
from launch.interface import is_loopback
from launch.rank import PEER_LOSS_SECONDS, RankProcess, build_and_show
from moeserve.config import ServeConfig
from moeserve.errors import FrontEndDied, JobDied, MoeserveError
from moeserve.terminal import say

if TYPE_CHECKING:
    from ep.group import EPGroup
    from launch.groups import Job
    from moeserve.engine import Engine

# The front end waits for every rank's Stopped and then ends; this is what it may take to do so.
FRONT_END_EXIT_SECONDS = 15.0
HURRY_SECONDS = 1.0  # what it may take to end its streams after a second signal
WATCH_SECONDS = 0.2
READY, STOP, HURRY = "ready", "stop", "hurry"  # what ranks say to each other through the store


class ServingRank(RankProcess):
    def __init__(
        self,
        config: ServeConfig,
        env: RankEnv,
        words: Callable[[str], str] = lambda p: p,
        problems: Sequence[str] = (),
        record: JobRecord | None = None,
    ) -> None:
        """record: by which this rank has entered the job among those that are known."""
        super().__init__(config, env, words, problems)
        self._record = record
        self.front_end: FrontEndProcess | None = None

    def serve(self, job: Job) -> None:
        from moeserve.lockstep import PeerFailed
        from moeserve.rank_loop import run_rank

        if self.env.rank == 0 and self.env.front_end is None:
            self._start_front_end(job, job.group.host)
        address = self.env.front_end or job.share(
            "front_end", self.front_end.address if self.front_end else None
        )
        if not address:
            raise PeerFailed([0])  # rank 0's end is to be seen first
        run_rank(self.config, job.group, address, builder=self._build)

    def _build(
        self, config: ServeConfig, group: EPGroup, tell: Callable[[str, int, int], None]
    ) -> Engine:
        def told(stage: str, done: int, total: int) -> None:
            tell(stage, done, total)
            self.stages.tell(stage, done, total)

        engine = build_and_show(config, group, told)
        assert self.job is not None
        engine.info["launch"] = self.job.meeting.report | {"restarts": self.env.restarts or {}}
        self.stages.tell(RANK_READY)
        return engine

    def exit(self, code: int) -> NoReturn:
        if self._record is not None:
            Registry.of_user().remove(self._record)
        super().exit(code)

    def finish(self) -> None:
        if self.front_end is not None:
            self.stopping.asked.set()
            code = self.front_end.wait(FRONT_END_EXIT_SECONDS)
            if code:
                raise _died(code)
            self.front_end.kill()

    def let_go(self, seconds: float) -> None:
        if self.front_end is not None:
            self.front_end.wait(seconds)  # it ends its streams with an honest error
            self.front_end.kill()

    def drain(self) -> None:
        """Rank 0 hears of it, and has the front end drain and stop all ranks."""
        if self.env.front_end is not None or self.job is None or not self.job.said(READY):
            self.leave()  # nothing is being served yet, or the front end's owner has gone
        elif self.front_end is not None:
            self.front_end.stop()
        else:
            self.job.say(STOP)

    def hurry(self) -> None:
        """The front end ends its streams with an honest word, and then all ranks, if it can."""
        if self.front_end is not None:
            self.front_end.stop()
            self.front_end.wait(HURRY_SECONDS)
        elif self.job is not None and self.env.front_end is None:
            self.job.say(HURRY)
        time.sleep(HURRY_SECONDS)
        self.leave()

    # ---- the front end, on rank 0 -------------------------------------------------------------

    def _start_front_end(self, job: Job, host: str) -> None:
        try:
            self.front_end = FrontEndProcess(
                self.config, self.env.size, host, self._on_ready, self._on_lost
            )
        except MoeserveError:
            job.share("front_end", "")  # the others leave quietly: rank 0 has the reason
            raise
        say(f"HTTP on {self.front_end.url} (loading)")
        listens_at = self.config.server.host
        if self.env.num_nodes > 1 and (listens_at == "localhost" or is_loopback(listens_at)):
            say(
                f"HTTP is for processes on node {job.meeting.names[0]} only; with --host 0.0.0.0 "
                f"others reach it at {host}"
            )
        Thread(target=self._watch_front_end, name="front-end-watch", daemon=True).start()

    def _on_ready(self, url: str) -> None:
        assert self.job is not None
        self.job.say(READY)
        self.stages.tell(SERVING, text=url)
        say(f"ready: {url}")

    def _on_lost(self, rank: int, reason: str) -> None:
        """The front end missed a rank's connection: for those who know no better."""
        if self.last_words is not None:
            self.last_words.give(rank, reason)

    def _watch_front_end(self) -> None:
        # Its end while requests may still come ends the job. 0 is a drained stop, of which the
        # ranks hear as messages; 3 says that a rank died: that rank's launcher says it better.
        assert self.front_end is not None and self.job is not None
        hurried = False
        while self.front_end.poll() is None:
            time.sleep(WATCH_SECONDS)
            if self.job.said(STOP) and not self.stopping.asked.is_set():
                self.stopping.asked.set()
                self.front_end.stop()
            if not hurried and self.job.said(HURRY):
                hurried = True
                self.front_end.stop()
        code = self.front_end.poll()
        if not code or self.stopping.asked.is_set():
            return
        if code == JobDied.exit_code:
            from dispatch.base import PeerError

            time.sleep(PEER_LOSS_SECONDS)
            self.fail(PeerError("the front end says that a rank died"))
        self.fail(_died(code))


def _died(code: int) -> MoeserveError:
    """A front end that was killed, or that failed by itself and has said how."""
    kind = FrontEndDied if code < 0 else MoeserveError
    return kind(f"the front end died: {describe_exit(code)}")
