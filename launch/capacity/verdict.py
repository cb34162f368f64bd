"""Whether a plan fits: one line that stands before everything else.

Knows: which broken rules mean that memory does not hold it, flags of fields. Knows no rule.
"""

from __future__ import annotations

from dataclasses import dataclass

from launch.capacity.remedies import Violation, errors
from moeserve.terminal import counted

UNFIT = ("GPU memory", "KV cache")  # rules without which nothing runs, so nothing is predicted
NOT_PREDICTED = "not predicted: it does not fit into memory"


@dataclass(frozen=True)
class Verdict:
    fits: bool
    text: str


def unfit(found: list[Violation]) -> Violation | None:
    """What does not fit into memory, if anything."""
    return next((v for v in errors(found) if v.rule in UNFIT), None)


def verdict(phases: dict[str, list[Violation]], missing: dict[str, float]) -> Verdict:
    """phases: what each of them breaks. missing: bytes that each lacks before any cache."""
    wrong = {phase: v for phase, found in phases.items() if (v := unfit(found)) is not None}
    others = [v.rule for found in phases.values() for v in errors(found) if v not in wrong.values()]
    rules = ", ".join(dict.fromkeys(others))
    if not wrong:
        verb = "is" if len(others) == 1 else "are"
        but = f"; but {counted(len(others), 'rule')} {verb} violated: {rules}" if others else ""
        return Verdict(True, f"fits{but}")
    said = []
    for rule in dict.fromkeys(v.rule for v in wrong.values()):
        facts = {phase: _fact(v, missing[phase]) for phase, v in wrong.items() if v.rule == rule}
        by_phase = (
            fact if len(phases) == 1 else f"{phase} {fact}" for phase, fact in facts.items()
        )
        said.append(f"{rule}: {', '.join(by_phase)}")
    fine = [phase for phase in phases if phase not in wrong]
    text = f"does NOT fit: {'; '.join(said)}; {_nearest(wrong)}"
    text += f"; {fine[0]} fits" if fine else ""
    return Verdict(False, text + (f"; also violated: {rules}" if rules else ""))


def _fact(v: Violation, missing: float) -> str:
    """Without what would be valid, which ends a text."""
    return f"{missing / 1e9:.1f} GB missing" if missing else v.text.rpartition("; ")[0] or v.text


def _nearest(wrong: dict[str, Violation]) -> str:
    """As flags; of phases that differ each by its name."""
    told = {phase: _flags(v) for phase, v in wrong.items()}
    if len(set(told.values())) == 1:
        return f"nearest: {next(iter(told.values()))}"
    return "nearest: " + ", ".join(f"{flags} ({phase})" for phase, flags in told.items())


def _flags(v: Violation) -> str:
    found = [f"--{field} {value}" for field, value in v.nearest]
    return " or ".join(found) if found else "none by one flag alone"
