"""A few slots more on some layers: which layers, and what it brings.

Knows: tables at each number of slots, the gain from one number to the next. Knows nothing of:
previous placements, bytes.

Shape letters: L layers, G GPUs, k slots a GPU.
"""

from __future__ import annotations

import numpy as np

from ep.planning.fresh import Fresh, fresh_tables
from ep.planning.prices import Prices
from ep.planning.replicate import FloatArray, IntArray
from ep.planning.shapes import BoolArray, Shape

# A slot on every GPU that lowers one layer's balance by less than this is left unspent.
_LEAST_GAIN = 1e-3
# How many layers are tried with a slot more, in all and for each slot that may be spent.
_TRIED, _TRIED_PER_SLOT = 8, 3


def spend(
    loads: FloatArray,
    shape: Shape,
    base: Fresh,
    budget: int,
    group_policy: str,
    prices: Prices,
    kept: IntArray | None = None,
) -> Fresh:
    """base at shape.slots_per_gpu slots; budget: slots a GPU more over all layers. Each goes to the
    layer whose balance it lowers most, given those before it; the others' stay empty. kept [L]:
    what layers have already and keep, if the budget covers it."""
    layers = len(loads)
    levels = [base]  # the tables with 0, 1, 2 ... slots more
    if kept is None or kept.sum() > budget:
        kept = np.zeros(layers, dtype=np.int64)
    most = max(shape.num_experts - shape.slots_per_gpu, 0)  # then a GPU hosts everything
    while True:
        top = len(levels) - 1
        extra = _greedy([level.balance for level in levels], np.minimum(kept, top), budget)
        # A layer that took all there is to take may want the next slot too.
        if top >= most or (top and not (extra == top).any()):
            break
        wanted = _may_gain(levels[-1].balance, extra == top, kept > top, budget)
        levels.append(_next_level(loads, shape, levels[-1], wanted, group_policy, prices))
    width = shape.slots_per_gpu + int(extra.max())
    table = np.full((layers, shape.num_gpus, width), -1, dtype=np.int64)
    chosen: dict[str, list[float]] = {}
    for layer, more in enumerate(extra):
        level = levels[more]
        table[layer, :, : level.table.shape[2]] = level.table[layer]
        for name in ("balance", "bound", "floor", "grouped"):
            chosen.setdefault(name, []).append(getattr(level, name)[layer])
    notes = tuple(dict.fromkeys(note for level in levels for note in level.notes))
    left = budget - int(extra.sum())
    if left:
        notes = (
            *notes,
            f"{left} of {budget} extra slots a GPU are not spent: none would lower a layer's "
            f"balance by {_LEAST_GAIN}",
        )
    return Fresh(
        table=table,
        slots=shape.slots_per_gpu + extra,
        balance=np.array(chosen["balance"]),
        bound=np.array(chosen["bound"]),
        floor=np.array(chosen["floor"]),
        grouped=np.array(chosen["grouped"]),
        prices=base.prices,
        notes=notes,
    )


def _may_gain(balance: FloatArray, wanting: BoolArray, must: BoolArray, budget: int) -> BoolArray:
    """[L]: of the layers that want a slot more those worth trying: the least even ones, some for
    each slot that there is to spend, and those that have the slot already."""
    out = must.copy()
    order = np.argsort(np.where(wanting, -balance, np.inf), kind="stable")
    out[order[: _TRIED + _TRIED_PER_SLOT * budget]] = True
    return out & wanting


def _next_level(
    loads: FloatArray,
    shape: Shape,
    last: Fresh,
    wanted: BoolArray,
    group_policy: str,
    prices: Prices,
) -> Fresh:
    """The wanted layers with a slot more; the others as even as they were (so never chosen)."""
    at = np.flatnonzero(wanted)
    slots = last.table.shape[2] + 1
    made = fresh_tables(loads[at], shape, "ours", group_policy, prices, slots)
    table = np.full((*last.table.shape[:2], slots), -1, dtype=np.int64)
    table[at] = made.table
    out = {name: getattr(last, name).copy() for name in ("balance", "bound", "floor", "grouped")}
    for name, values in out.items():
        values[at] = getattr(made, name)
    return Fresh(table=table, slots=np.full(len(loads), slots), notes=made.notes, **out)


def _greedy(balances: list[FloatArray], kept: IntArray, budget: int) -> IntArray:
    """balances: [L] with 0, 1, 2 ... slots more -> [L] slots more, at least those kept."""
    extra = kept.copy()
    stacked = np.stack(balances)
    gains = stacked[:-1] - stacked[1:]
    for _ in range(budget - int(kept.sum())):
        open_ = extra < len(gains)
        if not open_.any():
            break
        gain = np.where(open_, 0.0, -1.0)
        gain[open_] = gains[extra[open_], open_.nonzero()[0]]
        best = int(gain.argmax())
        if gain[best] < _LEAST_GAIN:
            break
        extra[best] += 1
    return extra
