"""What `moeserve bench kernels` says of wrong flags, whichever way kernels are looked at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moeserve.errors import ConfigError


def nowhere(only: str, names: Iterable[str]) -> list[str]:
    """--only that is in none of the names; empty: it is in one."""
    all_ = list(dict.fromkeys(names))
    if any(only in name for name in all_):
        return []
    return [f"--only {only!r}: in no kernel's name: {', '.join(all_)}"]


def refuse(problems: Sequence[str]) -> None:
    """ConfigError with all of them, where there are any."""
    if problems:
        raise ConfigError(list(problems))
