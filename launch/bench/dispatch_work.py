"""What travels in a benchmark's layer: a placement, everybody's picks, this rank's tokens; and the
least bytes by which that can be done.

Knows: loads, placement, routing. Knows nothing of time or of backends.

Shape letters: T tokens, D hidden, K top-k, E logical experts, P physical slots, e local slots,
R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dispatch.base import CombineForm, WireFormat
from dispatch.route import RoutingTable, route, token_keys
from dispatch.selfcheck import CheckCase
from dispatch.wire import RowFormat
from ep.placement import ExpertPlacement
from ep.planner import plan
from ep.trace import read_trace
from launch.bench.dispatch_flags import Asked, Cell, Skew
from moeserve.errors import ConfigError

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Work:
    """One layer of all ranks. slots: [T, K] int32 physical of each rank; x [T, D], weights [T, K]
    fp32 of this one."""

    cell: Cell
    rank: int
    placement: ExpertPlacement
    slots: list[Tensor]
    x: Tensor
    weights: Tensor

    @classmethod
    def draw(cls, asked: Asked, cell: Cell, rank: int, loads: np.ndarray) -> Work:
        """The same on every rank but for x and weights. loads [E]: how often experts are picked."""
        placement = place(loads, cell.ranks, asked.redundant)
        table = RoutingTable.build(placement, 0)
        slots = []
        for home in range(cell.ranks):
            g = torch.Generator().manual_seed(_seed(asked.seed, home, 0))
            ids = draw_picks(g, cell.tokens, asked.top_k, loads)
            slots.append(route(ids, table, token_keys(cell.tokens, home)))
        g = torch.Generator().manual_seed(_seed(asked.seed, rank, 1))
        x = torch.randn(cell.tokens, cell.hidden, generator=g).to(DTYPE)
        weights = torch.rand(cell.tokens, asked.top_k, generator=g)
        return cls(cell, rank, placement, slots, x, weights)

    def small_case(self, most: int) -> CheckCase:
        """The first tokens of every rank and none of the last of several, values drawn anew: small
        enough for the twin's loops."""
        g = torch.Generator().manual_seed(_seed(0, self.cell.ranks, 2))
        rows = [min(most, self.cell.tokens)] * self.cell.ranks
        if self.cell.ranks > 1:
            rows[-1] = 0
        return CheckCase(
            [torch.randn(n, self.cell.hidden, generator=g).to(DTYPE) for n in rows],
            [picks[:n] for picks, n in zip(self.slots, rows, strict=True)],
            [torch.rand(n, self.weights.shape[1], generator=g) for n in rows],
            self.placement,
        )

    def rows(self) -> list[list[int]]:
        """[R][R]: tokens of a rank that a rank wants, each once: what has to travel."""
        return [self._count(picks, distinct=True) for picks in self.slots]

    def pairs(self) -> list[list[int]]:
        """[R][R]: picks of a rank's tokens that a rank computes."""
        return [self._count(picks, distinct=False) for picks in self.slots]

    def _count(self, slots: Tensor, distinct: bool) -> list[int]:
        owner = slots.div(self.placement.num_local_experts, rounding_mode="floor")
        here = owner[:, :, None] == torch.arange(self.cell.ranks)
        counted = here.any(1) if distinct else here
        counts: list[int] = counted.reshape(-1, self.cell.ranks).sum(0).tolist()
        return counts

    @property
    def busiest(self) -> float:
        """Picks of the busiest rank / of the mean one: what the layer waits for."""
        picks = np.array(self.pairs()).sum(axis=0)
        return float(picks.max() / picks.mean())


@dataclass(frozen=True)
class LeastBytes:
    """[R][R]: what must go from a rank to a rank, by the way results come home; nothing for what
    stays. there: each token once for each rank that wants it, hidden + scales + ids + weights.
    back: as `form` says, in the model dtype."""

    there: list[list[int]]
    back: list[list[int]]

    @classmethod
    def of(cls, work: Work, wire: WireFormat, form: CombineForm) -> LeastBytes:
        top_k = work.weights.shape[1]
        local = work.placement.num_local_experts
        row = RowFormat.choose(work.cell.hidden, top_k, DTYPE, local, wire).least_bytes
        rows = _without_own(work.rows())
        results = rows if form is CombineForm.SUMMED else _without_own(work.pairs())
        result = work.cell.hidden * DTYPE.itemsize
        return cls(
            [[count * row for count in to] for to in rows],
            # What a rank was sent it sends back.
            [[to[rank] * result for to in results] for rank in range(work.cell.ranks)],
        )


def read_loads(skew: Skew, experts: int, seed: int) -> tuple[np.ndarray, str]:
    """[E] > 0, and in words what they are. ConfigError for a trace of other experts, TraceError for
    one that is none."""
    if skew.trace is None:
        loads = np.arange(1, experts + 1) ** -skew.exponent
        # Hot experts lie anywhere, not all on the first rank.
        return np.random.default_rng(seed).permutation(loads), skew.describe()
    trace = read_trace(skew.trace, skew.array)
    totals = trace.totals
    if totals.shape[1] != experts:
        raise ConfigError(
            [f"--experts {experts}: {skew.trace} has {totals.shape[1]} experts a layer"]
        )
    peaks = totals.max(axis=1) / totals.mean(axis=1).clip(min=1e-9)
    layer = int(np.argsort(peaks, kind="stable")[len(peaks) // 2])
    told = f"trace {skew.trace.name}, layer {trace.layers[layer]} (its hottest expert is the median"
    # An expert that never was picked may be, about never: a token needs K of them.
    return totals[layer] + totals[layer].max() * 1e-9, f"{told} of the layers')"


def place(loads: np.ndarray, ranks: int, redundant: int) -> ExpertPlacement:
    """In order without copies; with copies as the planner places them by the loads."""
    if not redundant:
        return ExpertPlacement.trivial(1, len(loads), ranks)
    slots = -(-(len(loads) + redundant) // ranks)
    return plan(loads[None], num_gpus=ranks, num_slots_per_gpu=slots).placement


def draw_picks(g: torch.Generator, tokens: int, top_k: int, loads: np.ndarray) -> Tensor:
    """[T, K] int32 logical experts, no expert twice in a token."""
    shares = torch.from_numpy(loads / loads.sum()).to(torch.float32).clamp(min=1e-12)
    if not tokens:
        return torch.empty(0, top_k, dtype=torch.int32)
    return torch.multinomial(shares.expand(tokens, -1), top_k, generator=g).to(torch.int32)


def _without_own(counts: list[list[int]]) -> list[list[int]]:
    return [[0 if i == j else n for j, n in enumerate(row)] for i, row in enumerate(counts)]


def _seed(seed: int, rank: int, what: int) -> int:
    return (seed * 1_000_003 + rank) * 4 + what
