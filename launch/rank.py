"""One rank as a process: its place, threads and groups, on rank 0 the front end, then the engine.

Knows the order of starting and the ways of ending. What runs in between is `moeserve.rank_loop`.

Ending: a stop that was asked for returns (exit code 0). Everything else leaves by `os._exit` with
the reason in the error file: a process that unwinds past a broken gloo group can hang or abort.
"""

from __future__ import annotations

import os
import sys
import time
from threading import Thread
from typing import TYPE_CHECKING

from launch.env import RankEnv, threads_per_rank
from launch.failure import LOST_PEER, describe_exit, exit_code_of, is_lost_peer, is_typed, write
from launch.front_end import FrontEndProcess
from launch.signals import StopSignals, die_with_parent
from moeserve.config import ServeConfig
from moeserve.errors import ConfigError, MoeserveError, RankDied

if TYPE_CHECKING:
    from launch.groups import Job

# After a peer died: time for the launcher to see that death first, and for the front end to end its
# streams with an honest error.
PEER_LOSS_SECONDS = 2.0
# The front end waits for every rank's Stopped and then ends; this is what it may take to do so.
FRONT_END_EXIT_SECONDS = 15.0
WATCH_SECONDS = 0.2
READY, STOP = "ready", "stop"  # what ranks say to each other through the store


def run(config: ServeConfig, env: RankEnv) -> None:
    """Be rank `env.rank` until the job stops. Returns, or ends the process with an exit code."""
    die_with_parent(env.supervisor)
    rank = _Rank(config, env)
    with rank.stopping:
        try:
            rank.run()
        except BaseException as error:  # whatever it is, the peers must not wait for this rank
            rank.fail(error)


class _Rank:
    def __init__(self, config: ServeConfig, env: RankEnv) -> None:
        self.config, self.env = config, env
        self.front_end: FrontEndProcess | None = None
        self.job: Job | None = None
        self.stopping = StopSignals(drain=self.leave, now=self.leave)

    def run(self) -> None:
        config, env = self.config, self.env
        if env.size != config.parallel.ep:
            raise ConfigError(
                [
                    f"parallel.ep={config.parallel.ep}: this job was started with WORLD_SIZE="
                    f"{env.size} ranks; leave --ep out or give --ep {env.size}"
                ]
            )
        threads = threads_per_rank(config.engine.threads, env)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # before torch and the kernels read it
        import torch

        from launch.groups import open_job, reachable_host
        from moeserve.rank_loop import run_rank

        torch.set_num_threads(threads)
        with open_job(env) as self.job:
            if env.rank == 0 and env.front_end is None:
                self._start_front_end(reachable_host(env))
            address = env.front_end or self.job.share(
                "front_end", self.front_end.address if self.front_end else None
            )
            if not address:
                os._exit(LOST_PEER)
            if env.front_end is None:
                self.stopping.drain = self.drain
            run_rank(config, self.job.group, address)
        if self.front_end is not None:
            self.stopping.asked.set()
            code = self.front_end.wait(FRONT_END_EXIT_SECONDS)
            if code:
                raise MoeserveError(f"the front end died: {describe_exit(code)}")
            self.front_end.kill()

    # ---- how it ends --------------------------------------------------------------------------

    def drain(self) -> None:
        """Rank 0 hears of it, and has the front end drain and stop all ranks."""
        assert self.job is not None
        if not self.job.said(READY):
            self.leave()  # nothing is being served yet
        elif self.front_end is not None:
            self.front_end.stop()
        else:
            self.job.say(STOP)

    def leave(self) -> None:
        """End now: nothing is being served, or the patience is over."""
        if self.front_end is not None:
            self.front_end.kill()
        os._exit(0)

    def fail(self, error: BaseException) -> None:
        """Tell why, once for the job, and end with the exit code of the reason."""
        code = exit_code_of(error)
        if is_lost_peer(error):
            self.stopping.asked.wait(PEER_LOSS_SECONDS)
            if self.front_end is not None:
                self.front_end.wait(PEER_LOSS_SECONDS)
        else:
            write(self.env.error_file, error)
            if self.env.supervisor is None and (self.job is None or self.job.say("failed")):
                self._print(error)
        if self.front_end is not None:
            self.front_end.kill()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _print(self, error: BaseException) -> None:
        if not is_typed(error):
            import traceback

            traceback.print_exception(error)
        where = f"rank {self.env.rank}: " if self.env.size > 1 else ""
        for line in str(error).splitlines():
            print(f"moeserve: {where}{line}", file=sys.stderr)

    # ---- the front end, on rank 0 -------------------------------------------------------------

    def _start_front_end(self, host: str) -> None:
        assert self.job is not None
        try:
            self.front_end = FrontEndProcess(self.config, self.env.size, host, self._on_ready)
        except MoeserveError:
            self.job.share("front_end", "")  # the others leave quietly: rank 0 has the reason
            raise
        print(f"HTTP on {self.front_end.url} (loading)", file=sys.stderr, flush=True)
        Thread(target=self._watch_front_end, name="front-end-watch", daemon=True).start()

    def _on_ready(self, url: str) -> None:
        assert self.job is not None
        self.job.say(READY)
        print(f"ready: {url}", file=sys.stderr, flush=True)

    def _watch_front_end(self) -> None:
        # Its end while requests may still come ends the job. 0 is a drained stop, of which the
        # ranks hear as messages; 3 says that a rank died: that rank's launcher says it better.
        assert self.front_end is not None and self.job is not None
        while self.front_end.poll() is None:
            time.sleep(WATCH_SECONDS)
            if self.job.said(STOP) and not self.stopping.asked.is_set():
                self.stopping.asked.set()
                self.front_end.stop()
        code = self.front_end.poll()
        if not code or self.stopping.asked.is_set():
            return
        time.sleep(PEER_LOSS_SECONDS if code == RankDied.exit_code else 0)
        self.fail(MoeserveError(f"the front end died: {describe_exit(code)}"))
