"""`--speculate`: what was asked for, read from its text. Imports nothing heavy.

    off | auto | mtp[:K] | ngram[:K] | eagle:PATH[:K] | medusa:PATH[:K] | draft:PATH[:K]

K is the number of drafts behind each other, 1 to MAX_DEPTH, or `auto`, as where it is left out: as
deep as pays at the moment, down to none. `auto` alone is mtp where the checkpoint has it, else
ngram. A PATH that ends in a colon and digits is written with `:auto` behind it.

Knows texts and names. Knows nothing of checkpoints or of drafting.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moeserve.meant import hint

MAX_DEPTH = 8
OFF, AUTO = "off", "auto"
WITH_PATH = ("eagle", "medusa", "draft")
NAMES = (OFF, AUTO, "mtp", "ngram", *WITH_PATH)
_FORMS = "off, auto, mtp[:K], ngram[:K], eagle:PATH[:K], medusa:PATH[:K] or draft:PATH[:K]"


@dataclass(frozen=True)
class SpeculateWish:
    """name: one of NAMES. depth None: adaptive. path: of heads or of a checkpoint, else None."""

    name: str
    depth: int | None = None
    path: Path | None = None

    @property
    def is_off(self) -> bool:
        return self.name == OFF

    @property
    def without_path(self) -> str:
        """What must be the same on all machines."""
        return f"{self.name}:{AUTO if self.depth is None else self.depth}"


def read_speculate(text: str) -> SpeculateWish:
    """ValueError says what would be valid."""
    name, colon, rest = text.strip().partition(":")
    if name not in NAMES:
        raise ValueError(f"must be {_FORMS}{hint('speculate.method', name, NAMES)}")
    if name in (OFF, AUTO):
        if colon:
            raise ValueError(f"{name} takes nothing behind it; valid: {_FORMS}")
        return SpeculateWish(name)
    path: Path | None = None
    depth: str | None = rest if colon else None
    if name in WITH_PATH:
        folder, last_colon, last = rest.rpartition(":")
        has_depth = bool(last_colon) and (last == AUTO or last.lstrip("-").isdecimal())
        folder, depth = (folder, last) if has_depth else (rest, None)
        if not folder:
            raise ValueError(f"{name} needs a folder: {name}:PATH or {name}:PATH:K")
        path = Path(folder)
    if depth is None or depth == AUTO:
        return SpeculateWish(name, None, path)
    if not depth.lstrip("-").isdecimal():
        raise ValueError(
            f"K={depth!r} must be a number from 1 to {MAX_DEPTH}, or auto; such as {name}:3"
        )
    number = int(depth)
    if not 1 <= number <= MAX_DEPTH:
        nearest = min(max(number, 1), MAX_DEPTH)
        never = "; for never: use off" if number < 1 else ""
        raise ValueError(
            f"K={number} must lie in 1 to {MAX_DEPTH}, or be auto; nearest valid: {nearest}{never}"
        )
    return SpeculateWish(name, number, path)


def folder_problem(text: str) -> list[str]:
    """What is wrong with the folder that a valid setting names, as far as can be seen at once."""
    path = read_speculate(text).path
    if path is None or path.is_dir():
        return []
    return [f"speculate.method={text!r}: {path} is no folder; it must hold config.json and weights"]
