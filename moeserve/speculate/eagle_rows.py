"""What an EAGLE head's drafter has of a sequence, and the rows of one run of the head.

Knows: positions, keys and values, features. Knows nothing of how they are computed.

Shape letters: m rows, P past positions, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from torch import Tensor

from moeserve.speculate.drafter import DraftAsk
from moeserve.speculate.eagle import Past
from moeserve.speculate.eagle_padded import PaddedPasts


@dataclass
class Known:
    """Rows of the positions start .. end - 1."""

    start: int
    past: list[Past]

    @property
    def end(self) -> int:
        return self.start + len(self.past[0][0])

    def rewind(self, end: int) -> None:
        keep = max(end - self.start, 0)
        self.past = [(k[:keep], v[:keep]) for k, v in self.past]


@dataclass
class Rows:
    """Of one run of the head: of several sequences, one behind another."""

    tokens: list[int] = field(default_factory=list)  # the one after each row
    hidden: list[Tensor] = field(default_factory=list)  # [m, D] of each sequence
    positions: list[int] = field(default_factory=list)
    pasts: list[list[Past]] = field(default_factory=list)
    masks: list[Tensor] = field(default_factory=list)  # [m, P + m] of each, but for `PaddedPasts`
    # Rows whose token was chosen by the step, and which of its own that is (`late`).
    late_into: list[int] = field(default_factory=list)
    late_from: list[int] = field(default_factory=list)

    def add(
        self,
        tokens: Seq[int],
        hidden: Tensor,
        positions: Seq[int],
        past: list[Past],
        mask: Tensor | None,
    ) -> None:
        self.tokens += tokens
        self.hidden.append(hidden)
        self.positions += positions
        self.pasts.append(past)
        if mask is not None:
            self.masks.append(mask)


@dataclass
class Kept:
    """features: of each ask, the last row's [1, D]; with late verdicts those of all its drafts too,
    [drafts + 1, D]. numbers: of asks, in `padded`."""

    features: list[Tensor | None]
    padded: PaddedPasts | None = None
    numbers: dict[int, int] = field(default_factory=dict)

    def able(self, asks: Seq[DraftAsk]) -> list[int]:
        """Those that may draft."""
        return [i for i, a in enumerate(asks) if self.features[i] is not None and a.most > 0]

    def of(self, order: Seq[int]) -> list[Tensor]:
        return [feature for i in order if (feature := self.features[i]) is not None]
