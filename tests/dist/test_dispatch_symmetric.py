"""torch's symmetric memory, emulated, over real gloo processes: the two operators against plain
loops, the rules that they do not check, and the `nvshmem` adapter on top, to the byte.

Run as a script this file is the ranks (gloo_ranks.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_ranks import fork_ranks, run_ranks
from torch import Tensor

from dispatch.base import CombineForm, DispatchConfig, DispatchError, Layout, WireFormat
from dispatch.emulation.symmetric import SymmetricMemory
from dispatch.fp8 import dequantise, quantise
from dispatch.nvshmem import EmulatedSymmetricDispatcher
from dispatch.nvshmem_sizes import row_of, rows_out
from dispatch.selfcheck import expected, expert_output, make_case, random_placement
from ep.group import EPGroup

RANKS, LOCAL, WIDTH = 3, 2, 4


@pytest.mark.dist
def test_operators_rules_and_adapter(tmp_path: Path) -> None:
    for rank, report in enumerate(run_ranks(__file__, RANKS, tmp_path, timeout=120)):
        assert report == {name: [] for name in CHECKS}, (rank, report)


# -- as a script: the ranks ----------------------------------------------------------------------


class Memory:
    """Symmetric tensors of a rank: input, out, and the splits of both operators."""

    def __init__(self, group: EPGroup, rows: int = 40) -> None:
        self.library = SymmetricMemory()
        self.name = group.device_group.group_name  # type: ignore[union-attr]
        splits = RANKS * LOCAL
        self.input, self.out = (self._new(group, rows, WIDTH) for _ in range(2))
        self.sent = self._new(group, splits, dtype=torch.int64)
        self.got, self.back = (self._new(group, 2, splits, dtype=torch.int64) for _ in range(2))

    def _new(self, group: EPGroup, *size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        tensor = self.library.empty(*size, dtype=dtype, device="cpu")
        self.library.rendezvous(tensor, group.device_group)
        return tensor

    def dispatch(self, align: int | None = None) -> None:
        self.library.all_to_all_vdev_2d(
            self.input, self.out, self.sent, self.got, self.name, major_align=align
        )

    def combine(self) -> None:
        self.library.all_to_all_vdev_2d_offset(self.out, self.input, self.got, self.back, self.name)


def splits_of(rank: int, seed: int) -> Tensor:
    """[R, e] rows of a rank for each slot; slot 1 of rank 2 gets none from anybody."""
    g = torch.Generator().manual_seed(31 * seed + rank)
    splits = torch.randint(0, 4, (RANKS, LOCAL), generator=g)
    splits[2, 1] = 0
    return splits


def tag(source: int, slot: int, number: int) -> list[float]:
    return [float(source), float(slot), float(number), 0.5]


def operators(group: EPGroup) -> list[str]:
    """There and back, against loops."""
    memory, found, me = Memory(group), [], group.rank
    for seed, align in enumerate((None, 1, 4, 8)):
        mine = splits_of(me, seed)
        rows = [
            tag(me, slot, i) for slot, n in enumerate(mine.reshape(-1).tolist()) for i in range(n)
        ]
        memory.input[: len(rows)] = torch.tensor(rows).reshape(-1, WIDTH)
        memory.sent.copy_(mine.reshape(-1))
        memory.dispatch(align)
        step, at, used = align or 1, 0, torch.zeros(len(memory.out), dtype=torch.bool)
        for local in range(LOCAL):
            first = at
            for source in range(RANKS):
                n = int(splits_of(source, seed)[me, local])
                number = local * RANKS + source
                if memory.got[:, number].tolist() != [n, at]:
                    found.append(f"align {align}: splits {memory.got[:, number].tolist()}")
                want = torch.tensor([tag(source, me * LOCAL + local, i) for i in range(n)])
                if not torch.equal(memory.out[at : at + n].float(), want.reshape(-1, WIDTH)):
                    found.append(f"align {align}: rows of slot {local} from {source}")
                used[at : at + n] = True
                at += n
            at = first + max(-(-(at - first) // step) * step, step)
        if not bool(memory.out[~used].isnan().all()):
            found.append(f"align {align}: padding is not poisoned")
        memory.combine()
        if not torch.equal(memory.input[: len(rows)].float(), torch.tensor(rows)):
            found.append(f"align {align}: rows did not come home in the order they left in")
        if memory.back[0].tolist() != mine.reshape(-1).tolist():
            found.append(f"align {align}: splits that came home")
    return found


def rules(group: EPGroup) -> list[str]:
    """Calls that all ranks make wrongly alike: refused before anything is sent."""
    memory, found = Memory(group, rows=6), []
    library, name = memory.library, memory.name
    wide = memory._new(group, 6, 2 * WIDTH)
    five = memory._new(group, 5, dtype=torch.int64)
    many = memory._new(group, RANKS * 17, dtype=torch.int64)
    many_got = memory._new(group, 2, RANKS * 17, dtype=torch.int64)
    foreign = torch.zeros(6, WIDTH, dtype=torch.bfloat16)
    five_got = memory._new(group, 2, 5, dtype=torch.int64)
    a, b, s, g = memory.input, memory.out, memory.sent, memory.got

    def refused(what: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except RuntimeError as error:
            if what not in str(error):
                found.append(f"{what}: {error}")
        else:
            found.append(f"{what}: taken")

    def there(*tensors: Tensor, align: int | None = None, group_name: str = name) -> Any:
        return lambda: library.all_to_all_vdev_2d(*tensors, group_name, align)

    s.zero_()
    refused("did not meet", there(foreign, b, s, g))
    refused("no tensor met", there(a, b, s, g, group_name="nobody"))
    refused("not made by symm_mem.empty", lambda: library.rendezvous(foreign, group.device_group))
    refused("major_align is positive", there(a, b, s, g, align=0))
    refused("one dtype and one stride", there(a, wide, s, g))
    refused("in_splits is [R * e]", there(a, b, five, five_got))
    refused("experts of a rank=17, at most 16", there(a, b, many, many_got))
    s.fill_(2)
    refused("in_splits add up to 12, input has 6 rows", there(a, b, s, g))
    s.fill_(-1)
    refused("splits are not negative", there(a, b, s, g))
    refused("cannot change", lambda: library.set_backend("CUDA"))
    s.zero_()
    s[0] = 3  # nine rows to rank 0
    if group.rank == 0:
        refused("out: 6 rows, 9 arrive", there(a, b, s, g))
    else:  # what rank 0 asks of the others
        library._exchange(name, s.view(RANKS, LOCAL), (a, b, s, g))
    s.zero_()
    g.zero_()
    refused("call another operator", (memory.dispatch, memory.combine)[group.rank == 1])
    s.fill_(1)
    memory.dispatch()
    a[0] = 7  # peers may still read it
    refused("was written to while peers may read it", memory.combine)
    return found


CONFIG = DispatchConfig(256, 4, 12, 5, torch.bfloat16, deterministic=True)


def adapter(group: EPGroup) -> list[str]:
    """Bit by bit what the twin says, for each wire; bytes as the formula says."""
    found, me = [], group.rank
    placement = random_placement(8, RANKS, 4, seed=5)
    for seed, wire in enumerate(WireFormat):
        config = DispatchConfig(**{**CONFIG.__dict__, "wire": wire})
        case = make_case(config, placement, [5, 0, 3], seed, masked=0.2)
        if wire is not WireFormat.MODEL:
            rounded = [quantise(x, wire) for x in case.xs]
            case.xs[:] = [
                dequantise(r.values, r.scales, r.scale_format, x.dtype)
                for r, x in zip(rounded, case.xs, strict=True)
            ]
        home = expected(case, CombineForm.PAIRS)[1][me]
        d = EmulatedSymmetricDispatcher.open(group, config)
        held = sum(t.nbytes for b in d._buffers for t in vars(b).values() if isinstance(t, Tensor))
        if held != d.plan(group, config).held:
            found.append(f"{wire}: holds {held} bytes, planned {d.plan(group, config).held}")
        for bound in (None, 5):
            d.set_step_bound(bound)
            x = case.xs[me] if wire is WireFormat.MODEL else quantise(case.xs[me], wire)
            handle = d.dispatch_start(x, case.slots[me], case.weights[me])
            received = d.dispatch_finish(handle)
            if received.layout is not Layout.EXPANDED or received.scale_format is not (
                row_of(config).scale_format
            ):
                found.append(f"{wire}: {received.layout}, {received.scale_format}")
            rows = received.x
            if received.scales is not None:
                rows = dequantise(rows, received.scales, received.scale_format, config.dtype)
            valid = received.slots[:, 0] >= 0
            counts = torch.bincount(received.slots[valid, 0], minlength=4)
            starts = received.starts
            if starts is None or bool((starts % d.align).any()):
                found.append(f"{wire}: segments start at {starts}")
            if len(rows) != rows_out(config, RANKS, 5, d.align) or not torch.equal(
                counts, received.counts
            ):
                found.append(f"{wire}: {len(rows)} rows, counts {received.counts.tolist()}")
            if not bool(rows[~valid].isnan().all()):
                found.append(f"{wire}: padding is not poisoned")
            held_experts = torch.from_numpy(placement.physical_to_logical[0].copy())
            mine = held_experts[list(placement.slots_of(me))]
            y = torch.full(rows.shape, torch.nan, dtype=config.dtype)
            y[valid] = expert_output(rows[valid], mine[received.slots[valid, 0].long()])
            d.combine_start(handle, y)
            if not torch.equal(d.combine_finish(handle), home):
                found.append(f"{wire}, bound {bound}: home is not the twin's")
        found += [f"{wire}: {what}" for what in _bytes(d, case, me)]
        d.close()
    return found


def _bytes(d: EmulatedSymmetricDispatcher, case: Any, me: int) -> list[str]:
    """After two equal layers."""
    owners = [(s[s >= 0] // 4).tolist() for s in case.slots]
    leaving = sum(owner != me for owner in owners[me])
    returning = sum(owners[r].count(me) for r in range(RANKS) if r != me)
    splits = 16 * 4 * (RANKS - 1)
    rows = [owners[me].count(r) for r in range(RANKS)]
    want = (rows, 2 * (splits + leaving * row_of(d.config).nbytes), 2 * (splits + returning * 512))
    got = (d.stats.rows_sent_to_rank, d.stats.dispatch_bytes, d.stats.combine_bytes)
    return [] if got == want else [f"stats {got}, not {want}"]


def refusals(group: EPGroup) -> list[str]:
    """What the adapter refuses by itself, in time and alike on every rank."""
    d, found = EmulatedSymmetricDispatcher.open(group, CONFIG), []
    x, weights = torch.zeros(2, 256, dtype=torch.bfloat16), torch.ones(2, 4)
    slots = torch.tensor([[0, 3, 11, -1], [-1, -1, 4, 5]], dtype=torch.int32)

    def refused(what: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except DispatchError as error:
            if what not in str(error):
                found.append(f"{what}: {error}")
        else:
            found.append(f"{what}: taken")

    twice = torch.tensor([[0, 3, 11, -1], [4, -1, 5, 4]], dtype=torch.int32)
    refused("token 1 has slot 4 twice", lambda: d.dispatch_start(x, twice, weights))
    refused("valid are -1 (masked) and 0..11", lambda: d.dispatch_start(x, slots + 1, weights))
    refused(
        "combine_form=summed: rows come home one by one; must be pairs",
        lambda: type(d)(group, CONFIG, combine_form=CombineForm.SUMMED),
    )
    d.set_step_bound(1)
    refused("the agreed bound is 1", lambda: d.dispatch_start(x, slots, weights))
    d.set_step_bound(None)
    handles = [d.dispatch_start(x, slots, weights) for _ in range(2)]
    refused("2 layers are in flight; at most 2", lambda: d.dispatch_start(x, slots, weights))
    y = d.dispatch_finish(handles[0]).x
    refused("must be None", lambda: d.combine_start(handles[0], y, slots.long()))
    refused(f"must be [{len(y)}, 256]", lambda: d.combine_start(handles[0], y[:-1]))
    refused("next call is dispatch_finish", lambda: d.combine_start(handles[1], y))
    d.close()
    refused("is closed", lambda: d.dispatch_start(x, slots, weights))
    return found


CHECKS = {
    "operators": operators,
    "rules": rules,
    "adapter": adapter,
    "refusals": refusals,
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(fork_ranks(lambda group, _: {name: check(group) for name, check in CHECKS.items()}))
