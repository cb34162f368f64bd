"""Errors that a user, a peer or a file can cause: each names field, value and what is valid."""

from __future__ import annotations


class MoeserveError(Exception):
    """Base of the typed errors. exit_code is what the command line ends with."""

    exit_code = 1


class ConfigError(MoeserveError):
    """One or several settings are wrong; `problems` holds one line each, all found at once."""

    exit_code = 2

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class InvalidRequest(MoeserveError):
    """A request field cannot be served: HTTP 400. `field` and `value` name it."""

    exit_code = 2

    def __init__(self, field: str, value: object, valid: str) -> None:
        self.field, self.value, self.valid = field, value, valid
        super().__init__(f"{field}={value!r} is not valid: {valid}")


class QueueFull(MoeserveError):
    """The engine refuses more requests for now: HTTP 429 with Retry-After."""

    def __init__(self, waiting: int, limit: int, retry_after: float) -> None:
        self.waiting, self.limit, self.retry_after = waiting, limit, retry_after
        super().__init__(f"queue full: {waiting} requests wait, max_queue={limit}; retry later")


class NotReady(MoeserveError):
    """The engine is loading, draining or stalled: HTTP 503 with the reason."""


class EngineFailed(MoeserveError):
    """A step failed; it ended for all ranks. Running requests end with finish_reason 'error'."""


class RankDied(MoeserveError):
    """A rank left the job. `rank` is the first one known to have died."""

    exit_code = 3

    def __init__(self, rank: int, reason: str) -> None:
        self.rank, self.reason = rank, reason
        super().__init__(f"rank {rank} died: {reason}")
