"""Packing: items of a row into packs with equally many items each, heaviest first.

Knows: weights of items, packs. Knows nothing of: experts, copies, what a pack is.

Shape letters: B rows, N items of a row, G packs, k items a pack (N = G * k).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
Floats = NDArray[np.floating[Any]]


def pack_heaviest_first(weights: Floats, num_packs: int) -> tuple[IntArray, IntArray]:
    """weights [B, N] -> (pack [B, N], place [B, N]): each item in turn, heaviest first, goes to the
    lightest pack that still has room; ties by lowest item, lowest pack. place: the how-manieth of
    its pack. One item a pack: item i is pack i. Sums are made in weights' dtype.
    """
    rows, items = weights.shape
    room = items // num_packs
    if room == 1:
        return np.tile(np.arange(items), (rows, 1)), np.zeros((rows, items), dtype=np.int64)
    order = np.argsort(-weights, axis=1, kind="stable")
    sorted_weights = np.take_along_axis(weights, order, axis=1)
    pack = np.empty((rows, items), dtype=np.int64)
    place = np.empty((rows, items), dtype=np.int64)
    load = np.zeros((rows, num_packs), dtype=weights.dtype)
    held = np.zeros((rows, num_packs), dtype=np.int64)
    start = 0
    # Until a pack has an item of no weight, the first ones go to empty packs in order.
    if (sorted_weights[:, num_packs - 1] > 0).all():
        pack[:, :num_packs] = np.arange(num_packs)
        place[:, :num_packs] = 0
        load[:] = sorted_weights[:, :num_packs]
        held.fill(1)
        start = num_packs
    if start and room == 2:
        # Each pack has room for one more: they are taken from the lightest on, with no step apart.
        pack[:, num_packs:] = np.argsort(load, axis=1, kind="stable")
        place[:, num_packs:] = 1
    else:
        _fill(sorted_weights, start, room, load, held, pack, place)
    back_pack, back_place = np.empty_like(pack), np.empty_like(place)
    np.put_along_axis(back_pack, order, pack, axis=1)
    np.put_along_axis(back_place, order, place, axis=1)
    return back_pack, back_place


def _fill(
    sorted_weights: Floats,
    start: int,
    room: int,
    load: Floats,
    held: IntArray,
    pack: IntArray,
    place: IntArray,
) -> None:
    rows, packs = load.shape
    flat_load, flat_held = load.ravel(), held.ravel()
    base = np.arange(rows) * packs
    for item in range(start, sorted_weights.shape[1]):
        lightest = load.argmin(axis=1)
        pack[:, item] = lightest
        at = base + lightest
        count = flat_held[at]
        place[:, item] = count
        flat_held[at] = count + 1
        heavier = flat_load[at] + sorted_weights[:, item]
        heavier[count + 1 == room] = np.inf
        flat_load[at] = heavier
