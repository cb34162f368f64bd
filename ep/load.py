"""LoadWindow: tokens per logical expert over the last steps, and how even that is.

Knows: counts, steps, layers. Counts only what it is given while `enabled`: padding, warm-up and
dummy tokens never reach it (callers add real tokens only, on logical experts). Knows nothing of:
devices, process groups; what is summed over ranks is summed by the caller.

Shape letters: W steps of the window, L layers, E logical experts, G ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ep.placement import ExpertPlacement

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class LoadWindow:
    """The last num_steps complete steps. `add` any number of times a step, then `roll`.

    enabled False (start-up, warm-up, benchmarks of kernels): add and roll do nothing.
    """

    def __init__(self, num_layers: int, num_experts: int, num_steps: int) -> None:
        for name, value in (
            ("num_layers", num_layers),
            ("num_experts", num_experts),
            ("num_steps", num_steps),
        ):
            if value < 1:
                raise ValueError(f"LoadWindow: {name}={value}: must be at least 1")
        self.num_layers = num_layers
        self.num_experts = num_experts
        self.num_steps = num_steps
        self.enabled = True
        shape = (num_layers, num_experts)
        self._step: IntArray = np.zeros(shape, dtype=np.int64)  # the step in progress
        self._total: IntArray = np.zeros(shape, dtype=np.int64)
        # int32 halves the ring; a step has far fewer than 2^31 tokens.
        self._ring = np.zeros((num_steps, *shape), dtype=np.int32)
        self._rolled = 0

    def add(self, layer: int, counts: ArrayLike) -> None:
        """counts [E]: tokens of this step that chose each logical expert in one layer."""
        if not self.enabled:
            return
        counts = np.asarray(counts)
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"LoadWindow: layer={layer}: valid are 0..{self.num_layers - 1}")
        if counts.shape != (self.num_experts,):
            raise ValueError(f"LoadWindow: counts {counts.shape}: must be ({self.num_experts},)")
        self._step[layer] += counts

    def roll(self) -> None:
        """End a step: it enters the totals, and the oldest leaves them once the window is full."""
        if not self.enabled:
            return
        oldest = self._ring[self._rolled % self.num_steps]
        self._total += self._step
        self._total -= oldest
        oldest[:] = self._step
        self._step.fill(0)
        self._rolled += 1

    def reset(self) -> None:
        """Forget everything: when warm-up ends, or a workload is known to have changed."""
        for counts in (self._step, self._total, self._ring):
            counts.fill(0)
        self._rolled = 0

    @property
    def steps(self) -> int:
        """Steps that the totals cover."""
        return min(self._rolled, self.num_steps)

    def totals(self) -> IntArray:
        """[L, E] int64: a copy, so that it can be sent or summed while the window goes on."""
        return self._total.copy()


def load_of_ranks(totals: ArrayLike, placement: ExpertPlacement) -> FloatArray:
    """totals [L, E] -> [L, G]: tokens a rank computes if each expert's are split evenly over its
    replicas (what `dispatch.route` does). Empty slots compute nothing."""
    loads = np.asarray(totals, dtype=np.float64)
    expected = (placement.num_layers, placement.num_logical_experts)
    if loads.shape != expected:
        raise ValueError(f"totals {loads.shape}: must be {expected} [layers, experts]")
    share = loads / placement.replica_count
    # One column more, of zeros: what EMPTY (-1) indexes.
    share = np.concatenate([share, np.zeros_like(share[:, :1])], axis=1)
    slots = np.take_along_axis(share, placement.physical_to_logical, axis=1)
    ranks: FloatArray = slots.reshape(placement.num_layers, placement.num_ranks, -1).sum(axis=2)
    return ranks


def balancedness(totals: ArrayLike, placement: ExpertPlacement) -> FloatArray:
    """[L]: largest rank load / mean rank load; 1 is perfect, and what an idle layer counts as.
    Ranks that host nothing count in the mean."""
    ranks = load_of_ranks(totals, placement)
    mean = ranks.mean(axis=1)
    out = np.ones(len(ranks))
    np.divide(ranks.max(axis=1), mean, out=out, where=mean > 0)
    return out
