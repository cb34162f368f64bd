"""Who sends what where: rows a token causes, within its node and across, and their bytes.

Knows: groups and top-k of a gate, nodes, ranks. Knows nothing of time. Experts are taken to be
chosen evenly (group limits obeyed) and to lie in order over ranks: loads that differ change who
waits for whom, hardly how much travels.

Shape letters: E routed experts, K top-k, R ranks, n nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from launch.capacity.shape import ModelShape
from models.deepseek.config import DeepSeekConfig

_TOKENS = 4096  # drawn to count how many places a token visits; fewer of very many experts
_CELLS = 1 << 22


@dataclass(frozen=True)
class Reach:
    """Mean over tokens: ranks and nodes that a token visits, its home included where it is one."""

    ranks: float
    nodes: float


@lru_cache(maxsize=64)
def reach(config: DeepSeekConfig, num_ranks: int, num_nodes: int) -> Reach:
    """By drawing tokens with a fixed seed: the same everywhere."""
    rng = np.random.default_rng(0)
    experts, top_k = config.n_routed_experts, config.num_experts_per_tok
    tokens = min(_TOKENS, _CELLS // experts)
    scores = rng.random((tokens, experts))
    if config.n_group > 1:
        kept = np.argsort(rng.random((tokens, config.n_group)), axis=1)[:, : config.topk_group]
        allowed = np.zeros((tokens, config.n_group), bool)
        np.put_along_axis(allowed, kept, True, axis=1)
        scores = np.where(allowed.repeat(experts // config.n_group, axis=1), scores, -1.0)
    picks = np.argpartition(-scores, top_k - 1, axis=1)[:, :top_k]
    return Reach(_distinct(picks * num_ranks // experts), _distinct(picks * num_nodes // experts))


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
    a shared expert that lie in slots: so many picks more (here and below)."""
    picks = shape.config.num_experts_per_tok + hosted
    return _split(shape, picks / num_ranks, picks * (1 - 1 / num_nodes), picks, fp8)


def node_aware(
    shape: ModelShape, num_ranks: int, num_nodes: int, fp8: bool = True, hosted: int = 0
) -> Traffic:
    """A row once to each node that wants it, then by NVLink to its ranks; results are summed on the
    way back."""
    seen = _seen(shape, num_ranks, num_nodes, hosted)
    across = seen.nodes * (1 - 1 / num_nodes)
    return _split(shape, seen.ranks / num_ranks, across, seen.ranks + across, fp8)


def once_a_rank(
    shape: ModelShape, num_ranks: int, num_nodes: int, fp8: bool = True, hosted: int = 0
) -> Traffic:
    """A row once to each rank that wants it, whatever its node (`torch`); results likewise."""
    seen = _seen(shape, num_ranks, num_nodes, hosted)
    return _split(shape, seen.ranks / num_ranks, seen.ranks * (1 - 1 / num_nodes), seen.ranks, fp8)


def to_everybody(shape: ModelShape, num_ranks: int, num_nodes: int, fp8: bool = True) -> Traffic:
    """All rows to all ranks (`allgather`), which sum what they have for each: a node's rows pass
    each other node once, shared out over its NICs, and then go round within it."""
    here = num_ranks / num_nodes
    across = (num_ranks - here) / here
    return _split(shape, 0.0, across, num_ranks - 1 + across, fp8)


def _seen(shape: ModelShape, num_ranks: int, num_nodes: int, hosted: int) -> Reach:
    """With picks of a hosted shared expert, whose copies lie anywhere."""
    seen = reach(shape.config, num_ranks, num_nodes)
    if not hosted:
        return seen
    missed_ranks, missed_nodes = 1 - seen.ranks / num_ranks, 1 - seen.nodes / num_nodes
    return Reach(
        min(seen.ranks + hosted * missed_ranks, num_ranks),
        min(seen.nodes + hosted * missed_nodes, num_nodes),
    )


def _split(shape: ModelShape, own: float, across: float, rows: float, fp8: bool) -> Traffic:
    """own: rows that stay on the token's own GPU."""
    within = max(rows - across - own, 0.0)
    there, back = shape.dispatch_bytes(fp8), shape.combine_bytes
    return Traffic(within * there, across * there, within * back, across * back)


def _distinct(places: np.ndarray) -> float:
    """places [tokens, K] -> mean number of different values in a row."""
    ordered = np.sort(places, axis=1)
    return float(1 + (np.diff(ordered, axis=1) > 0).sum(axis=1).mean())
