"""Who sends what where: rows a token causes, within its node and across, and their bytes.

Knows: top-k of a gate, how many nodes and ranks a token visits in a placement (`picks.Reach`).
Knows nothing of time, nor of who waits for whom where loads differ.

Shape letters: E routed experts, K top-k, R ranks, n nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from launch.capacity.picks import Reach, distinct, picks_of
from launch.capacity.shape import ModelShape
from models.deepseek.config import DeepSeekConfig


@lru_cache(maxsize=64)
def reach(config: DeepSeekConfig, num_ranks: int, num_nodes: int) -> Reach:
    """Of experts that are picked evenly (group limits obeyed) and lie in order, as in measurements
    of all-to-alls alone."""
    experts = config.n_routed_experts
    picks = picks_of(config, np.ones((1, experts)), 0)
    return Reach(distinct(picks * num_ranks // experts), distinct(picks * num_nodes // experts))


@dataclass(frozen=True)
class Traffic:
    """Bytes of one token in one MoE layer, both all-to-alls, that leave its GPU.

    within: to GPUs of the same NVLink domain; across: to others, through a NIC.
    """

    dispatch_within: float
    dispatch_across: float
    combine_within: float
    combine_across: float

    @property
    def across(self) -> float:
        return self.dispatch_across + self.combine_across

    @property
    def within(self) -> float:
        return self.dispatch_within + self.combine_within


def low_latency(
    shape: ModelShape, num_ranks: int, num_nodes: int, fp8: bool = True, hosted: int = 0
) -> Traffic:
    """A row for each pick, straight to the rank of the expert; results likewise. hosted: pieces of
    a shared expert that lie in slots: so many picks more."""
    picks = shape.config.num_experts_per_tok + hosted
    return _split(shape, picks / num_ranks, picks * (1 - 1 / num_nodes), picks, fp8)


def node_aware(
    shape: ModelShape, num_ranks: int, num_nodes: int, seen: Reach, fp8: bool = True
) -> Traffic:
    """A row once to each node that wants it, then by NVLink to its ranks; results are summed on the
    way back. seen: with the visits for a hosted shared expert (here and below)."""
    across = seen.nodes * (1 - 1 / num_nodes)
    return _split(shape, seen.ranks / num_ranks, across, seen.ranks + across, fp8)


def once_a_rank(
    shape: ModelShape, num_ranks: int, num_nodes: int, seen: Reach, fp8: bool = True
) -> Traffic:
    """A row once to each rank that wants it, whatever its node (`torch`); results likewise."""
    return _split(shape, seen.ranks / num_ranks, seen.ranks * (1 - 1 / num_nodes), seen.ranks, fp8)


def to_everybody(shape: ModelShape, num_ranks: int, num_nodes: int, fp8: bool = True) -> Traffic:
    """All rows to all ranks (`allgather`), which sum what they have for each: a node's rows pass
    each other node once, shared out over its NICs, and then go round within it."""
    here = num_ranks / num_nodes
    across = (num_ranks - here) / here
    return _split(shape, 0.0, across, num_ranks - 1 + across, fp8)


def _split(shape: ModelShape, own: float, across: float, rows: float, fp8: bool) -> Traffic:
    """own: rows that stay on the token's own GPU."""
    within = max(rows - across - own, 0.0)
    there, back = shape.dispatch_bytes(fp8), shape.combine_bytes
    return Traffic(within * there, across * there, within * back, across * back)
