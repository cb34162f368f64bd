"""Which experts tokens pick, drawn by loads and group limits; which GPUs and nodes they then visit.

Knows: shares of experts, a gate's groups, replica choice as `dispatch.route` makes it, placements.
Knows nothing of bytes or time. A fixed seed: the same everywhere. Noise on the logarithm of a share
makes the scores; groups and experts are chosen by these as the model's gate does; each group is
then weighted until it is picked as often as its share says. That experts are picked together more
often than that makes them is not known here.

Shape letters: L layers, T tokens, E routed experts, K picks, G groups, P slots.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ep.placement import ExpertPlacement
from models.deepseek.config import DeepSeekConfig
from models.deepseek.kernels.base import GateSpec

IntArray = NDArray[np.int64]
_TOKENS = 6144  # over all layers; means of places visited are then known to about 0.01
_CHANCE = 0.9  # of the reach of experts that lie by chance: the least of a placement without groups
_CELLS = 1 << 22  # scores at most: fewer tokens of very many experts
_ROUNDS = 4  # of weighing groups; what is left is within the noise of the draw


@dataclass(frozen=True)
class Reach:
    """Mean over tokens: GPUs and nodes (NVLink domains) that a token visits, its home included
    where it is one."""

    ranks: float
    nodes: float


@dataclass(frozen=True)
class Grid:
    """GPUs, those of a node (the last one may have fewer), slots of each."""

    gpus: int
    gpus_of_a_node: int
    slots_of_a_gpu: int

    def scattered(self, picks: int) -> Reach:
        """Of so many different experts, were they in slots by chance."""
        whole, left = divmod(self.gpus, self.gpus_of_a_node)
        nodes = whole * self._visited(picks, self.gpus_of_a_node) + self._visited(picks, left)
        return Reach(self.gpus * self._visited(picks, 1), nodes)

    def _visited(self, picks: int, gpus: int) -> float:
        """How likely a token has business on so many GPUs."""
        slots, here = self.gpus * self.slots_of_a_gpu, gpus * self.slots_of_a_gpu
        return 1 - math.prod((slots - here - i) / (slots - i) for i in range(picks))


def least_free(picks: int, grid: Grid) -> Reach:
    """What is taken for the reach of a placement that ignores groups where a draw says less: it
    spreads what is picked often, and knows nothing of what is picked together."""
    chance = grid.scattered(picks)
    return Reach(max(1.0, _CHANCE * chance.ranks), max(1.0, _CHANCE * chance.nodes))


def least_grouped(picks: IntArray, experts: int, num_groups: int, grid: Grid) -> Reach:
    """What no placement with groups on nodes goes below: a token visits as many nodes as its groups
    need, and a GPU serves as many picks as it has slots."""
    a_node = num_groups * grid.gpus_of_a_node // grid.gpus
    routed = picks[picks < experts].reshape(*picks.shape[:2], -1)
    seen = np.sort(routed * num_groups // experts, axis=2)
    groups = 1 + (np.diff(seen, axis=2) > 0).sum(axis=2)
    ranks = -(-picks.shape[2] // grid.slots_of_a_gpu)
    return Reach(float(ranks), float(np.ceil(groups / a_node).mean()))


def reach_of(picks: IntArray, placement: ExpertPlacement, gpus_of_a_node: int) -> Reach:
    """picks [L, T, K] logical experts. Token q goes to replica (q + x) % count of expert x."""
    layer = np.arange(len(picks))[:, None, None]
    count = placement.replica_count[layer, picks]
    replica = (np.arange(picks.shape[1])[:, None] + picks) % count
    slots = placement.logical_to_physical[layer, picks, replica]
    ranks = slots // placement.num_local_experts
    return Reach(distinct(ranks), distinct(ranks // gpus_of_a_node))


def picks_of(config: DeepSeekConfig, loads: NDArray[np.float64], hosted: int) -> IntArray:
    """loads [L, E] -> [L, T, K + hosted]: the pieces of a hosted shared expert are picked last, by
    every token."""
    found = _drawn(loads.tobytes(), loads.shape, config.gate_spec())
    if not hosted:
        return found
    pieces = np.arange(loads.shape[1], loads.shape[1] + hosted)
    shape = (*found.shape[:2], hosted)
    return np.concatenate((found, np.broadcast_to(pieces, shape)), axis=2)


@lru_cache(maxsize=16)
def _drawn(loads: bytes, shape: tuple[int, ...], gate: GateSpec) -> IntArray:
    layers, experts = shape
    share = np.frombuffer(loads, np.float64).reshape(shape)
    share = share / share.sum(axis=1, keepdims=True)
    tokens = max(min(_TOKENS, _CELLS // experts) // layers, 16)
    noise = np.random.default_rng(0).gumbel(size=(layers, tokens, experts)).astype(np.float32)
    scores = noise + np.log(np.maximum(share, 1e-12))[:, None].astype(np.float32)
    if gate.num_groups <= 1:
        return _best(scores, gate.top_k)
    wanted = share.reshape(layers, gate.num_groups, -1).sum(axis=2)
    each = experts // gate.num_groups
    for _ in range(_ROUNDS):
        group = _limited(scores, gate) // each + gate.num_groups * np.arange(layers)[:, None, None]
        seen = np.bincount(group.ravel(), minlength=wanted.size).reshape(wanted.shape)
        ratio = wanted * tokens * gate.top_k / np.maximum(seen, 1)
        step = np.log(np.clip(ratio, 0.25, 4.0)).astype(np.float32)
        scores = scores + step.repeat(each, axis=1)[:, None]
    return _limited(scores, gate)


def _limited(scores: NDArray[np.float32], gate: GateSpec) -> IntArray:
    """Of the best groups only: a group counts by its best expert, or its best two."""
    grouped = scores.reshape(*scores.shape[:2], gate.num_groups, -1)
    best = min(2 if gate.group_score == "top2" else 1, grouped.shape[3])
    of_group = np.partition(grouped, -best, axis=3)[..., -best:].sum(axis=3)
    left = np.argsort(of_group, axis=2)[..., : gate.num_groups - gate.topk_groups]
    masked = grouped.copy()
    np.put_along_axis(masked, left[..., None], np.float32(-np.inf), axis=2)
    return _best(masked.reshape(scores.shape), gate.top_k)


def _best(scores: NDArray[np.float32], top_k: int) -> IntArray:
    if top_k >= scores.shape[2]:
        return np.broadcast_to(np.arange(scores.shape[2]), scores.shape).astype(np.int64)
    return np.argpartition(scores, -top_k, axis=2)[..., -top_k:].astype(np.int64)


def distinct(places: IntArray) -> float:
    """places [L, T, K] -> mean number of different values in a row."""
    ordered = np.sort(places, axis=2)
    return float(1 + (np.diff(ordered, axis=2) > 0).sum(axis=2).mean())
