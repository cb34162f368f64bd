"""Batches of token windows, mixed from the sources by their shares.

Knows the token files, the order of windows (each source in its own shuffled rounds, without
replacement) and how to take up that order again. Knows nothing of text.

Shape letters: B sequences, S positions.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .corpus import SOURCES


class Mixture:
    """An endless stream of batches; `used` (windows drawn per source) is its whole state."""

    def __init__(self, folder: Path, seed: int = 11) -> None:
        self.tokens = {
            s.name: np.load(folder / f"train.{s.name}.npy", mmap_mode="r") for s in SOURCES
        }
        self.names = [s.name for s in SOURCES]
        self.shares = np.array([s.share for s in SOURCES])
        self.seed = seed
        self.used: dict[str, int] = dict.fromkeys(self.names, 0)
        self._orders: dict[tuple[str, int, int], np.ndarray] = {}

    def _window(self, name: str, length: int) -> np.ndarray:
        """The next window of S+2 tokens; each round starts at another phase and is reshuffled."""
        data = self.tokens[name]
        count = (len(data) - 2) // length - 1
        turn, place = divmod(self.used[name], count)
        self.used[name] += 1
        key = (name, turn, length)
        rng = np.random.default_rng([self.seed, self.names.index(name), turn, length])
        if key not in self._orders:
            self._orders = {k: v for k, v in self._orders.items() if k[0] != name}
            phase = rng.integers(0, length)
            self._orders[key] = rng.permutation(count) * length + phase
        start = int(self._orders[key][place])
        return np.asarray(data[start : start + length + 2])

    def batch(self, step: int, sequences: int, length: int) -> Tensor:
        """Tokens [B, S+2] of this step."""
        rng = np.random.default_rng([self.seed, step])
        even = (np.arange(sequences) + rng.random()) / sequences  # stratified: shares hold per step
        picks = rng.permutation(np.searchsorted(self.shares.cumsum() / self.shares.sum(), even))
        rows = [self._window(self.names[min(i, len(self.names) - 1)], length) for i in picks]
        return torch.from_numpy(np.stack(rows).astype(np.int64))


def held_out(folder: Path, name: str, sequences: int, length: int) -> Tensor:
    """Evenly spaced windows [B, S+2] of a source's held-out tokens."""
    data = np.load(folder / f"held.{name}.npy")
    sequences = min(sequences, (len(data) - 2) // length)
    starts = np.linspace(0, len(data) - length - 2, sequences).astype(int)
    return torch.from_numpy(np.stack([data[s : s + length + 2] for s in starts]).astype(np.int64))
