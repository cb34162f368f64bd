"""One rank as a process: its place, threads and groups, and the ways of ending.

Several machines: what one rank has to say, the terminals of all show once (`launch.last_words`).

A rank always leaves by `os._exit`, after a failure with the reason in the error file: a process
that unwinds past a broken gloo group, or takes apart one whose peers still run, can hang or abort.
What it does in between is handed in (serving: `launch.serving_rank`; measuring:
`launch.bench`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

import psutil

from ep.peer_loss import is_lost_peer
from launch.cluster.stages import ENDED, FAILED, RENDEZVOUS, STARTING, StageFile
from launch.env import Launcher, RankEnv, use_threads
from launch.failure import LOST_PEER, exit_code_of, is_typed, reason_of, write
from launch.processes import is_alive, leave, siblings
from launch.signals import StopSignals, die_with_parent
from launch.torchrun_folder import TorchrunFolder
from moeserve.config import ServeConfig
from moeserve.errors import ConfigError, RankDied, Unmet
from moeserve.terminal import say

if TYPE_CHECKING:
    from ep.group import EPGroup
    from launch.groups import Job
    from launch.last_words import Cause, LastWords
    from moeserve.build import Progress
    from moeserve.engine import Engine

# After a peer died: time for the launcher to see that death before it sees ours, and for the loop
# to find out and say so.
PEER_LOSS_SECONDS = 2.0
# What the rank that hosts the store waits for the others to have read it.
LINGER_SECONDS = 3.0
# Peers are mostly there by then, and one of all says what is wrong.
TELL_AFTER = 1.0
STOPPED = "stopped"  # what the ranks of a job say once through the store


def settings_on_rank(
    read: Callable[[], ServeConfig], env: RankEnv
) -> tuple[ServeConfig, list[str]]:
    """The settings of this rank and [], or any settings and what is wrong with its own: the other
    ranks are told of it where all meet, so that nobody waits for one that has left already."""
    try:
        return check_size(read(), env), []
    except ConfigError as error:
        return ServeConfig(), error.problems


def check_size(config: ServeConfig, env: RankEnv) -> ServeConfig:
    """The settings with `ep` as this job has it; ConfigError if another number was asked for."""
    if "ep" not in config.parallel.model_fields_set:
        parallel = config.parallel.model_copy(update={"ep": env.size})
        return config.model_copy(update={"parallel": parallel})
    if config.parallel.ep != env.size:
        ep = config.parallel.ep
        started = f"this job was started with WORLD_SIZE={env.size} ranks"
        remedy = f"leave --ep out or give --ep {env.size}"
        if env.launcher is Launcher.SLURM:
            started = f"srun started {env.size} tasks (SLURM_STEP_NUM_TASKS), each of them a rank"
            remedy += f", or give srun --ntasks {ep}"
            if ep % env.size == 0:
                per_node = ep // env.num_nodes
                remedy += f" (or, one task a node, torchrun --nproc-per-node {per_node} within it)"
        raise ConfigError([f"parallel.ep={ep}: {started}; {remedy}"])
    return config


def run_alone(config: ServeConfig, body: Callable[[EPGroup], None]) -> None:
    """Be a job of one in this very process, which stays the caller's: errors are raised."""
    env = RankEnv.alone()
    use_threads(config.engine.threads, env)
    from launch.groups import open_job

    body(open_job(env).group)


class RankProcess:
    """This process as rank `env.rank`. `run` does not return: it ends the process."""

    def __init__(
        self,
        config: ServeConfig,
        env: RankEnv,
        words: Callable[[str], str] = lambda p: p,
        problems: Sequence[str] = (),
    ) -> None:
        """words: names the settings of a problem as they were given (Given.in_users_words).
        problems: with this rank's own settings (`settings_on_rank`)."""
        self.config, self.env, self._words = config, env, words
        self._problems = problems
        self.job: Job | None = None
        self.last_words: LastWords | None = None  # None: no store, or not yet
        self.stopping = StopSignals(drain=self._asked, now=self.hurry)
        self._siblings: list[psutil.Process] = []
        self._failing = threading.Lock()
        self._told: list[str] = []  # problems that this rank has said while it waited for others
        self.stages = StageFile(os.environ, env.rank)

    def run(self, body: Callable[[Job], None]) -> NoReturn:
        die_with_parent(self.env.supervisor)
        self.stages.tell(STARTING)
        with self.stopping:
            try:
                # Its stack traces of peers that are gone hide the line that says which and why.
                os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
                use_threads(self.config.engine.threads, self.env)
                from launch.groups import open_job

                self.stages.tell(RENDEZVOUS)
                self.job = open_job(
                    self.env,
                    self.config,
                    self._problems,
                    on_store=self._store_is_there,
                    on_problems=self._tell_soon,
                )
                self._siblings = siblings()
                body(self.job)
                self.finish()
                self._say_stopped()
                self.exit(0)
            except BaseException as error:  # whatever it is, the peers must not wait for this rank
                self.fail(error)

    def _store_is_there(self, words: LastWords) -> None:
        self.last_words = words

    def _tell_soon(self, problems: Sequence[str]) -> None:
        """Of this rank's own settings: peers that are not there yet are no reason for silence."""

        def tell() -> None:
            if not self._failing.locked() and (
                self.last_words is None or self.last_words.first_to("telling")
            ):
                self._told += [self._words(problem) for problem in problems]
                for problem in self._told:
                    say(problem)
                say("telling the other ranks of it")

        if self.env.supervisor is None:
            timer = threading.Timer(TELL_AFTER, tell)
            timer.daemon = True
            timer.start()

    def finish(self) -> None:
        """All ranks are done; what is left to do on this one."""

    def let_go(self, seconds: float) -> None:
        """End what this rank started, with so much patience."""

    def leave(self) -> NoReturn:
        """End now: nothing is being served, or the patience is over."""
        self.let_go(0)
        self._say_stopped()
        self.exit(0)

    def drain(self) -> None:
        """Someone wants this job to stop."""
        self.leave()

    def hurry(self) -> None:
        """The same one again, after a while."""
        self.leave()

    def _asked(self) -> None:
        lost = self.last_words is not None and self.last_words.known() is not None
        if not lost and all(is_alive(rank) for rank in self._siblings):
            self.drain()
            return
        # Nobody's wish: the agent has seen a rank die and tells the others to go. The main thread
        # finds that out by itself and says so; should it be stuck, this is its end.
        time.sleep(PEER_LOSS_SECONDS)
        self.let_go(PEER_LOSS_SECONDS / 2)
        self.exit(LOST_PEER)

    def _say_stopped(self) -> None:
        """The last line of a job that ends well. Our launcher has one of its own."""
        if self.env.supervisor is not None or not self.stopping.asked.is_set():
            return
        first = self.env.rank == 0 if self.job is None else self.job.say(STOPPED)
        if first:
            say("stopped")

    def fail(self, error: BaseException) -> NoReturn:
        """Tell why, once for the job, and end with the exit code of the reason. Of two threads that
        come here the first is the one that counts."""
        if not self._failing.acquire(blocking=False):
            threading.Event().wait()
        code = exit_code_of(error)
        lost_peer = is_lost_peer(error)
        if isinstance(error, ConfigError):
            error = ConfigError([self._words(p) for p in error.problems])
        self.stages.tell(FAILED, text=reason_of(error), code=code)
        patience = 0.0
        if lost_peer:
            self.stopping.asked.wait(PEER_LOSS_SECONDS)
            patience = PEER_LOSS_SECONDS
            self._mourn(error)
        else:
            write(self.env.error_file, self.env.rank, error)
            self._tell(error)
        self.let_go(patience)
        self.exit(code)

    def _tell(self, error: BaseException) -> None:
        """On the terminal, once for the job; our launcher does that itself."""
        words = self.last_words
        if isinstance(error, ConfigError | Unmet):  # the same on all ranks
            here = self.env.local_rank == 0 if words is None else words.first_to("fail")
            if words is not None:
                words.give(self.env.rank, str(error), said=True)
            if (here or self._told) and self.env.supervisor is None:
                self._print(error)
            return
        cause = None
        if words is not None:
            reason = reason_of(error).partition("\n")[0]
            cause = words.give(self.env.rank, reason, said=self.env.supervisor is None)
        if self.env.supervisor is None and (cause is None or cause.rank == self.env.rank):
            self._print(error, cause)

    def _mourn(self, error: BaseException) -> None:
        """This rank is fine: whose end it is is said once a terminal, and in torchrun's table of a
        node on which all ranks are."""
        words = self.last_words
        if words is None or self.env.supervisor is not None:
            return
        cause = words.mourn(error)
        if cause is not None and not words.is_here(cause):
            reason = f"{cause.reason} (on node {cause.node}; this rank ended because of it)"
            write(self.env.error_file, self.env.rank, RankDied(cause.rank, reason))
        if self.env.hosts_store:
            words.wait_until_left(LINGER_SECONDS)
        else:
            words.left()

    def exit(self, code: int) -> NoReturn:
        TorchrunFolder(self.env.error_file).remove_empty()
        self.stages.tell(ENDED, code=code)
        leave(code)

    def _print(self, error: BaseException, cause: Cause | None = None) -> None:
        """cause: of this rank alone, of which the others end."""
        text = reason_of(error)
        if not is_typed(error):
            import traceback

            traceback.print_exception(error)
        where = ""
        if cause is not None:
            where = f"{cause.who}: "
        elif self.env.size > 1 and not isinstance(error, ConfigError | Unmet):
            where = f"rank {self.env.rank}: "
        told = {line for problem in self._told for line in problem.splitlines()}
        for line in text.splitlines():
            if line not in told:
                say(f"{where}{line}")
        if cause is not None and self.last_words is not None:
            say(self.last_words.others())


def build_and_show(
    config: ServeConfig,
    group: EPGroup,
    tell: Progress = lambda stage, done, total: None,
) -> Engine:
    """build_engine, with its progress on rank 0's screen as well as told to the front end."""
    from launch.progress import open_progress
    from moeserve.build import build_engine

    screen = open_progress(shown=group.rank == 0 and not config.engine.quiet)

    def progress(stage: str, done: int, total: int) -> None:
        tell(stage, done, total)
        screen.update(stage, done, total)

    try:
        return build_engine(config, group, progress)
    finally:
        screen.close()
