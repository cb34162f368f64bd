"""How a failed process says why: exit codes, the error file, one line.

When one rank dies, the others fail too, a moment later, in a collective. Those failures are
secondary: they say LOST_PEER, and whoever reports looks for the one that does not. Knows which
exceptions are typed errors; nothing of how processes are started.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ep.peer_loss import is_lost_peer
from moeserve.errors import MoeserveError

LOST_PEER = 75  # exit code: this rank is fine, another one is not
# Errors of the inner packages that mean wrong settings or files.
_BAD_INPUT = (
    "ConfigError",
    "UnsupportedModel",
    "CheckpointError",
    "PlacementError",
    "PlanError",
    "RecordingError",
    "TraceError",
)
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
    def killed(self) -> bool:
        """True when its end came from outside; SIGABRT is a library's answer to a lost peer."""
        return self.exit_code < 0 and self.exit_code not in (-signal.SIGABRT, -signal.SIGTERM)

    @property
    def secondary(self) -> bool:
        return self.exit_code in (LOST_PEER, -signal.SIGTERM)


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


def reason_of(error: BaseException) -> str:
    """What to say of it: typed errors say all in their message."""
    return str(error) if is_typed(error) else f"{type(error).__name__}: {error}"


def write(path: Path | None, rank: int, error: BaseException) -> None:
    """Leave the reason where the launcher looks for it: a line of the file that all ranks share, or
    torchrun's file for this rank, in the form that torchrun reads."""
    details = "" if is_typed(error) else "".join(traceback.format_exception(error))
    message = reason_of(error)
    extra = {
        "py_callstack": details or message,  # what torchrun's table shows
        "details": details,
        "timestamp": str(int(time.time())),
        "when": time.time(),
    }
    _append(path, {"rank": rank, "message": {"message": message, "extraInfo": extra}})


def write_verdict(path: Path | None, rank: int) -> None:
    """The front end's word on which rank died first: the launcher says the same."""
    _append(path, {"verdict": rank})


def _append(path: Path | None, record: dict[str, object]) -> None:
    if path is None:
        return
    # The launcher may be gone and its file with it; torchrun's folder may have been cleaned.
    with contextlib.suppress(OSError):
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True)
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def read(exit_codes: Mapping[int, int], records: str) -> tuple[list[Failure], int | None]:
    """The failures from exit codes by rank, in order of their end, and the lines that were written;
    and the rank that the front end named, if it named one."""
    reasons: dict[int, Failure] = {}
    verdict: int | None = None
    for line in records.splitlines():
        record = json.loads(line)
        if "verdict" in record:
            verdict = record["verdict"]
            continue
        rank, said = record["rank"], record["message"]
        extra = said["extraInfo"]
        reasons[rank] = Failure(rank, 1, said["message"], extra["details"], extra["when"])
    failures = []
    for order, (rank, code) in enumerate(exit_codes.items()):
        if code > 0 and rank in reasons:
            failures.append(replace(reasons[rank], exit_code=code))
        else:  # as late as can be: reasons that were told count as earlier
            failures.append(Failure(rank, code, describe_exit(code), when=time.time() + order))
    return failures, verdict


def describe_exit(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}"
    hint = " (out of memory?)" if exit_code == -signal.SIGKILL else ""
    return f"killed by {signal.Signals(-exit_code).name}{hint}"


def first_cause(failures: Iterable[Failure], verdict: int | None = None) -> Failure:
    """The failure to tell: that of the rank which the front end named; else a primary one before
    secondary ones, a killed process before what others made of its end, then the earliest."""
    listed = list(failures)
    for failure in listed:
        if failure.rank == verdict and not failure.secondary:
            return failure
    return min(listed, key=lambda f: (f.secondary, not f.killed, f.when, f.rank))
