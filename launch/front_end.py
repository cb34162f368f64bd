"""The front end as a child process of rank 0: started, asked for its address, told to stop.

    python -m launch.front_end ...   is that process: tied to its parent's life (moeserve.lifeline),
                                     then `moeserve.frontend`, which has the contract.

Knows processes and pipes. Knows nothing of HTTP or of what the messages say.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread

from launch.cluster.stages import StageFile
from launch.env import ERRORS, error_file
from launch.failure import write_verdict
from launch.processes import is_alive, launcher_of_front_end, leave
from launch.torchrun_folder import TorchrunFolder
from moeserve.config import ServeConfig
from moeserve.errors import ConfigError, JobDied, MoeserveError, RankDied
from moeserve.lifeline import LIFELINE, when_parent_ends

_LOST = re.compile(r"rank (\d+) died: (.*)")  # RankDied's text
LAST_WORDS_SECONDS = 3.0  # the death of a rank is known and told within one


class FrontEndProcess:
    """A running front end. `address` is where ranks connect, `url` where clients do."""

    def __init__(
        self,
        config: ServeConfig,
        num_ranks: int,
        bind_host: str,
        on_ready: Callable[[str], None] = lambda url: None,
        on_lost: Callable[[int, str], None] = lambda rank, reason: None,
    ) -> None:
        """Blocks until both sockets are bound. ConfigError if they cannot be (port taken, ...)."""
        settings_read, settings_write = os.pipe()
        news_read, news_write = os.pipe()
        command = [
            *python_command("launch.front_end"),
            f"--config=/dev/fd/{settings_read}",
            f"--num-ranks={num_ranks}",
            f"--bind-host={bind_host}",
            f"--announce-fd={news_write}",
        ]
        self._process = subprocess.Popen(
            command,
            pass_fds=(settings_read, news_write),
            stdin=LIFELINE,
            # A signal to rank 0's process group is forwarded once, by rank 0.
            start_new_session=True,
            env=python_environment(),
        )
        for theirs in (settings_read, news_write):
            os.close(theirs)
        with os.fdopen(settings_write, "w") as settings:
            settings.write(config.model_dump_json())
        self._news = os.fdopen(news_read)
        self._on_ready, self._on_lost = on_ready, on_lost
        self.url = ""
        self.address = self._expect("engine")
        self.url = self._expect("http")
        Thread(target=self._listen, name="front-end-news", daemon=True).start()

    def _expect(self, what: str) -> str:
        for line in self._news:
            news = json.loads(line)
            if news["what"] == what:
                return news["value"]
            if news["what"] == "failed":
                code = self._process.wait()
                problems = news["value"].splitlines()
                raise ConfigError(problems) if code == 2 else MoeserveError("\n".join(problems))
        code = self._process.wait()
        raise MoeserveError(f"the front end ended with exit code {code} before it was up")

    def _listen(self) -> None:
        for line in self._news:
            news = json.loads(line)
            if news["what"] == "ready":
                self._on_ready(news["value"])
            elif news["what"] == "failed" and (lost := _LOST.match(news["value"])):
                self._on_lost(int(lost[1]), lost[2])

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, seconds: float | None = None) -> int | None:
        """Its exit code, or None if it still runs after so many seconds."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> None:
        """Ask it to drain and to stop all ranks."""
        if self.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        if self.poll() is None:
            self._process.kill()
            self._process.wait()


def python_command(module: str) -> list[str]:
    """Run one of our modules; -P: whatever lies in the working directory shadows nothing."""
    return [sys.executable, "-P", "-m", module]


def python_environment(**extra: str) -> dict[str, str]:
    """The environment of a child that must find our packages where we found them."""
    home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    path = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": f"{home}{os.pathsep}{path}" if path else home} | extra


def main() -> None:
    folder = TorchrunFolder(error_file(os.environ))
    launcher = launcher_of_front_end()
    when_parent_ends(lambda: _last_words(folder))
    from moeserve.frontend import main as front_end_main

    code = front_end_main(
        on_rank_died=_record,
        launcher_gone=lambda: launcher is not None and not is_alive(launcher),
    )
    folder.remove_if_orphaned()
    leave(code)


def _record(error: JobDied) -> None:
    if not isinstance(error, RankDied):
        return  # of the launcher's end nobody is left to hear
    StageFile(os.environ, 0).name_first(error.rank)
    shared = os.environ.get(ERRORS)  # torchrun's file is rank 0's own, in torchrun's form
    write_verdict(Path(shared) if shared else None, error.rank)


def _last_words(folder: TorchrunFolder) -> None:
    """Rank 0 is gone: by its lost connection the front end knows, ends all streams and then itself.
    This is for one that cannot."""
    time.sleep(LAST_WORDS_SECONDS)
    folder.remove_if_orphaned()
    os._exit(1)


if __name__ == "__main__":
    main()
