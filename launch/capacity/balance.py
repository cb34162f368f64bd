"""How evenly a layout spreads expert load, by our own planner on a trace, and where tokens then go.

Both of one placement. Knows: loads, slots, GPUs, groups of experts. Knows nothing of time, nor of
which policy for groups is worth it (`groups`). Without a trace of the operator's, a typical one
of the phase: shares of eight MoE layers of DeepSeek-V3 in decode (2,000 tokens in, 100 out) or in
prefill (4,096 in), from the counts that SGLang gave out for its wide-EP runs
(GeneratedRandomly/SGLang-reproduce at c79682c). Other numbers of experts take the sorted curve,
stretched.

Shape letters: L layers, E routed experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources

import numpy as np
from numpy.typing import NDArray

from ep.planner import PlanOptions, plan
from ep.planning.replicate import balance_bound
from launch.capacity.deployment import Deployment, Groups, Phase
from launch.capacity.picks import (
    Grid,
    Reach,
    least_free,
    least_grouped,
    picks_of,
    reach_of,
)
from models.deepseek.config import DeepSeekConfig

FloatArray = NDArray[np.float64]
_TYPICAL: dict[Phase, str] = {"decode": "share_ppm", "prefill": "prefill_ppm"}  # array by phase


@dataclass(frozen=True)
class Balance:
    """Busiest GPU over mean, of expert tokens: mean over layers and the worst layer, as our planner
    places them; unplanned: with one slot an expert, in order. source: of the loads. reach: of
    tokens, in the same placement, which was made by that policy for groups."""

    mean: float
    worst: float
    unplanned: float
    source: str
    reach: Reach
    groups: Groups

    def of(self, d: Deployment) -> Deployment:
        """d with its experts placed so."""
        return replace(d, balance=self.mean, reach=self.reach, groups=self.groups)

    def as_json(self) -> dict[str, object]:
        return {
            "mean": self.mean,
            "worst_layer": self.worst,
            "without_redundancy": self.unplanned,
            "loads": self.source,
        }

    def placement_json(self) -> dict[str, object]:
        return {
            "groups": self.groups,
            "nodes_per_token": self.reach.nodes,
            "gpus_per_token": self.reach.ranks,
        }


def balance(d: Deployment, loads: FloatArray | None = None, source: str | None = None) -> Balance:
    """By d's policy for groups. loads [L, E] tokens of each routed expert; None: the typical ones
    of the phase. source: where loads are from; None: typical."""
    source = source or f"typical: 8 layers of DeepSeek-V3, {d.phase}"
    config = d.shape.config
    if d.gpus == 1:
        return Balance(1.0, 1.0, 1.0, source, Reach(1.0, 1.0), d.groups)
    if loads is None:
        loads = typical(config.n_routed_experts, d.phase)
    pool = _Pool(config, d.gpus, d.gpu.domain, d.slots, d.hosted, d.groups)
    return _planned(loads.tobytes(), loads.shape[0], pool, source)


def hoped(d: Deployment, loads: FloatArray | None = None) -> Deployment:
    """d as no placement can make it better: `balance(...).mean` and `.reach` are never below what
    it says, whatever the policy for groups; quick, for nothing is placed."""
    if d.gpus == 1:
        return replace(d, balance=1.0, reach=Reach(1.0, 1.0))
    m = d.shape.config
    plain = typical(m.n_routed_experts, d.phase) if loads is None else loads
    table = _with_hosted(plain, d.hosted, m.num_experts_per_tok)
    slots = _whole_slots(d.slots, table, d.gpus)
    least = float(np.mean(balance_bound(table, slots, d.gpus)))
    grid = Grid(d.gpus, d.gpu.domain, slots // d.gpus)
    reach = least_free(d.picks, grid)
    if d.can_group:
        picks = picks_of(m, plain, d.hosted)
        other = least_grouped(picks, m.n_routed_experts, m.gate_spec().num_groups, grid)
        reach = Reach(min(reach.ranks, other.ranks), min(reach.nodes, other.nodes))
    return replace(d, balance=least * (1 - 1e-9), reach=reach)


@dataclass(frozen=True)
class _Pool:
    """What of a deployment decides where experts lie. domain: GPUs of a node."""

    config: DeepSeekConfig
    gpus: int
    domain: int
    slots: int
    hosted: int
    groups: Groups


@lru_cache(maxsize=512)
def _planned(loads: bytes, layers: int, pool: _Pool, source: str) -> Balance:
    config, gpus = pool.config, pool.gpus
    experts = config.n_routed_experts
    plain = np.frombuffer(loads, np.float64).reshape(layers, experts)
    table = _with_hosted(plain, pool.hosted, config.num_experts_per_tok)
    nodes = gpus // pool.domain if gpus % pool.domain == 0 else 1
    kept = pool.groups == "node"
    made = plan(
        table,
        num_gpus=gpus,
        num_slots=_whole_slots(pool.slots, table, gpus),
        num_nodes=nodes,
        num_groups=config.gate_spec().num_groups if kept else 1,
        options=PlanOptions(group_policy=pool.groups, num_ungrouped=pool.hosted),
    )
    after = made.explanation.after
    picks = picks_of(config, plain, pool.hosted)
    reach = reach_of(picks, made.placement, pool.domain)
    if not kept:
        grid = Grid(gpus, pool.domain, made.placement.num_local_experts)
        least = least_free(picks.shape[2], grid)
        reach = Reach(max(reach.ranks, least.ranks), max(reach.nodes, least.nodes))
    padded = np.pad(plain, ((0, 0), (0, -experts % gpus))).reshape(layers, gpus, -1).sum(axis=2)
    unplanned = float((padded.max(axis=1) / padded.mean(axis=1)).mean())
    return Balance(
        float(np.mean(after)), float(np.max(after)), unplanned, source, reach, pool.groups
    )


def _with_hosted(table: FloatArray, hosted: int, top_k: int) -> FloatArray:
    """With a column for each piece of a shared expert in slots, which every token picks."""
    if not hosted:
        return table
    shared = (table.sum(axis=1, keepdims=True) / top_k).repeat(hosted, axis=1)
    return np.concatenate((table, shared), axis=1)


def _whole_slots(slots: int, table: FloatArray, gpus: int) -> int:
    return -(-max(slots, table.shape[1]) // gpus) * gpus


@lru_cache(maxsize=8)
def typical(experts: int, phase: Phase = "decode") -> FloatArray:
    """[8, E] shares of a layer's tokens; not to be written to."""
    file = resources.files("launch.capacity").joinpath("typical_load.npz")
    with file.open("rb") as opened, np.load(opened) as held:
        shares = held[_TYPICAL[phase]].astype(np.float64)
    if shares.shape[1] != experts:
        curve = np.sort(shares, axis=1)
        at = (np.arange(experts) + 0.5) / experts * shares.shape[1] - 0.5
        shares = np.stack([np.interp(at, np.arange(shares.shape[1]), row) for row in curve])
    shares.flags.writeable = False
    return shares
