"""What runs an LLM's requests: an Engine in this process, or ranks behind the wire.

A backend takes requests and delivers their outputs as they come; `deliver` answers False when no
more is wanted of a request. Knows nothing of text.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ep.group import EPGroup
from ep.recording import ExpertRecording
from moeserve.client import EngineClient
from moeserve.collector import RecordingCollector, recording_info
from moeserve.config import ServeConfig
from moeserve.errors import ConfigError, EngineFailed, MoeserveError, RankDied
from moeserve.lifeline import LIFELINE
from moeserve.load_desk import RecordingConflict, check_recording
from moeserve.nameless import NamelessFile
from moeserve.request import FinishReason, Request, TokenOutput
from moeserve.wire import RankStats

if TYPE_CHECKING:
    from moeserve.build import Progress

Deliver = Callable[[TokenOutput], bool]
STOP_SECONDS = 10.0
# How long ranks may take from their start until they load weights (import torch, find each other).
MEETING_SECONDS = 600.0
FRESH_SECONDS = 5.0  # how long ranks may take to report after their last output
_LOOK_AGAIN = 0.005
_MEETING = ("absent", "starting", "rendezvous")  # stages before a rank works on its own

log = logging.getLogger("moeserve.llm")


class Backend(Protocol):
    @property
    def max_model_len(self) -> int: ...

    @property
    def vocab_size(self) -> int | None: ...

    def run(self, requests: Sequence[Request], deliver: Deliver) -> None: ...

    def stats(self) -> list[Any]: ...

    def info(self) -> list[dict[str, object]]: ...

    def start_recording(self, interval_steps: int, max_steps: int) -> None: ...

    def stop_recording(self) -> ExpertRecording: ...

    def close(self) -> None: ...


class LocalBackend:
    """One rank, stepped by the caller's thread."""

    def __init__(self, config: ServeConfig, progress: Progress | None = None) -> None:
        import torch

        from moeserve.build import build_engine

        if config.engine.threads is not None:
            torch.set_num_threads(config.engine.threads)
        self.engine = build_engine(config, EPGroup.single(), progress or (lambda *_: None))
        self._recording: RecordingCollector | None = None
        self._closed = False

    @property
    def max_model_len(self) -> int:
        return self.engine.scheduler.limits.max_model_len

    @property
    def vocab_size(self) -> int | None:
        return self.engine.scheduler.limits.vocab_size

    def run(self, requests: Sequence[Request], deliver: Deliver) -> None:
        if self._closed:
            raise EngineFailed("this LLM is closed")
        engine = self.engine
        try:
            for request in requests:
                engine.add_request(request)
            while engine.has_work:
                for output in engine.step():
                    if not deliver(output) and output.finish_reason is None:
                        engine.abort([output.request_id], FinishReason.STOP)
                self._hear()
        except BaseException:  # Ctrl-C too: leave nothing behind for the next call
            engine.scheduler.fail_all("interrupted")
            if engine.recorder is not None:
                engine.recorder.drop_step()
            raise
        finally:
            engine.scheduler.take_outbox()  # ends of requests that were aborted on our behalf

    def stats(self) -> list[Any]:
        return [self.engine.stats()]

    def info(self) -> list[dict[str, object]]:
        return [self.engine.info]

    def start_recording(self, interval_steps: int, max_steps: int) -> None:
        last = self._recording
        if last is not None and not last.ended:
            raise RecordingConflict(f"recording {last.recording} runs: stop it first")
        check_recording(interval_steps, max_steps)
        number = 1 if last is None else last.recording + 1
        info = recording_info(self.engine.info, 1, interval_steps, time.time())
        self._recording = RecordingCollector(number, info)
        self.engine.start_recording(number, interval_steps, max_steps)

    def stop_recording(self) -> ExpertRecording:
        if self._recording is None:
            raise RecordingConflict("no recording was started")
        self.engine.stop_recording(self._recording.recording)
        if not self._recording.ended:
            self.engine.step()  # an idle one, in which it is agreed to end
        self._hear()
        assert self._recording.ended
        return self._recording.result()

    def _hear(self) -> None:
        for report in self.engine.take_load_reports():
            assert self._recording is not None
            self._recording.heard(report)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.engine.close()


class RanksBackend:
    """ep ranks as processes of `python -m moeserve serve`, which connect to our own socket. They
    end when this process does; no file stays behind."""

    def __init__(self, config: ServeConfig) -> None:
        _check_place(config.parallel.ep)
        self._runner = asyncio.Runner()
        self._client: EngineClient | None = None
        self._process: subprocess.Popen[bytes] | None = None
        settings = NamelessFile(to_toml(config))
        try:
            self._runner.run(self._start(config, settings.path))
        except BaseException:
            self.close()
            raise
        finally:
            settings.close()  # all have read it

    async def _start(self, config: ServeConfig, settings: Path) -> None:
        self._client = client = EngineClient(
            config.parallel.ep,
            max_queue=1 << 31,  # offline: the ranks queue what they cannot run yet
            rank_timeout=config.server.rank_timeout,
            prefix_cache=config.cache.prefix_cache,
            launcher_gone=self._launcher_killed,
        )
        address = client.bind()
        client.start()
        # -P: whatever lies in the working directory (a `models` of the caller's) shadows nothing
        command = [sys.executable, "-P", "-m", "moeserve", "serve", "--config", str(settings)]
        self._process = subprocess.Popen(
            [*command, "--frontend", address],
            stdin=LIFELINE,
            stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else None,
            env=_environment(),
        )
        ready = asyncio.ensure_future(client.wait_ready())
        deadline = time.monotonic() + MEETING_SECONDS
        while not ready.done():
            await asyncio.wait([ready], timeout=0.1)
            code = self._process.poll()
            if code is not None and not ready.done():
                ready.cancel()
                with contextlib.suppress(asyncio.CancelledError, MoeserveError):
                    await ready
                said = [r.lost for r in client.fleet.ranks if r.lost]
                if code == ConfigError.exit_code and said:
                    raise ConfigError(said[0].splitlines())
                raise EngineFailed(
                    f"the ranks ended with exit code {code} while starting"
                    + (f": {said[0]}" if said else " (their messages are on stderr)")
                )
            late = [x for x in client.fleet.ranks if x.stage in _MEETING]
            if late and time.monotonic() > deadline and not ready.done():
                ready.cancel()
                raise EngineFailed(
                    f"the ranks have not met within {MEETING_SECONDS:g} s: "
                    + ", ".join(f"rank {x.rank} is {x.stage}" for x in late[:8])
                    + (f" and {len(late) - 8} more" if len(late) > 8 else "")
                )
        try:
            ready.result()
        except RankDied as error:  # what is wrong with settings is no death: the exit code tells
            with contextlib.suppress(subprocess.TimeoutExpired):
                if self._process.wait(STOP_SECONDS) == ConfigError.exit_code:
                    raise ConfigError(error.reason.splitlines()) from None
            raise

    def _launcher_killed(self) -> bool:
        """By a signal; one that ends by itself does so because of its ranks."""
        return self._process is not None and (self._process.poll() or 0) < 0

    @property
    def max_model_len(self) -> int:
        assert self._client is not None
        return min(r.ready.max_model_len for r in self._client.fleet.ranks if r.ready)

    @property
    def vocab_size(self) -> int | None:
        assert self._client is not None
        ready = self._client.fleet.ranks[0].ready
        size = ready.info.get("vocab_size") if ready else None
        return size if isinstance(size, int) else None

    def run(self, requests: Sequence[Request], deliver: Deliver) -> None:
        if self._client is None:
            raise EngineFailed("this LLM is closed")
        self._runner.run(self._serve(requests, deliver))

    async def _serve(self, requests: Sequence[Request], deliver: Deliver) -> None:
        assert self._client is not None
        if not requests:
            return
        stream = self._client.open(requests)
        before = [x.stats for x in self._client.fleet.ranks]
        ran = False
        try:
            while outputs := await stream.get():
                for output in outputs:
                    ran |= output.finish_reason is not FinishReason.ERROR
                    if not deliver(output) and output.finish_reason is None:
                        stream.abort(output.request_id, FinishReason.STOP)
        finally:
            stream.abort()
        if self._client.failed is not None:
            raise self._client.failed
        if ran:
            await self._hear_stats(self._client, before)

    def stats(self) -> list[Any]:
        assert self._client is not None
        self._runner.run(asyncio.sleep(0))
        return [r.stats for r in self._client.fleet.ranks if r.stats is not None]

    async def _hear_stats(self, client: EngineClient, before: Sequence[RankStats | None]) -> None:
        """Wait for what the ranks say once they are idle, so that `stats` counts all requests."""
        deadline = time.monotonic() + FRESH_SECONDS
        while not _is_fresh(before, [x.stats for x in client.fleet.ranks]):
            if client.failed is not None:
                raise client.failed
            if time.monotonic() > deadline:
                log.warning("stats are older than the last output: not all ranks have reported")
                return
            await asyncio.sleep(_LOOK_AGAIN)

    def info(self) -> list[dict[str, object]]:
        assert self._client is not None
        return [r.ready.info for r in self._client.fleet.ranks if r.ready is not None]

    def start_recording(self, interval_steps: int, max_steps: int) -> None:
        assert self._client is not None
        self._client.experts.start(interval_steps, max_steps)

    def stop_recording(self) -> ExpertRecording:
        assert self._client is not None
        return self._runner.run(self._client.experts.stop())

    def close(self) -> None:
        client, self._client = self._client, None
        process, self._process = self._process, None
        if client is not None:
            if process is not None and process.poll() is None and client.fleet.all_ready:
                self._runner.run(client.stop(STOP_SECONDS))
            # Without Ready the ranks listen to nobody: the launcher ends them.
            elif process is not None and process.poll() is None:
                process.terminate()
        if process is not None:
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdin is not None:
                process.stdin.close()
        if client is not None:
            self._runner.run(_close(client))
        self._runner.close()


def _is_fresh(before: Sequence[RankStats | None], now: Sequence[RankStats | None]) -> bool:
    """Whether all ranks have gone on since, none has work, and all have come equally far: idle is
    what they fall together, each with a report. (A step that failed on one is counted by others.)
    """
    if any(x is None or x.num_waiting or x.num_running for x in now):
        return False
    steps = [x.step for x in now if x is not None]
    further = [x - (0 if old is None else old.step) for x, old in zip(steps, before, strict=True)]
    return min(further) > 0 and (len(set(steps)) == 1 or len(set(further)) == 1)


async def _close(client: EngineClient) -> None:
    client.close()


def to_toml(config: ServeConfig) -> str:
    """Settings that are not defaults, as the file that `--config` reads."""
    lines: list[str] = []
    for section, values in config.model_dump(mode="json", exclude_unset=True).items():
        lines.append(f"[{section}]")
        # JSON's strings, numbers, true and false are TOML's as well.
        lines += [f"{k} = {json.dumps(v)}" for k, v in values.items() if v is not None]
    return "\n".join(lines) + "\n"


def _check_place(num_ranks: int) -> None:
    """ConfigError where each of several processes would start ranks of its own."""
    who = f"parallel.ep={num_ranks}: starts ranks"
    # What a spawned process is while it imports the script that started it.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(
            [
                f"{who}, and this is a child process of multiprocessing that imports its parent's "
                'script: make the LLM under `if __name__ == "__main__":`, or each child makes one'
            ]
        )
    given = [name for name in ("RANK", "WORLD_SIZE") if name in os.environ]
    if given:
        raise ConfigError([f"{who} itself, but {given[0]} is set: run the script without torchrun"])


def _environment() -> dict[str, str]:
    """Ours, with the place these packages were imported from on the path."""
    root = str(Path(__file__).resolve().parent.parent)
    old = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": root if not old else root + os.pathsep + old}


def _has_descriptor(stream: Any) -> bool:
    try:
        stream.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    return True
