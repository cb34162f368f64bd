"""What rows draw with where their logits lie on a device: a number of each kind a row.

Greedy rows have a temperature of 0 here.

Knows sequences. Knows nothing of the kernels that draw.

Shape letters: O rows.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models.crossing import sent_all
from moeserve.sampler import Row
from moeserve.sequence import SamplingNeeds


@dataclass(frozen=True)
class RowDraws:
    """temperature [O] fp32, 0: greedy; top_k [O] int32, 0: off; top_p [O] fp64, 1: off; min_p [O]
    fp32, 0: off; seeds, positions [O] int64 (the 64 bits of the seed; how many tokens are out)."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor

    @classmethod
    def of(cls, parts: Seq[Tensor], positions: Tensor) -> RowDraws:
        """parts: of `draw_parts`, wherever they are."""
        temperature, top_k, top_p, min_p, seeds = parts
        return cls(temperature, top_k, top_p, min_p, seeds, positions)

    def first(self, count: int, positions: Tensor) -> RowDraws:
        """Of the first rows, when other numbers of tokens are out."""
        return RowDraws(
            self.temperature[:count],
            self.top_k[:count],
            self.top_p[:count],
            self.min_p[:count],
            self.seeds[:count],
            positions,
        )


def draw_parts(rows: Seq[Row]) -> list[Tensor]:
    """On the host, in the order of RowDraws: all but the positions."""
    hot = [bool(s.needs & SamplingNeeds.RANDOM) for s in rows]
    heats = [s.temperature if random else 0.0 for s, random in zip(rows, hot, strict=True)]
    return [
        torch.from_numpy(x)
        for x in (
            np.array(heats, np.float32),
            np.array([s.sampling.top_k for s in rows], np.int32),
            np.array([s.sampling.top_p for s in rows], np.float64),
            np.array([s.sampling.min_p for s in rows], np.float32),
            np.array([s.seed for s in rows], np.uint64).view(np.int64),
        )
    ]


def draws_of(rows: Seq[Row], device: torch.device) -> RowDraws:
    """On the device, by one copy that nobody waits for."""
    out = torch.tensor([s.num_output_tokens for s in rows], dtype=torch.int64)
    *parts, positions = sent_all([*draw_parts(rows), out], device)
    return RowDraws.of(parts, positions)
