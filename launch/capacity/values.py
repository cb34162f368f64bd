"""Values as they are typed, checked together: every wrong one is a line of one error.

Knows text. Knows nothing of what the values are for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from launch.experts.units import parse_bytes
from moeserve.errors import ConfigError
from moeserve.meant import hint

T = TypeVar("T")
# Flags whose values are called as those of a setting
_SETTINGS = {
    "--wire": "parallel.wire",
    "--kv-cache-dtype": "cache.kv_cache_dtype",
    "--shared": "parallel.shared_expert",
}
_SECONDS = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(ms|s)?")


@dataclass
class Values:
    """problems: found so far. What is wrong reads as the default, so that the rest is looked at."""

    problems: list[str] = field(default_factory=list)

    def whole(self, flag: str, text: str | None, default: int, least: int, most: int) -> int:
        if text is None:
            return default
        value = int(text) if re.fullmatch(r"[+-]?\d{1,15}", text.strip()) else None
        if value is None or not least <= value <= most:
            self.problems.append(f"{flag}={text}: must be a whole number from {least} to {most}")
            return default
        return value

    def number(
        self, flag: str, text: str | None, default: T, least: float, most: float
    ) -> float | T:
        if text is None:
            return default
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            self.problems.append(f"{flag}={text}: must be a number from {least:g} to {most:g}")
            return default
        return value

    def seconds(self, flag: str, text: str | None) -> float | None:
        """0.05, 50ms, 2s."""
        if text is None:
            return None
        match = _SECONDS.fullmatch(text.strip())
        value = float(match[1]) * (1e-3 if match[2] == "ms" else 1.0) if match else 0.0
        if value <= 0:
            self.problems.append(f"{flag}={text}: must be seconds above 0, such as 0.05 or 50ms")
            return None
        return value

    def size(self, flag: str, text: str | None) -> float | None:
        """64GB, 2TiB."""
        return None if text is None else self.attempt(lambda: parse_bytes(flag, text), None)

    def choice(self, flag: str, text: str | None, default: str, valid: Sequence[str]) -> str:
        if text is None or text in valid:
            return default if text is None else text
        told = hint(_SETTINGS.get(flag, ""), text, valid)
        self.problems.append(f"{flag}={text}: must be one of {', '.join(valid)}{told}")
        return default

    def attempt(self, made: Callable[[], T], default: T) -> T:
        """What it makes; its ConfigError's lines join the others."""
        try:
            return made()
        except ConfigError as error:
            self.problems += error.problems
            return default

    def check(self) -> None:
        """ConfigError with all that was found."""
        if self.problems:
            raise ConfigError(self.problems)
