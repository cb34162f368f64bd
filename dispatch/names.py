"""What users may call dispatchers: a name, or one for each phase; what is wrong with other texts.

Pure, and without torch: settings are checked before anything is loaded. Knows texts; which names
there are is the registry's (`dispatch`), what comes of them `dispatch.choice`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ep.nearest import nearest, nearest_hint

PHASES = ("prefill", "decode")
AUTO = "auto"
# What torch's collectives go over is its own choice; the others are words of other engines.
_MEANT = {
    "gloo": "torch",
    "nccl": "torch",
    "alltoall": "torch",
    "all_to_all": "torch",
    "naive": "allgather",
    "allgather_reducescatter": "allgather",
    "low_latency": "deepep_ll",
    "deepep_low_latency": "deepep_ll",
    "normal": "deepep_normal",
    "deepep_high_throughput": "deepep_normal",
    "pplx": "nvshmem",
}
EMULATED = "_emulated"  # ends the registry's name of a backend's emulation


@dataclass(frozen=True)
class Wish:
    """A name for each phase, "auto" included. emulate: of what is named, the emulation on CPUs
    where there is one; auto finds none."""

    prefill: str = AUTO
    decode: str = AUTO
    emulate: bool = False

    @classmethod
    def read(
        cls, text: str, known: Sequence[str], problems: list[str], emulate: bool = False
    ) -> Wish | None:
        """A name, or `prefill=NAME,decode=NAME`; None, with all that is wrong added to problems,
        where it is neither. known: the registry's names."""
        names = [AUTO, *_for_users(known)]
        given: dict[str, str] = {}
        found = []
        for part in text.split(",") if "=" in text else ():
            phase, _, name = (piece.strip() for piece in part.partition("="))
            if phase in PHASES and phase not in given:
                given[phase] = name
            else:
                again = "given twice" if phase in given else "no phase"
                found.append(f"{part!r}: {again}; must be prefill=NAME,decode=NAME")
        given = given or ({} if found else dict.fromkeys(PHASES, text))
        for name in dict.fromkeys(given.values()):
            if name not in names:
                which = "" if name == text else f"{name!r}: "
                valid = f"must be one of {', '.join(names)}, or prefill=NAME,decode=NAME"
                found.append(which + valid + _hint(name, names))
        problems += found
        if found:
            return None
        return cls(given.get("prefill", AUTO), given.get("decode", AUTO), emulate)

    def __str__(self) -> str:
        if self.prefill == self.decode:
            return self.prefill
        return f"prefill={self.prefill},decode={self.decode}"

    def of(self, phase: str) -> str:
        return self.prefill if phase == "prefill" else self.decode


def not_emulated(wish: Wish, known: Sequence[str]) -> str | None:
    """Why there is nothing to emulate in what it names, as the end of a sentence that begins with
    it; None where there is."""
    emulations = [name.removesuffix(EMULATED) for name in known if name.endswith(EMULATED)]
    if {wish.prefill, wish.decode} & set(emulations):
        return None
    return f"has no emulation; those that have: {', '.join(emulations)}"


def _for_users(known: Sequence[str]) -> list[str]:
    return [name for name in known if not name.endswith(EMULATED)]


def _hint(name: str, names: Sequence[str]) -> str:
    """The nearest name; of a list, the nearest as a pair for both phases."""
    parts = name.split(",")
    if len(parts) == len(PHASES):
        close = [nearest(part, names) for part in parts]
        if all(close):
            pairs = zip(PHASES, close, strict=True)
            return f"; nearest: {','.join(f'{phase}={one}' for phase, one in pairs)}"
    meant = _MEANT.get(name.strip().casefold())
    return f"; nearest: {meant}" if meant in names else nearest_hint(name, names)
