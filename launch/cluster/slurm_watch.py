"""A submitted job, watched until it is ready and then until it ends.

Two sources: what Slurm says of the job, and what ranks write into its folder. The latter is quick
and knows reasons; the former knows of jobs whose ranks cannot speak. Ctrl-C ends the job.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from launch.cluster import slurm_commands as slurm
from launch.cluster.interrupts import count_interrupts
from launch.cluster.jobs import JobRecord, Registry
from launch.cluster.sbatch import JOB_LOG, rank_log
from launch.cluster.screen import Screen, open_screen, tell_cause, tell_tail
from launch.cluster.stages import ENDED, STARTING, write_failure
from launch.cluster.urls import public_url
from launch.cluster.watch import Cause, NodeFiles, Progress, deaths_in
from moeserve.terminal import counted, say

FILES_EVERY = 0.25  # seconds between looks into the folder
SLURM_EVERY, SLURM_EVERY_READY = 1.0, 5.0  # between questions to the controller
SILENT_SECONDS = 60.0  # of a job that runs, after which its silence is told
MORE_REASONS = 1.0  # after the first failure: what else ranks have to say
RESTART_REASONS = 3.0  # the same where the ranks start again: they take longer for that
END_SECONDS = 20.0  # what a job that failed may take to end by itself
CANCEL_SECONDS = 40.0  # what one that was cancelled may take
INTERRUPTED = 130


def watch_job(record: JobRecord, *, wait: float | None, detach: bool) -> int:
    """Until the job ends; with detach until it is ready -> the exit code."""
    return _Watch(record, wait, detach).run()


class _Watch:
    def __init__(self, record: JobRecord, wait: float | None, detach: bool) -> None:
        self._record, self._wait, self._detach = record, wait, detach
        self._folder = Path(record.folder)
        self._files, self._progress = NodeFiles(self._folder), Progress()
        self._state = slurm.JobState("PENDING")
        self._asked = 0.0
        self._ready_told = False
        self._troubled, self._silence_told = "", False
        self._restarts = record.restarts
        self._log_read = 0  # of srun's words: those of ranks that have started again since
        self._told: Cause | None = None

    def run(self) -> int:
        with count_interrupts() as interrupts:
            code = self._follow(interrupts)
        if self._state.over or self._state.state == "COMPLETING":
            Registry.of_user().remove(self._record)
        return code

    def _follow(self, interrupts: Callable[[], int]) -> int:
        screen = open_screen()
        running_since = 0.0
        try:
            while True:
                if interrupts():
                    screen.close()
                    return self._interrupted(interrupts)
                self._look()
                if self._restarts and self._progress.failing and not self._state.over:
                    screen.close()
                    self._restarted()
                    screen, running_since = open_screen(), 0.0
                    continue
                if self._state.over or self._progress.failing:
                    screen.close()
                    return self._ended()
                now = time.monotonic()
                if self._state.running:
                    running_since = running_since or now
                if self._progress.url and not self._ready_told:
                    self._show(screen)
                    screen.close()
                    self._tell_ready()
                    if self._detach:
                        return 0
                    say("Ctrl-C ends the job: running requests first, a second one at once")
                elif not self._ready_told:
                    self._show(screen)
                    if running_since and now - running_since > SILENT_SECONDS:
                        self._tell_silence()
                    patience = self._wait if self._wait is not None else float("inf")
                    if running_since and now - running_since > patience:
                        screen.close()
                        return self._too_slow()
                time.sleep(FILES_EVERY)
        finally:
            screen.close()

    # ---- looking ------------------------------------------------------------------------------

    def _look(self, *, now: bool = False) -> None:
        news = self._files.new()
        for record in news:
            self._progress.feed(record)
        now = now or any(record.stage == ENDED for record in news)
        calm = self._ready_told and not self._progress.ending
        every = SLURM_EVERY_READY if calm else SLURM_EVERY
        if now or time.monotonic() - self._asked > every:
            self._ask()

    def _ask(self) -> None:
        """A controller that cannot be asked now is no end of the job."""
        try:
            self._state = slurm.state_of(self._record.id)
            self._troubled = ""
        except slurm.SlurmError as error:
            if str(error) != self._troubled:
                self._troubled = str(error)
                say(f"{error}; the job may be fine, asking again")
        self._asked = time.monotonic()

    def _show(self, screen: Screen) -> None:
        screen.show(self._headline(), self._progress.nodes())

    def _headline(self) -> str:
        job, state = self._record.id, self._state
        if state.state in ("PENDING", "CONFIGURING"):
            why = f" ({state.reason})" if state.reason else ""
            return f"job {job}: {state.state.lower()}{why}"
        here, ranks = len(self._progress.ranks), self._record.num_ranks
        if here < ranks:
            where = f" on {state.nodes}" if state.nodes else ""
            return f"job {job}: starts{where}"
        return f"job {job}: all {counted(ranks, 'rank')} have started"

    def _tell_ready(self) -> None:
        self._ready_told = True
        seconds = time.time() - self._record.started
        say(f"ready after {seconds:.0f} s: {public_url(self._progress)}")

    def _tell_silence(self) -> None:
        """Once, if no rank has been heard since the job runs."""
        if not self._progress.ranks and not self._silence_told:
            self._silence_told = True
            say(
                f"no rank has written into {self._folder} for {SILENT_SECONDS:g} s: do all nodes "
                f"see it, and the same moeserve? logs: rank-*.log there"
            )

    # ---- the end ------------------------------------------------------------------------------

    def _ended(self) -> int:
        """The job ends or has ended by itself, or by somebody else."""
        job = self._record.id
        self._settle()
        asked = self._asked_for_end()
        if asked is not None:
            say(asked)
            return 3 if self._state.state == "CANCELLED" else 1
        cause = self._cause()
        failed = cause is not None or self._state.state not in ("COMPLETED", slurm.GONE)
        if not failed:
            say(f"job {job} has ended: stopped")
            return 0
        if cause is None and self._told is not None:  # told when it was to start again, and did not
            say(f"job {job} has ended; all logs: {self._folder}")
            return self._told.code if 0 < self._told.code < 128 else 1
        reason = f" ({self._state.reason})" if self._state.reason else ""
        if cause is None:
            state = self._state.state.lower().replace("_", " ")
            say(f"job {job}: {state}{reason}")
            tell_tail(self._folder / JOB_LOG)
            return 1
        self._tell(cause)
        return cause.code if 0 < cause.code < 128 else 1

    def _restarted(self) -> None:
        """A rank died and the batch file is about to start all of them again: tell why."""
        began, again = time.monotonic(), Progress(strict=True)
        while time.monotonic() - began < RESTART_REASONS and not again.ranks:
            for record in self._files.new():
                is_new = record.stage == STARTING or record.rank in again.ranks
                (again if is_new else self._progress).feed(record)
            time.sleep(FILES_EVERY)
        cause, text = self._cause(), self._job_log()
        if cause is not None:
            tell_cause(cause, rank_log(self._folder, cause.rank))
        self._ask()
        if not self._state.over:
            say(f"job {self._record.id} starts its ranks again, unless settings are to blame")
        self._restarts -= 1
        self._log_read, self._told = len(text), cause
        self._progress, self._ready_told = again, False

    def _asked_for_end(self) -> str | None:
        state, job = self._state.state, self._record.id
        if state == "CANCELLED" and not self._progress.primary:
            return f"job {job} was cancelled, not by this terminal (scancel)"
        if state == "TIMEOUT":
            return f"job {job}: its time limit was reached; --time asks for more"
        return None

    def _settle(self) -> None:
        """After the first sign: hear the other reasons, and see the job end."""
        began = time.monotonic()
        while time.monotonic() - began < END_SECONDS:
            self._look(now=True)
            over = self._state.over or self._state.state == "COMPLETING"
            if over and time.monotonic() - began > MORE_REASONS:
                return
            if self._progress.primary and time.monotonic() - began > 2 * MORE_REASONS:
                break  # the reason is known; srun has been told to end the rest
            time.sleep(FILES_EVERY)
        if not self._state.over:
            self._cancel()

    def _cause(self) -> Cause | None:
        return self._progress.first_cause(deaths_in(self._job_log()[self._log_read :]))

    def _job_log(self) -> str:
        log = self._folder / JOB_LOG
        return log.read_text(errors="replace") if log.exists() else ""

    def _tell(self, cause: Cause) -> None:
        tell_cause(cause, rank_log(self._folder, cause.rank))
        write_failure(self._folder, cause.rank, cause.host, cause.reason, cause.code)
        say(f"job {self._record.id} has ended; all logs: {self._folder}")

    # ---- by our hand --------------------------------------------------------------------------

    def _too_slow(self) -> int:
        nodes = self._progress.nodes()
        say(f"job {self._record.id} was not ready within --wait {self._wait:g} s; it is cancelled")
        missing = self._record.num_ranks - len(self._progress.ranks)
        if missing:
            say(f"{counted(missing, 'rank')} of {self._record.num_ranks} never started")
        for node in nodes:
            say(f"{node.host}: {node.stage}")
        self._cancel()
        self._wait_for_end(lambda: 0)
        return 1

    def _interrupted(self, interrupts: Callable[[], int]) -> int:
        job = self._record.id
        if self._ready_told:
            say(f"stopping job {job}: running requests may end; Ctrl-C again ends it at once")
            self._cancel(drain=True)
            if self._wait_for_end(interrupts, self._record.drain_seconds + CANCEL_SECONDS, 2):
                say("stopped")
                return 0
        say(f"cancelling job {job}")
        self._cancel()
        more = interrupts() + 1
        if self._wait_for_end(interrupts, CANCEL_SECONDS, more):
            say(f"job {job} is cancelled")
        else:
            say(f"job {job} was told to end and has not yet; look with: squeue -j {job}")
        return INTERRUPTED

    def _cancel(self, *, drain: bool = False) -> None:
        try:
            slurm.cancel(self._record.id, drain=drain)
        except slurm.SlurmError as error:
            say(f"{error}; end it by hand: scancel {self._record.id}")

    def _wait_for_end(
        self, interrupts: Callable[[], int], seconds: float = CANCEL_SECONDS, at_most: int = 99
    ) -> bool:
        """False when it takes longer, or at so many interrupts."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and interrupts() < at_most:
            self._ask()
            if self._state.over:
                return True
            time.sleep(FILES_EVERY)
        return False
