"""LoadWindow: tokens per logical expert over the last steps, by phase, and how even that is.

Knows: counts, steps, layers, phases. Counts only what it is given: padding, warm-up and dummy
tokens never reach it (`moeserve.recorder` gives it real tokens only, on logical experts). Knows
nothing of: devices, process groups; what is summed over ranks is summed by the caller.

Shape letters: S steps, B buckets of steps, L layers, E logical experts, G ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ep.placement import ExpertPlacement

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

# The index of a phase wherever counts have an axis of them. A token counts as decode if it is the
# last of its sequence and no part of the prompt; whatever else is computed is prefill.
PHASES = ("prefill", "decode")
PREFILL, DECODE = 0, 1

WINDOW_BYTES = 16 << 20


def phase_index(phase: str) -> int:
    """0 or 1; ValueError names the valid ones."""
    if phase not in PHASES:
        raise ValueError(f"phase={phase!r}: valid are {', '.join(PHASES)}")
    return PHASES.index(phase)


class LoadWindow:
    """The last num_steps steps in which any rank of the job had tokens (others are not given).

    Holds at most max_bytes (int32 [B, 2, L, E], but one bucket at least): where num_steps of them
    are more, B buckets of `bucket_steps` steps each are kept, and what the window covers differs
    from num_steps by less than a bucket. 58 layers of 256 experts are 119 kB a bucket: 256 steps
    are 128 buckets of 2, 15 MB. Ranks that are given the same steps have the same buckets, so
    theirs can be summed.
    """

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        num_steps: int,
        *,
        max_bytes: int = WINDOW_BYTES,
    ) -> None:
        for name, value in (
            ("num_layers", num_layers),
            ("num_experts", num_experts),
            ("num_steps", num_steps),
            ("max_bytes", max_bytes),
        ):
            if value < 1:
                raise ValueError(f"LoadWindow: {name}={value}: must be at least 1")
        self.num_layers, self.num_experts, self.num_steps = num_layers, num_experts, num_steps
        shape = (len(PHASES), num_layers, num_experts)
        most = max(1, max_bytes // (4 * len(PHASES) * num_layers * num_experts))
        self.bucket_steps = -(-num_steps // most)
        self.num_buckets = -(-num_steps // self.bucket_steps)
        # int32 halves the ring; a bucket has far fewer than 2^31 tokens.
        self._ring = np.zeros((self.num_buckets, *shape), dtype=np.int32)
        self._total: IntArray = np.zeros(shape, dtype=np.int64)
        self._forget()

    def _forget(self) -> None:
        self._filled = [0] * self.num_buckets  # steps in each bucket
        self._first = [0] * self.num_buckets  # number of its first step
        self._current = 0
        self._last_step: int | None = None

    def add(self, counts: ArrayLike, step: int) -> None:
        """counts [2, L, E] of one step by phase: tokens that chose each logical expert. step: its
        number in lockstep, larger than the last one's."""
        counts = np.asarray(counts)
        if counts.shape != self._total.shape:
            raise ValueError(
                f"LoadWindow: counts {counts.shape}: must be {self._total.shape} "
                "[phases, layers, experts]"
            )
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(f"LoadWindow: step={step}: must be above {self._last_step}, the last")
        now = self._current
        if self._filled[now] == self.bucket_steps:
            now = self._current = (now + 1) % self.num_buckets
            if self._filled[now]:
                self._total -= self._ring[now]
                self._ring[now] = 0
                self._filled[now] = 0
        if not self._filled[now]:
            self._first[now] = step
        self._ring[now] += counts.astype(np.int32, copy=False)
        self._total += counts
        self._filled[now] += 1
        self._last_step = step

    def reset(self) -> None:
        """Forget everything: when a workload is known to have changed."""
        self._ring.fill(0)
        self._total.fill(0)
        self._forget()

    @property
    def steps(self) -> int:
        """Steps that the totals cover."""
        return sum(self._filled)

    @property
    def step_range(self) -> tuple[int, int] | None:
        """Numbers of the first and the last step covered; None while there is none."""
        if self._last_step is None:
            return None
        return self._first[self._order()[0]], self._last_step

    @property
    def nbytes(self) -> int:
        """Bytes held, whatever has been added."""
        return self._ring.nbytes + self._total.nbytes

    def totals(self, phase: str | None = None) -> IntArray:
        """[L, E] int64, of one phase or both: a copy, so that it can be sent or summed while the
        window goes on."""
        if phase is None:
            both: IntArray = self._total.sum(axis=0)
            return both
        return self._total[phase_index(phase)].copy()

    def totals_by_phase(self) -> IntArray:
        """[2, L, E] int64, a copy."""
        return self._total.copy()

    def history(self, phase: str | None = None) -> NDArray[np.int32]:
        """[B, L, E] int32, oldest first: the buckets that have steps (the last may not be full).
        What robust planning looks at. A copy."""
        ring = self._ring[self._order()]
        if phase is None:
            both: NDArray[np.int32] = ring.sum(axis=1, dtype=np.int32)
            return both
        return ring[:, phase_index(phase)].copy()

    def _order(self) -> list[int]:
        """Indices of the buckets that have steps, oldest first."""
        after = self._current + 1
        ring = [*range(after, self.num_buckets), *range(after)]
        return [i for i in ring if self._filled[i]]


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
