"""How evenly a layout spreads expert load, by our own planner on a trace.

Knows: loads, slots, GPUs. Knows nothing of time. Without a trace of the operator's, a typical one
of the phase: shares of eight MoE layers of DeepSeek-V3 in decode (2,000 tokens in, 100 out) or in
prefill (4,096 in), from the counts that SGLang gave out for its wide-EP runs
(GeneratedRandomly/SGLang-reproduce at c79682c). Other numbers of experts take the sorted curve,
stretched.

Shape letters: L layers, E routed experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

import numpy as np
from numpy.typing import NDArray

from ep.planner import PlanOptions, plan
from ep.planning.replicate import balance_bound
from launch.capacity.deployment import Deployment, Phase

FloatArray = NDArray[np.float64]
_TYPICAL: dict[Phase, str] = {"decode": "share_ppm", "prefill": "prefill_ppm"}  # array by phase


@dataclass(frozen=True)
class Balance:
    """Busiest GPU over mean, of expert tokens: mean over layers and the worst layer, as our planner
    places them; unplanned: with one slot an expert, in order. source: of the loads."""

    mean: float
    worst: float
    unplanned: float
    source: str

    def as_json(self) -> dict[str, object]:
        return {
            "mean": self.mean,
            "worst_layer": self.worst,
            "without_redundancy": self.unplanned,
            "loads": self.source,
        }


def balance(d: Deployment, loads: FloatArray | None = None, source: str | None = None) -> Balance:
    """loads [L, E] tokens of each routed expert; None: the typical ones of the phase. source: where
    loads are from; None: typical."""
    source = source or f"typical: 8 layers of DeepSeek-V3, {d.phase}"
    experts, top_k = d.shape.config.n_routed_experts, d.shape.config.num_experts_per_tok
    if loads is None:
        loads = typical(experts, d.phase)
    if d.gpus == 1:
        return Balance(1.0, 1.0, 1.0, source)
    return _planned(
        loads.tobytes(), loads.shape[0], experts, d.gpus, d.slots, d.hosted, top_k, source
    )


def least_balance(d: Deployment, loads: FloatArray | None = None) -> float:
    """What no placement's `balance(...).mean` can be below; quick, for nothing is placed."""
    if d.gpus == 1:
        return 1.0
    m = d.shape.config
    table = typical(m.n_routed_experts, d.phase) if loads is None else loads
    table = _with_hosted(table, d.hosted, m.num_experts_per_tok)
    return float(np.mean(balance_bound(table, _whole_slots(d.slots, table, d.gpus), d.gpus)))


@lru_cache(maxsize=512)
def _planned(
    loads: bytes,
    layers: int,
    experts: int,
    gpus: int,
    slots: int,
    hosted: int,
    top_k: int,
    source: str,
) -> Balance:
    table = np.frombuffer(loads, np.float64).reshape(layers, experts)
    table = _with_hosted(table, hosted, top_k)
    slots = _whole_slots(slots, table, gpus)
    options = PlanOptions(num_ungrouped=hosted)
    after = plan(table, num_gpus=gpus, num_slots=slots, options=options).explanation.after
    plain = table[:, :experts]
    padded = np.pad(plain, ((0, 0), (0, -experts % gpus))).reshape(layers, gpus, -1).sum(axis=2)
    unplanned = float((padded.max(axis=1) / padded.mean(axis=1)).mean())
    return Balance(float(np.mean(after)), float(np.max(after)), unplanned, source)


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
