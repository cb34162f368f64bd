"""Local search: slots change places or experts until the busiest GPU cannot be relieved.

Knows: tables of experts on GPUs, row by row, all rows at once; swaps of two slots, and slots that
pass from one expert's copies to another's. No move puts an expert twice on a GPU. Knows nothing of:
where a table comes from, what a move costs outside of balance. Bounded by counts of steps, never by
time, so that every machine finds the same; ties go to the lowest index.

Shape letters: B rows, G GPUs, k slots a GPU, E experts of a row, A rows still at work.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ep.planning.replicate import FloatArray, IntArray, in_order_sum

BoolArray = NDArray[np.bool_]
# Rows, GPUs, places and new experts of the slots that a step changed.
Changed = tuple[IntArray, IntArray, IntArray, IntArray]

# A move must lower what it looks at by more than the rounding of a few sums.
_LESS = 1 - 1e-9
_MANY = 1 << 40
_PHASES = 3
# Candidates of one row in one step: keeps a step's memory and time flat where k is large.
_CANDIDATES = 4096


@dataclass
class Moves:
    """What a search did: per step the rows, GPUs, places and new experts, for `replay`."""

    steps: list[Changed] = field(default_factory=list)
    busiest: list[FloatArray] = field(default_factory=list)  # [B] load, after each step

    def replay(self, table: IntArray, stop: IntArray) -> IntArray:
        """table [B, G, k] as `SlotTable.table` was before; stop [B]: steps that each row takes."""
        table = table.copy()
        for number, (rows, gpu, place, expert) in enumerate(self.steps):
            take = number < stop[rows]
            table[rows[take], gpu[take], place[take]] = expert[take]
        return table


class SlotTable:
    """Experts on GPUs and the loads that follow. weights [B, E] >= 0; table [B, G, k] (-1: empty),
    no expert twice on a GPU, every expert somewhere. The caller's arrays stay as they are.

    Empty slots hold one expert more, E, of no weight, which any GPU may have any number of times
    (`empty`: whether there is one).
    """

    def __init__(self, weights: FloatArray, table: IntArray) -> None:
        rows, gpus, _ = table.shape
        self.empty = bool((table < 0).any())
        if self.empty:
            weights = np.concatenate([weights, np.zeros((rows, 1))], axis=1)
        experts = weights.shape[1]
        self.weights = weights
        self.table = np.where(table < 0, experts - 1, table)
        row = np.arange(rows)
        self.hosts = np.zeros((rows, gpus, experts), dtype=bool)
        self.hosts[row[:, None, None], np.arange(gpus)[:, None], self.table] = True
        flat = (self.table.reshape(rows, -1) + row[:, None] * experts).ravel()
        self.counts = np.bincount(flat, minlength=rows * experts).reshape(rows, experts)
        if self.empty:
            self.hosts[:, :, -1] = False
            self.counts[:, -1] = _MANY
        self.share = weights / self.counts
        self.mean = in_order_sum(weights) / gpus
        self.load = np.empty((rows, gpus))
        self.sum_again(row)

    def sum_again(self, rows: IntArray) -> None:
        """Loads of some rows from their slots: after a count changed, and against drift."""
        share = self.share[rows[:, None, None], self.table[rows]]
        load = share[:, :, 0].copy()
        for place in range(1, share.shape[2]):
            load += share[:, :, place]
        self.load[rows] = load

    def experts(self) -> IntArray:
        """[B, G, k]: the table, -1 where a slot is empty."""
        if not self.empty:
            return self.table
        return np.where(self.table == self.weights.shape[1] - 1, -1, self.table)

    def balance(self) -> FloatArray:
        """[B]: busiest GPU / mean GPU; 1 for a row without load."""
        self.sum_again(np.arange(len(self.load)))
        out = np.ones(len(self.load))
        np.divide(self.load.max(axis=1), self.mean, out=out, where=self.mean > 0)
        return out

    def swap(
        self, rows: IntArray, a: IntArray, i: IntArray, b: IntArray, j: IntArray
    ) -> tuple[IntArray, IntArray]:
        """Place i of GPU a and place j of GPU b change experts; -> the new expert of each."""
        from_a, from_b = self.table[rows, a, i], self.table[rows, b, j]
        less = self.share[rows, from_a] - self.share[rows, from_b]
        self.table[rows, a, i], self.table[rows, b, j] = from_b, from_a
        self.load[rows, a] -= less
        self.load[rows, b] += less
        self.hosts[rows, a, from_a] = self.hosts[rows, b, from_b] = False
        self.hosts[rows, a, from_b] = self.hosts[rows, b, from_a] = True
        if self.empty:
            self.hosts[rows, a, -1] = self.hosts[rows, b, -1] = False
        return from_b, from_a

    def put(self, rows: IntArray, gpu: IntArray, place: IntArray, expert: IntArray) -> None:
        """A slot passes to another expert, so that both experts' loads are split anew."""
        before = self.table[rows, gpu, place]
        self.table[rows, gpu, place] = expert
        self.hosts[rows, gpu, before] = False
        self.hosts[rows, gpu, expert] = True
        if self.empty:
            self.hosts[rows, gpu, -1] = False
        for which, step in ((before, -1), (expert, 1)):
            self.counts[rows, which] += step
            self.share[rows, which] = self.weights[rows, which] / self.counts[rows, which]
        self.sum_again(rows)


@dataclass
class Work:
    """Candidates that a search may still look at: a limit in counts, never in seconds."""

    left: int

    def spend(self, candidates: int) -> bool:
        """False once nothing is left."""
        self.left -= candidates
        return self.left >= 0


def even_pairs(slots: SlotTable, rounds: int, target: FloatArray, work: Work) -> None:
    """Busy GPUs swap one slot each with idle ones, all pairs at once. Coarse, and quick.

    target [B]: rows whose busiest GPU is at or below it (a load) are left alone.
    """
    gpus, room = slots.table.shape[1:]
    half = gpus // 2
    active = np.flatnonzero(slots.load.max(axis=1) > target)
    for number in range(rounds):
        if not len(active) or not half:
            return
        # Sorting and gathering weigh more than the pairs of slots where those are few.
        if not work.spend(len(active) * gpus * room * (room + 6)):
            return
        rows = active[:, None]
        load = slots.load[active]
        order = np.argsort(load, axis=1, kind="stable")
        idle, busy = order[:, :half], order[:, ::-1][:, :half]
        if number % 3:  # other partners than the plain mirror image, which may have nothing to give
            idle = np.roll(idle, number * 7 % half if number % 3 == 1 else number, axis=1)
        gap = np.take_along_axis(load, busy, axis=1) - np.take_along_axis(load, idle, axis=1)
        of_busy, of_idle = slots.table[rows, busy], slots.table[rows, idle]
        third = rows[:, :, None]
        give = slots.share[third, of_busy]
        take = slots.share[third, of_idle]
        give = np.where(slots.hosts[third, idle[:, :, None], of_busy], np.inf, give)
        take = np.where(slots.hosts[third, busy[:, :, None], of_idle], -np.inf, take)
        less = give[:, :, :, None] - take[:, :, None, :]
        miss = np.abs(less - (gap / 2)[:, :, None, None]).reshape(*gap.shape, room * room)
        best = miss.argmin(axis=2)
        found = np.take_along_axis(miss, best[:, :, None], axis=2)[:, :, 0]
        row, pair = np.nonzero(found < gap / 2 * _LESS)
        chosen = best[row, pair]
        slots.swap(active[row], busy[row, pair], chosen // room, idle[row, pair], chosen % room)
        active = active[slots.load[active].max(axis=1) > target[active]]
        if not len(row) and number >= 3:
            return


def relieve_busiest(
    slots: SlotTable, steps: int, target: FloatArray, work: Work, moves: Moves | None = None
) -> None:
    """Step by step the busiest GPU of each row: the swap that lowers it most, until none does;
    then slots that pass from one expert to another, until none does; and again. A row ends at its
    target (a load). Passing many before swapping again finds more than taking turns: copies that
    are alike are all busiest, and each pass relieves but some."""
    gpus, room = slots.table.shape[1:]
    swaps = room * room * min(gpus, _partners(room))
    passes = room * (gpus * room + slots.weights.shape[1])
    for _ in range(_PHASES):
        changed = False
        for move, candidates in ((_swap_busiest, swaps), (_pass_a_slot, passes)):
            active = np.arange(len(slots.load))
            for _ in range(steps):
                active = active[slots.load[active].max(axis=1) > target[active]]
                if not len(active) or not work.spend(len(active) * candidates):
                    break
                done, change = move(slots, active)
                active = active[done]
                if moves is not None and len(active):
                    moves.steps.append(change)
                    moves.busiest.append(slots.load.max(axis=1))
                changed = changed or len(active) > 0
        if not changed:
            break


def _partners(room: int) -> int:
    """How many of the idlest GPUs a swap looks at: fewer where a GPU has many slots."""
    return max(8, _CANDIDATES // (room * room))


def _swap_busiest(slots: SlotTable, active: IntArray) -> tuple[BoolArray, Changed]:
    gpus, room = slots.table.shape[1:]
    at = np.arange(len(active))
    load = slots.load[active]
    busy = load.argmax(axis=1)
    peak = load[at, busy]
    partners = _partners(room)
    if partners < gpus:
        other = np.argsort(load, axis=1, kind="stable")[:, :partners]
    else:
        other = np.broadcast_to(np.arange(gpus), load.shape)
    rows = active[:, None]
    mine = slots.table[active, busy]  # [A, k]
    theirs = slots.table[rows, other].reshape(len(active), -1)  # [A, g * k]
    give = slots.share[rows, mine]
    take = slots.share[rows, theirs]
    take = np.where(slots.hosts[rows, busy[:, None], theirs], np.inf, take)
    rest = np.take_along_axis(load, other, axis=1)
    there = slots.hosts[rows[:, :, None], other[:, None, :], mine[:, :, None]]  # [A, k, g]
    rest = np.where(there, np.inf, rest[:, None, :])
    less = give[:, :, None] - take[:, None, :]
    less = less.reshape(len(active), room, -1, room)
    # Where a swap is forbidden one side is infinite, or NaN (inf - inf), which counts as infinite.
    forbidden = np.isinf(less) | np.isinf(rest)[:, :, :, None]
    less[forbidden] = 0
    after = np.maximum(peak[:, None, None, None] - less, rest[:, :, :, None] + less)
    after[forbidden] = np.inf
    flat = after.reshape(len(active), -1)
    best = flat.argmin(axis=1)
    ok = flat[at, best] < peak * _LESS
    best, rows1, busy = best[ok], active[ok], busy[ok]
    i, partner, j = np.unravel_index(best, after.shape[1:])
    gpu = other[ok, partner]
    here, away = slots.swap(rows1, busy, i, gpu, j)
    changed = (
        np.concatenate([rows1, rows1]),
        np.concatenate([busy, gpu]),
        np.concatenate([i, j]),
        np.concatenate([here, away]),
    )
    return ok, changed


def _pass_a_slot(slots: SlotTable, active: IntArray) -> tuple[BoolArray, Changed]:
    """One slot of each row passes to another expert: either some slot takes a copy more of an
    expert of the busiest GPU, or a slot of the busiest GPU takes a copy of an expert not there.

    The other hosts of the expert that loses a copy take over its part: the busiest of them counts,
    which is the expert's busiest host, or its second busiest where the slot is taken from that.
    """
    gpus, room = slots.table.shape[1:]
    experts = slots.weights.shape[1]
    count = len(active)
    at = np.arange(count)
    load = slots.load[active]
    busy = load.argmax(axis=1)
    peak = load[at, busy]
    table = slots.table[active].reshape(count, gpus * room)  # [A, P]
    copies, share, weights = slots.counts[active], slots.share[active], slots.weights[active]
    of_slot = np.repeat(load, room, axis=1)
    first, second = _two_busiest_hosts(slots.table[active], load, experts)
    named = (table + at[:, None] * experts).ravel()
    grown = weights / np.maximum(copies - 1, 1) - share
    others = np.where(of_slot.ravel() < first[named], first[named], second[named])
    after_loss = others.reshape(of_slot.shape) + np.take_along_axis(grown, table, axis=1)  # [A, P]
    after_loss[np.take_along_axis(copies, table, axis=1) == 1] = np.inf
    if slots.empty:
        after_loss[table == experts - 1] = -np.inf  # nobody grows when an empty slot is filled
    with_one_more = weights / (copies + 1)
    mine = slots.table[active, busy]  # [A, k]
    mine_share = np.take_along_axis(share, mine, axis=1)
    mine_more = np.take_along_axis(with_one_more, mine, axis=1)

    # A copy more of an expert of the busiest, in place of any slot elsewhere.
    relieved = peak[:, None] - (mine_share - mine_more)
    there = of_slot - np.take_along_axis(share, table, axis=1)
    more = np.maximum(
        there[:, None, :] + mine_more[:, :, None],
        after_loss[:, None, :],
    )
    more = np.maximum(more, relieved[:, :, None])
    hosted = slots.hosts[active[:, None, None], np.arange(gpus)[:, None], mine[:, None, :]]
    more[np.repeat(hosted.transpose(0, 2, 1), room, axis=2)] = np.inf
    more = more.reshape(count, room * gpus * room)
    best_more = more.argmin(axis=1)
    peak_more = more[at, best_more]

    # A slot of the busiest passes to an expert that is not there.
    less = np.maximum(
        (peak[:, None] - mine_share)[:, :, None] + with_one_more[:, None, :],
        after_loss.reshape(count, gpus, room)[at, busy][:, :, None],
    )
    less = np.where(slots.hosts[active, busy][:, None, :], np.inf, less)
    less = less.reshape(count, room * experts)
    best_less = less.argmin(axis=1)
    peak_less = less[at, best_less]

    ok = np.minimum(peak_more, peak_less) < peak * _LESS
    inside = peak_less < peak_more
    slot = best_more % (gpus * room)
    gpu = np.where(inside, busy, slot // room)[ok]
    place = np.where(inside, best_less // experts, slot % room)[ok]
    copied = np.take_along_axis(mine, (best_more // (gpus * room))[:, None], axis=1)[:, 0]
    expert = np.where(inside, best_less % experts, copied)[ok]
    rows = active[ok]
    slots.put(rows, gpu, place, expert)
    return ok, (rows, gpu, place, expert)


def _two_busiest_hosts(
    table: IntArray, load: FloatArray, experts: int
) -> tuple[FloatArray, FloatArray]:
    """table [A, G, k], load [A, G] -> load of the busiest host of each expert, and of the busiest
    but one (as busy, where two are), [A * E]; -inf where there is none."""
    rows = np.arange(len(table))[:, None]
    order = np.argsort(load, axis=1, kind="stable")
    named = (table[rows, order] + rows[:, :, None] * experts).ravel()
    busy = np.repeat(load[rows, order].ravel(), table.shape[2])
    number = np.arange(len(named))
    first, second = np.full((2, len(table) * experts), -np.inf)
    # Of several writes to one place the last one stays: here the largest.
    last = np.empty(len(first), dtype=np.int64)
    last[named] = number
    first[named] = busy
    rest = last[named] != number
    second[named[rest]] = busy[rest]
    return first, second
