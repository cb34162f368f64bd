"""`moeserve experts record`: expert load of a running job, from now until told, into a file.

Knows the order of starting, waiting, stopping and saving, and what a person sees meanwhile. The
counts lie in the server until the end. It is asked for them at the beginning, on a thread, and
answers at the end: so they come also where a rank dies or the server stops, and it has no time
left to be asked.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ep.archive import write_whole
from ep.load import PHASES
from ep.recording import ExpertRecording, RecordingError
from launch.experts.file import output_problems
from launch.experts.http import STOP_SECONDS, ExpertsHttp
from moeserve.errors import ConfigError, MoeserveError

LOOK_EVERY = 0.25  # seconds between two looks at how far it is
LAST_SECONDS = 10.0  # what a server that can no longer be asked may take to answer
CUT_SHORT = "x-recording-cut-short"  # header: why it ended before it was told to


@dataclass(frozen=True)
class Record:
    """The command's flags. seconds, steps: when to end by itself; Ctrl-C ends it too."""

    url: str
    output: Path
    seconds: float | None = None
    steps: int | None = None
    interval_steps: int = 64
    as_json: bool = False
    admin_key: str | None = None

    def run(self) -> None:
        """Record and save. ConfigError before anything is started; MoeserveError: the server, or,
        after saving, that it ended before it was told to."""
        self._check()
        with ExpertsHttp(self.url, self.admin_key) as http, _terminated_is_interrupted():
            body = {"interval_steps": self.interval_steps, "max_steps": self.steps or 0}
            http.post("/experts/recording/start", body)
            began, end = time.monotonic(), _End(http)
            try:
                with _progress(self.seconds, self.steps) as show:
                    self._wait(http, began, show, end)
            except KeyboardInterrupt:
                print("stopping: what was recorded is saved", file=sys.stderr)
            content, cut_short = end.now()
            elapsed = time.monotonic() - began
        try:
            recording = ExpertRecording.from_bytes(content)
        except RecordingError as error:
            raise MoeserveError(f"{self.url}: what came is no recording: {error}") from error
        write_whole(self.output, content)
        self._tell(recording, len(content), elapsed, cut_short)
        if cut_short is not None:
            raise MoeserveError(
                f"{self.url}: the recording was cut short: {cut_short}; "
                f"{int(recording.num_steps.sum())} steps are saved in {self.output}, all but the "
                f"last interval of up to {self.interval_steps} (--interval-steps)"
            )

    def _check(self) -> None:
        problems = []
        if self.seconds is not None and self.steps is not None:
            problems.append("--seconds and --steps: give one of them, not both")
        if self.seconds is not None and not 0 < self.seconds < 1e9:
            problems.append(f"--seconds {self.seconds:g}: must be above 0")
        problems += output_problems("--output", self.output)
        if problems:
            raise ConfigError(problems)

    def _wait(self, http: ExpertsHttp, began: float, show: Any, end: _End) -> None:
        """Until the time is over, the server says that it has the steps, or it goes away."""
        while True:
            left = LOOK_EVERY
            if self.seconds is not None:
                left = min(left, began + self.seconds - time.monotonic())
                if left <= 0:
                    return
            if end.came(left):
                return
            try:
                state = http.get("/experts/recording")
            except MoeserveError:
                return  # what it says at its end tells more
            show(time.monotonic() - began, state.get("num_steps", 0), state.get("num_tokens", 0))
            if state.get("status") != "recording":
                return

    def _tell(
        self, recording: ExpertRecording, size: int, elapsed: float, cut_short: str | None
    ) -> None:
        tokens = recording.tokens.sum(axis=0)
        steps = int(recording.num_steps.sum())
        if self.as_json:
            report = {
                "file": str(self.output),
                "bytes": size,
                "seconds": round(elapsed, 3),
                "busy_seconds": round(float(recording.seconds.sum()), 3),
                "steps": steps,
                "intervals": recording.num_intervals,
                "tokens": dict(zip(PHASES, tokens.tolist(), strict=True)),
                "picks": int(recording.counts.sum()),
                "layers": list(recording.info.layers),
                "num_logical_experts": recording.num_experts,
                "num_ranks": recording.info.num_ranks,
                "generations": sorted({p.generation for p in recording.placements}),
                "cut_short": cut_short,
            }
            print(json.dumps(report))
            return
        print(
            f"{self.output}: {steps} steps in {recording.num_intervals} intervals, "
            f"{tokens[0]} prefill and {tokens[1]} decode tokens, {elapsed:.1f} s, {size} bytes"
        )
        if not steps and cut_short is None:
            print("no step had tokens: nothing was computed meanwhile", file=sys.stderr)


class _End:
    """The answer to "give me this recording when it has ended"."""

    def __init__(self, http: ExpertsHttp) -> None:
        self._http = http
        self._content: bytes | None = None
        self._cut_short: str | None = None
        self._error: MoeserveError | None = None
        self._ended = threading.Event()  # joining a thread does not survive a Ctrl-C
        threading.Thread(target=self._run, name="recording", daemon=True).start()

    def _run(self) -> None:
        try:
            self._content, headers = self._http.post_for_bytes(
                "/experts/recording/stop", None, wait="true"
            )
            self._cut_short = headers.get(CUT_SHORT)
        except MoeserveError as error:
            self._error = error
        except RuntimeError as error:  # of httpx, where the command ends first
            self._error = MoeserveError(str(error))
        finally:
            self._ended.set()

    def came(self, seconds: float) -> bool:
        """Whether it comes within so many seconds."""
        return self._ended.wait(seconds)

    def now(self) -> tuple[bytes, str | None]:
        """End the recording -> (its file, why it had ended before)."""
        patience = STOP_SECONDS
        if not self._ended.is_set():
            try:
                self._http.post("/experts/recording/stop?format=json")
            except MoeserveError:
                if not self.came(LAST_SECONDS):
                    raise
        if not self.came(patience):
            raise MoeserveError(f"{self._http.url}: the recording did not come in {patience:g} s")
        if self._content is None:
            assert self._error is not None
            raise self._error
        return self._content, self._cut_short


@contextmanager
def _terminated_is_interrupted() -> Iterator[None]:
    """SIGTERM ends the recording as Ctrl-C does, so that it is saved."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _progress(seconds: float | None, steps: int | None) -> Iterator[Any]:
    """show(seconds so far, steps so far, tokens so far): a bar on a terminal, else nothing."""
    if not sys.stderr.isatty():
        ends = "at Ctrl-C"
        if seconds is not None or steps is not None:
            ends = f"after {seconds:g} s" if seconds is not None else f"after {steps} steps"
        print(f"recording; ends {ends}", file=sys.stderr, flush=True)
        yield lambda elapsed, done, tokens: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task("recording (Ctrl-C ends it)", total=seconds or steps)

        def show(elapsed: float, done: int, tokens: int) -> None:
            completed = None if seconds is None and steps is None else done
            if seconds is not None:
                completed = min(elapsed, seconds)  # type: ignore[assignment]
            text = f"{done} steps, {tokens} tokens (Ctrl-C ends it)"
            bars.update(task, completed=completed, description=text)

        yield show
