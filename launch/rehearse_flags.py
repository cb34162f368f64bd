"""What can be rehearsed, and whether what was typed can be: all of it known before torch is loaded.

Knows names, layouts, files that are there or not. What a rehearsal does: launch/rehearse.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launch.choices import not_one_of, whole_number

# The layout (ep/presets.py), whether steps only decode, most tokens of a rank in a step.
REHEARSALS = {
    "v3-decode-320": ("decode-ep320", True, 8),
    "v3-decode-144": ("decode-ep144", True, 16),
    "v3-prefill-32": ("prefill-ep32", False, 96),
}
ROUTINGS = ("random", "trace")
DISPATCHERS = ("torch", "allgather")
WIRES = ("model", "fp8", "fp8_ue8m0")
MOST_SEED = 10**15
_LAYOUTS = {layout: name for name, (layout, _, _) in REHEARSALS.items()}


def rehearsal_of(name: str) -> str:
    """A layout's name, as `serve --layout` takes it, means the rehearsal of that layout."""
    return _LAYOUTS.get(name, name)


@dataclass(frozen=True)
class Asked:
    """What was typed, defaults filled in."""

    name: str
    routing: str = "random"
    trace: Path | None = None
    seed: int | str = 0
    dispatch: str = "torch"
    wire: str = "model"
    array: str | None = None

    def problems(self) -> list[str]:
        """Everything that is wrong, a line each."""
        problems = []
        if rehearsal_of(self.name) not in REHEARSALS:
            problems.append(not_one_of("--rehearse", self.name, REHEARSALS, _LAYOUTS))
        for flag, value, valid in (
            ("--routing", self.routing, ROUTINGS),
            ("--dispatch", self.dispatch, DISPATCHERS),
            ("--wire", self.wire, WIRES),
        ):
            if value not in valid:
                problems.append(not_one_of(flag, value, valid))
        if self.routing == "trace":
            if self.trace is None:
                problems.append("--routing trace: give the file too: --routing trace FILE")
            else:
                problems += _file_problems(self.trace)
        elif self.trace is not None:
            problems.append(f"{self.trace}: a file of loads goes with --routing trace")
        if self.array is not None and self.trace is None:
            problems.append(f"--array {self.array}: goes with --routing trace FILE")
        whole_number("--seed", self.seed, 0, MOST_SEED, problems)
        return problems


def _file_problems(path: Path) -> list[str]:
    from ep.trace import ENDINGS

    if not path.exists():
        return [f"--routing trace {path}: no such file"]
    if not path.is_file():
        return [f"--routing trace {path}: is no file"]
    if path.suffix not in ENDINGS:
        return [f"--routing trace {path}: must end in one of {', '.join(ENDINGS)}"]
    return []
