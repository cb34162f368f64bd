"""Errors that a user, a peer or a file can cause: each names field, value and what is valid."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence


class MoeserveError(Exception):
    """Base of the typed errors. exit_code is what the command line ends with."""

    exit_code = 1


class ConfigError(MoeserveError):
    """One or several settings are wrong; `problems` holds one line each, all found at once."""

    exit_code = 2

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class Unmet(MoeserveError):
    """The ranks of a job did not all come together: says who is missing, or where."""


class InvalidRequest(MoeserveError):
    """A request field cannot be served: HTTP 400. `field` and `value` name it."""

    exit_code = 2

    def __init__(self, field: str, value: object, valid: str) -> None:
        self.field, self.value, self.valid = field, value, valid
        super().__init__(f"{field}={_spelled(value)} is not valid: {valid}")


class MissingField(InvalidRequest):
    """A required field was not given; `value` is None."""

    def __init__(self, field: str, valid: str) -> None:
        self.field, self.value, self.valid = field, None, valid
        Exception.__init__(self, f"{field} is missing: it is required and must be {valid}")


class InvalidFields(InvalidRequest):
    """Several fields cannot be served; `field` and its kind are those of the first problem."""

    def __init__(self, problems: Sequence[InvalidRequest]) -> None:
        first = problems[0]
        self.field, self.value, self.valid = first.field, first.value, first.valid
        self.problems = tuple(problems)
        text = "; ".join(f"({number}) {x}" for number, x in enumerate(problems, 1))
        Exception.__init__(self, f"{len(problems)} fields are not valid: {text}")


def one_line(error: Exception) -> str:
    """Kind and first line of any error, for a reason that others read."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}"


def _spelled(value: object) -> str:
    """A value as JSON and TOML spell it where Python does otherwise: true, null, NaN."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case float() if not math.isfinite(value):
            return json.dumps(value)
        case list():
            return f"[{', '.join(map(_spelled, value))}]"
        case dict():
            return "{" + ", ".join(f"{k!r}: {_spelled(v)}" for k, v in value.items()) + "}"
    return repr(value)


def raise_problems(problems: Sequence[InvalidRequest]) -> None:
    """Nothing for none, the one for one, InvalidFields for several."""
    if problems:
        raise problems[0] if len(problems) == 1 else InvalidFields(problems)


class QueueFull(MoeserveError):
    """The engine refuses more requests for now: HTTP 429 with Retry-After."""

    def __init__(self, waiting: int, limit: int, retry_after: float) -> None:
        self.waiting, self.limit, self.retry_after = waiting, limit, retry_after
        super().__init__(f"queue full: {waiting} requests wait, max_queue={limit}; retry later")


class NotReady(MoeserveError):
    """The engine is loading, draining or stalled: HTTP 503 with the reason."""


class EngineFailed(MoeserveError):
    """A step failed; it ended for all ranks. Running requests end with finish_reason 'error'."""


class JobDied(MoeserveError):
    """A process without which the job cannot go on is gone."""

    exit_code = 3


class RankDied(JobDied):
    """A rank left the job. `rank` is the first one known to have died."""

    def __init__(self, rank: int, reason: str) -> None:
        self.rank, self.reason = rank, reason
        super().__init__(f"rank {rank} died: {reason}")


class LauncherDied(JobDied):
    """Whoever had started the ranks is gone; the kernel ended them for that: none is to blame."""

    def __init__(self) -> None:
        super().__init__(
            "the launcher died: the process that had started the ranks is gone, and they with it"
        )


class FrontEndDied(JobDied):
    """The front end was killed: nobody can ask any more, so the ranks leave."""
