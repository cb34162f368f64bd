"""Check: one line of the doctor's table, and what a table of them means. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any


class State(enum.Enum):
    """MISSING: not here, and nothing that this machine is for needs it (the reason says what
    would). WARNING: it works, but slower, less safely, or not for all. FAILS: moeserve cannot do
    here what the machine is there for."""

    OK = "ok"
    MISSING = "missing"
    WARNING = "warning"
    FAILS = "fails"


@dataclass(frozen=True)
class Check:
    """found: what is here. reason: what follows from it. remedy: what to do, in one line. node:
    whose it is, where several were asked."""

    section: str
    name: str
    state: State
    found: str
    reason: str = ""
    remedy: str = ""
    node: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"state": self.state.value}


def ok(section: str, name: str, found: str, reason: str = "") -> Check:
    return Check(section, name, State.OK, found, reason)


def missing(section: str, name: str, reason: str, remedy: str = "", found: str = "-") -> Check:
    return Check(section, name, State.MISSING, found, reason, remedy)


def warning(section: str, name: str, found: str, reason: str, remedy: str) -> Check:
    return Check(section, name, State.WARNING, found, reason, remedy)


def fails(section: str, name: str, found: str, reason: str, remedy: str) -> Check:
    return Check(section, name, State.FAILS, found, reason, remedy)


def counts(checks: Iterable[Check]) -> dict[str, int]:
    """How many there are of each state."""
    every = [check.state for check in checks]
    return {state.value: every.count(state) for state in State}


def exit_code(checks: Sequence[Check]) -> int:
    """1 where something fails, else 0: what is missing or a warning does not stop anybody."""
    return 1 if any(check.state is State.FAILS for check in checks) else 0
