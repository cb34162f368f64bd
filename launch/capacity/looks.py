"""What each kind of memory and each part of a step looks like, the same in every picture.

Knows kinds by name, colours. Knows nothing of drawing. A kind of memory and the part of a step that
it serves look alike; no other two do.
"""

from __future__ import annotations

from dataclasses import dataclass

from launch.capacity.canvas import INK, PAPER


@dataclass(frozen=True)
class Look:
    """hatch: drawn over the fill, for what holds nothing."""

    fill: str
    hatch: str = ""

    @property
    def ink(self) -> str:
        """Of letters on it: whichever is easier to read."""
        red, green, blue = (int(self.fill[i : i + 2], 16) for i in (1, 3, 5))
        return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else PAPER


_ATTENTION, _EXPERTS = Look("#1f4e79"), Look("#2e7d6b")
_SHARED, _DENSE = Look("#b5651d"), Look("#f2b66d")
_HEAD, _DRAFTS, _SENT = Look("#b79ced"), Look("#c2417c"), Look("#e3c93b")
LOOKS = {
    "attention": _ATTENTION,
    "attention projections": _ATTENTION,
    "attention core": Look("#5b9bd5"),
    "experts": _EXPERTS,
    "routed experts": _EXPERTS,
    "redundant experts": Look("#8fd3c0"),
    "empty slots": Look("#dff3ee", "..."),
    "shared expert": _SHARED,
    "dense layers": _DENSE,
    "gates": Look("#6a4c93"),
    "embedding and head": _HEAD,
    "head": _HEAD,
    "MTP projections": _DRAFTS,
    "MTP drafts": _DRAFTS,
    "dispatch": _SENT,
    "all-to-alls, not hidden": _SENT,
    "graphs": Look("#3b3f46"),
    "workspace": Look("#9aa5b1"),
    "CUDA context, libraries": Look("#6b4a35"),
    "norms, casts, gaps": Look("#cbb8a9"),
    "left free": Look(PAPER, "////"),
    "KV cache": Look("#e5e7eb"),
}


def look(kind: str) -> Look:
    """Of a part as `parts` calls it; what it says in brackets does not matter."""
    return LOOKS[kind.split(" (")[0]]
