"""Values of a config.json by key: read as one kind of value, or named in a list of problems.

Knows: JSON values, what a key may hold. Knows nothing of models. A wrong value is never converted
("false" is not false, 1.5 is not an integer): it is named with what would be valid, and all wrong
values are told together.
"""

from __future__ import annotations

import math
from typing import Any


class Fields:
    """Reads `values`; `problems` gains a line for each wrong one, and something valid is returned.

    where: put before the key in a problem ("rope_scaling.", say). A key that is absent or null
    takes the default; a default of None makes the key optional.
    """

    def __init__(self, values: dict[str, Any], problems: list[str], where: str = "") -> None:
        self.values, self.problems, self.where = values, problems, where

    def integer(self, key: str, least: int, default: int | None = None) -> int:
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            kind = {0: "an integer that is not negative", 1: "a positive integer"}.get(
                least, f"an integer of at least {least}"
            )
            self._wrong(key, value, kind)
            return least
        return value

    def number(
        self,
        key: str,
        *,
        above: float = 0.0,
        least: float = -math.inf,
        default: float | None = None,
    ) -> float:
        """A finite number > above and >= least."""
        value = self._get(key, default)
        if not _is_number(value) or not math.isfinite(value) or value <= above or value < least:
            bound = f"of at least {least:g}" if least > above else f"above {above:g}"
            self._wrong(key, value, f"a finite number {bound}")
            return max(above + 1, least)
        return float(value)

    def optional_number(self, key: str) -> float | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not _is_number(value) or not math.isfinite(value) or value < 0:
            self._wrong(key, value, "a finite number that is not negative, or null")
            return None
        return float(value)

    def optional_integer(self, key: str, least: int = 0) -> int | None:
        return None if self.values.get(key) is None else self.integer(key, least)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            self._wrong(key, value, "true or false")
            return default
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        """Token ids: an integer, a list of integers, or nothing."""
        value = self.values.get(key)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(v, int) and not isinstance(v, bool) for v in listed):
            self._wrong(key, value, "a token id or a list of token ids")
            return ()
        return tuple(listed)

    def table(self, key: str) -> dict[str, Any]:
        """An object; {} when absent. Keys that are null are left out."""
        value = self.values.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            self._wrong(key, value, "an object or null")
            return {}
        return {k: v for k, v in value.items() if v is not None}

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def _wrong(self, key: str, value: Any, valid: str) -> None:
        self.problems.append(f"{self.where}{key}={value!r}: {valid} is needed")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
