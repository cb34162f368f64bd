"""Problems in the words of whoever gave the setting: the flag they typed, or the file and its key.

Inner packages name a setting by section and field (`parallel.ep=0: ...`), for they do not know
where it came from. Knows flags, the TOML file and that form; nothing of what is wrong.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SETTING = re.compile(r"(?<![\w./])([a-z_]+)\.([a-z_]+)(=?)")
# What stands first: a setting, a section in brackets, or a key that is no section.
_HEAD = re.compile(r"(?P<who>(?:rank|node) [^:]+: )?(?P<name>[\w.]+|\[\w+\])(?=[=: ])")
_CACHE = re.compile(r"^((?:rank|node) [^:]+: )?cache: (?=kv_(?:tokens|memory)=)")
ARGUMENT = "CHECKPOINT"


@dataclass(frozen=True)
class Typed:
    """Where each setting came from. flags: the values typed, by section and field."""

    option: Callable[[str, str, object], str]  # section, field, value -> --flag
    flags: Mapping[str, Mapping[str, Any]]
    checkpoint: Path | None  # the argument
    file: Path | None

    def name(self, problem: str) -> str:
        """The problem with its settings renamed; what came from a file begins with the file."""
        problem = _CACHE.sub(lambda m: f"{m[1] or ''}cache.", problem)
        if self.file is not None:
            problem = re.sub(r"^config=", "--config ", problem)
            head = _HEAD.match(problem)
            if head is not None and head["name"] in self._keys_of_file():
                who = head["who"] or ""
                problem = f"{who}{self.file}: {problem[len(who) :]}"
        return _SETTING.sub(self._rename, problem)

    def _rename(self, found: re.Match[str]) -> str:
        section, field, equals = found.groups()
        space = " " if equals else ""
        if (section, field) == ("model", "checkpoint"):
            in_file = self.file is not None and "model.checkpoint" in self._keys_of_file()
            return found[0] if in_file else f"{ARGUMENT}{space}"
        value = self.flags.get(section, {}).get(field)
        return found[0] if value is None else f"{self.option(section, field, value)}{space}"

    def _keys_of_file(self) -> set[str]:
        """What only the file can have said: section.field, unless a flag won over it; [section];
        and keys that are no sections."""
        from moeserve.config import ServeConfig

        assert self.file is not None
        try:
            tables = tomllib.loads(self.file.read_text())
        except (OSError, ValueError):
            return set()
        keys: set[str] = set()
        for section, fields in tables.items():
            keys.add(f"[{section}]")
            if section not in ServeConfig.model_fields or not isinstance(fields, dict):
                keys.add(section)
            for field in fields if isinstance(fields, dict) else ():
                if self.flags.get(section, {}).get(field) is None:
                    keys.add(f"{section}.{field}")
        if self.checkpoint is not None:
            keys.discard("model.checkpoint")
        return keys
