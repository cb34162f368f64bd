"""`moeserve experts record`: expert load of a running job, from now until told, into a file.

Knows the order of starting, waiting, stopping and saving, and what a person sees meanwhile. The
counts lie in the server until the end: it is asked for them once.
"""

from __future__ import annotations

import json
import signal
import sys
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
from launch.experts.http import ExpertsHttp
from moeserve.errors import ConfigError, MoeserveError

LOOK_EVERY = 0.25  # seconds between two looks at how far it is


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
        """Record and save. ConfigError before anything is started; MoeserveError: the server."""
        self._check()
        with ExpertsHttp(self.url, self.admin_key) as http, _terminated_is_interrupted():
            body = {"interval_steps": self.interval_steps, "max_steps": self.steps or 0}
            http.post("/experts/recording/start", body)
            began = time.monotonic()
            try:
                with _progress(self.seconds, self.steps) as show:
                    self._wait(http, began, show)
            except KeyboardInterrupt:
                print("stopping: what was recorded is saved", file=sys.stderr)
            content = http.post_for_bytes("/experts/recording/stop")
            elapsed = time.monotonic() - began
        try:
            recording = ExpertRecording.from_bytes(content)
        except RecordingError as error:
            raise MoeserveError(f"{self.url}: what came is no recording: {error}") from error
        write_whole(self.output, content)
        self._tell(recording, len(content), elapsed)

    def _check(self) -> None:
        problems = []
        if self.seconds is not None and self.steps is not None:
            problems.append("--seconds and --steps: give one of them, not both")
        if self.seconds is not None and not 0 < self.seconds < 1e9:
            problems.append(f"--seconds {self.seconds:g}: must be above 0")
        problems += output_problems("--output", self.output)
        if problems:
            raise ConfigError(problems)

    def _wait(self, http: ExpertsHttp, began: float, show: Any) -> None:
        """Until the time is over or the server says that it has the steps."""
        while True:
            left = LOOK_EVERY
            if self.seconds is not None:
                left = min(left, began + self.seconds - time.monotonic())
                if left <= 0:
                    return
            time.sleep(left)
            state = http.get("/experts/recording")
            show(time.monotonic() - began, state.get("num_steps", 0), state.get("num_tokens", 0))
            if state.get("status") != "recording":
                return

    def _tell(self, recording: ExpertRecording, size: int, elapsed: float) -> None:
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
            }
            print(json.dumps(report))
            return
        print(
            f"{self.output}: {steps} steps in {recording.num_intervals} intervals, "
            f"{tokens[0]} prefill and {tokens[1]} decode tokens, {elapsed:.1f} s, {size} bytes"
        )
        if not steps:
            print("no step had tokens: nothing was computed meanwhile", file=sys.stderr)


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
