"""Sizes, rates and numbers as people write and read them. Knows text; nothing of experts."""

from __future__ import annotations

import re

from moeserve.errors import ConfigError

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)B?\s*(/s)?\s*", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_bytes(name: str, text: str, rate: bool = False) -> float:
    """44MB, 1.5GiB, 1073741824; with rate also 50GB/s. ConfigError names the flag."""
    match = _SIZE.fullmatch(text)
    example = "50GB/s, 900MB/s or 25GiB" if rate else "44MB, 512KiB or 1073741824"
    if match is None or (match[4] and not rate) or float(match[1]) <= 0:
        raise ConfigError(
            [f"{name} {text!r}: must be bytes{' a second' * rate}, such as {example}"]
        )
    base = 1024 if match[3] else 1000
    return float(match[1]) * float(base ** _POWERS[match[2].lower()])


def parse_numbers(name: str, text: str, least: int = 0) -> list[int]:
    """1,2,3 or 0-3 or both, without repeats. ConfigError names the flag."""
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", part)
        first, last = (0, -1) if match is None else (int(match[1]), int(match[2] or match[1]))
        if not least <= first <= last < first + 65536:
            raise ConfigError(
                [f"{name} {text!r}: must be whole numbers of at least {least}, such as 3,4 or 0-7"]
            )
        numbers += [n for n in range(first, last + 1) if n not in numbers]
    return numbers


def show_bytes(value: float | None) -> str:
    """12.3 GB; a dash where not known."""
    if value is None:
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def show_seconds(value: float | None) -> str:
    if value is None:
        return "-"
    if value < 1:
        return f"{1000 * value:.1f} ms"
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.1f} min"


def show_count(value: float) -> str:
    """1234567 -> 1.2 M."""
    for unit in ("", " k", " M", " G"):
        if abs(value) < 1000:
            return f"{value:.0f}{unit}" if not unit else f"{value:.1f}{unit}"
        value /= 1000
    return f"{value:.1f} T"
