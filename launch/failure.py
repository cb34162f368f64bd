"""How a failed process says why: exit codes, the error file, one line.

When one rank dies, the others fail too, a moment later, in a collective. Those failures are
secondary: they say LOST_PEER, and whoever reports looks for the one that does not. Knows which
exceptions are typed errors; nothing of how processes are started.
"""

from __future__ import annotations

import json
import signal
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from moeserve.errors import MoeserveError

LOST_PEER = 75  # exit code: this rank is fine, another one is not
# What gloo and the store say when the other end is gone: plain RuntimeErrors.
_PEER_TEXTS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "Timed out waiting",
    "Socket Timeout",
    "failed to recv",
    "gloo/transport",
    "Rank closed the connection",
    "recvValue failed",
    "sendBytes failed",
)
# Errors of the inner packages that mean wrong settings or files.
_BAD_INPUT = ("ConfigError", "UnsupportedModel", "CheckpointError", "PlacementError")
_OUR_PACKAGES = ("launch", "moeserve", "models", "dispatch", "ep")


@dataclass(frozen=True)
class Failure:
    """One process's end. rank None: a process that is no rank."""

    rank: int
    exit_code: int  # negative: minus the number of the signal
    reason: str
    details: str = ""  # a traceback, for what is no typed error
    when: float = 0.0

    @property
    def told(self) -> bool:
        """True when the rank lived to tell its front end as well: a typed error."""
        return self.exit_code > 0 and not self.secondary and not self.details

    @property
    def secondary(self) -> bool:
        return self.exit_code in (LOST_PEER, -signal.SIGTERM)


def is_lost_peer(error: BaseException) -> bool:
    """True when the cause lies with another rank."""
    chain: BaseException | None = error
    while chain is not None:
        if type(chain).__name__ in ("PeerError", "DistBackendError", "DistNetworkError"):
            return True
        if isinstance(chain, RuntimeError) and any(t in str(chain) for t in _PEER_TEXTS):
            return True
        chain = chain.__cause__ or (None if chain.__suppress_context__ else chain.__context__)
    return False


def is_typed(error: BaseException) -> bool:
    """True for errors that say all in their message: ours, and the system's about files.

    An error of ours that was made of a foreign one (a step that failed) does not say where.
    """
    if error.__cause__ is not None and not is_typed(error.__cause__):
        return False
    return type(error).__module__.split(".")[0] in _OUR_PACKAGES or isinstance(error, OSError)


def exit_code_of(error: BaseException) -> int:
    if is_lost_peer(error):
        return LOST_PEER
    if isinstance(error, MoeserveError):
        return error.exit_code
    return 2 if type(error).__name__ in _BAD_INPUT else 1


def write(path: Path | None, error: BaseException) -> None:
    """Leave the reason where the launcher, ours or torchrun's, looks for it."""
    if path is None:
        return
    details = "" if is_typed(error) else "".join(traceback.format_exception(error))
    message = str(error) if is_typed(error) else f"{type(error).__name__}: {error}"
    extra = {
        "py_callstack": details or message,  # what torchrun's table shows
        "details": details,
        "timestamp": str(int(time.time())),
        "when": time.time(),
    }
    path.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))


def read(rank: int, exit_code: int, data: object) -> Failure:
    """A failure from what the launcher collected (`error_file_data`; may hold nothing of ours)."""
    message = data.get("message") if isinstance(data, dict) else None
    if exit_code >= 0 and isinstance(message, dict):
        extra = message["extraInfo"]
        when = float(extra.get("when", extra["timestamp"]))
        return Failure(rank, exit_code, message["message"], extra.get("details", ""), when)
    return Failure(rank, exit_code, describe_exit(exit_code), when=time.time())


def describe_exit(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}"
    hint = " (out of memory?)" if exit_code == -signal.SIGKILL else ""
    return f"killed by {signal.Signals(-exit_code).name}{hint}"


def first_cause(failures: Iterable[Failure]) -> Failure:
    """The failure to tell: a primary one before secondary ones, then the earliest."""
    return min(failures, key=lambda f: (f.secondary, f.when, f.rank))
