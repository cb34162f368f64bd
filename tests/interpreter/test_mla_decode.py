"""Paged MLA decode in the interpreter, against a softmax in float64 over the slots of each row.

Whatever a row does not attend to is NaN: slots behind its position in its own blocks, blocks of
nobody, and a table's padding points to such a block.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from models.deepseek.kernels.gpu.errors import ShapeRefused
from models.deepseek.kernels.gpu.mla_decode import mla_decode
from models.deepseek.kernels.gpu.mla_decode_config import DecodeConfig, choose_config
from models.deepseek.kernels.gpu.mla_plan import (
    DETERMINISTIC,
    ByLoad,
    Cuts,
    DecodePlan,
    Partitions,
    plan_decode,
    row_slots_twin,
)
from models.deepseek.kernels.gpu.mla_rows import pack_rows_twin, read_rows_twin, row_bytes
from models.interface import ForwardBatch

SMALL = Partitions(64, 128, 128)  # so that small contexts have borders of both kinds
# Chances and outputs are rounded to bf16 (2**-9 each, of the largest value), FP8 latents also.
TOLERANCE = 2**-7
LSE_TOLERANCE = {False: 1e-4, True: 2e-2}  # FP8: keys are rounded to bf16 before they are scored


class World:
    """Sequences with `contexts` positions, the last `new` of each being rows of the step."""

    def __init__(
        self, contexts: list[int], new: list[int] | None = None, *, heads: int = 16,
        rank: int = 64, rope: int = 16, block: int = 16, fp8: bool = False, seed: int = 0,
        padding: int = 0,
    ) -> None:  # fmt: skip
        new = new or [min(1, n) for n in contexts]
        g = torch.Generator().manual_seed(seed)
        self.rank, self.rope, self.block, self.fp8 = rank, rope, block, fp8
        needed = [-(-n // block) for n in contexts]
        order = (torch.randperm(sum(needed), generator=g) + 1).tolist()  # block 0 is nobody's
        width = max([*needed, 1]) + 2
        tables = torch.zeros(len(contexts), width, dtype=torch.int32)
        total = (sum(needed) + 1) * block
        rows = torch.full((total, rank + rope), torch.nan)
        positions, slots = [], []
        for s, n in enumerate(contexts):
            mine = [order.pop() for _ in range(needed[s])]
            tables[s, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
            at = torch.arange(n)
            flat = (
                torch.tensor(mine, dtype=torch.int64)[at // block] * block + at % block if n else at
            )
            # By position alone, so that worlds of other block sizes hold the same sequences.
            own = torch.Generator().manual_seed(1000 * seed + s)
            rows[flat] = torch.randn(n, rank + rope, generator=own)
            positions += range(n - new[s], n)
            slots.append(flat[n - new[s] :])
        self.layer = self.pack(rows).view(total // block, block, -1)
        starts = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
        pad = torch.full((padding,), -1)
        self.batch = ForwardBatch(
            token_ids=torch.zeros(len(positions) + padding, dtype=torch.int64),
            positions=torch.cat((torch.tensor(positions, dtype=torch.int64), pad)),
            slot_mapping=torch.cat((*slots, pad)) if slots else pad,
            query_start=starts,
            context_len=torch.tensor(contexts, dtype=torch.int32),
            block_tables=tables,
            logits_rows=torch.zeros(0, dtype=torch.int64),
            max_query_len=max([*new, 0]),
            max_context_len=max([*contexts, 0]),
        )
        own = torch.Generator().manual_seed(seed + 77)
        self.q = torch.randn(self.batch.num_tokens, heads, rank + rope, generator=own).bfloat16()

    def pack(self, rows: Tensor) -> Tensor:
        if not self.fp8:
            return rows.bfloat16()
        packed = pack_rows_twin(rows[:, : self.rank], rows[:, self.rank :])
        # NaN as e4m3, as fp32 and as bf16, so that whichever part is read shows.
        packed[rows.isnan().any(dim=1)] = 0xFF
        return packed

    def plan(self, partitions: Cuts = SMALL, **more: int) -> DecodePlan:
        return plan_decode(self.batch, self.q.shape[1], self.rank, partitions=partitions, **more)

    def run(
        self, plan: DecodePlan | None = None, q: Tensor | None = None, **more: object
    ) -> tuple[Tensor, Tensor]:
        q = self.q if q is None else q
        scale = 1 / math.sqrt(self.rank)
        return mla_decode(
            q, self.layer, plan or self.plan(), self.batch.block_tables, scale,
            rope=self.rope, **more,
        )  # fmt: skip

    def twin(self) -> tuple[Tensor, Tensor]:
        out, lse = [], []
        for row in range(self.batch.num_tokens):
            slots = row_slots_twin(self.batch, row, self.block)
            keys = read_rows_twin(self.layer, slots, self.rank, self.rope)
            scores = self.q[row].double() @ keys.T / math.sqrt(self.rank)  # [H, p + 1]
            lse.append(torch.logsumexp(scores, dim=1))
            out.append(torch.softmax(scores, dim=1) @ keys[:, : self.rank])
        return torch.stack(out), torch.stack(lse)

    def check(self, **more: object) -> None:
        out, lse = self.run(**more)
        want, want_lse = self.twin()
        assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
        error = (out.double() - want).abs().max()
        assert error <= TOLERANCE * want.abs().max().clamp(min=1), float(error)
        finite = want_lse.isfinite()
        assert torch.equal(lse.isfinite(), finite)
        close = (lse.double() - want_lse)[finite].abs() <= LSE_TOLERANCE[self.fp8]
        assert close.all()


BORDERS = [1, 63, 64, 65, 127, 128, 129, 256, 257, 300]


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("block", [16, 32, 64])
def test_ragged_contexts_and_borders(fp8: bool, block: int) -> None:
    contexts = BORDERS if block == 16 else [1, 65, 300]
    World(contexts, rank=128 if fp8 else 64, block=block, fp8=fp8).check()


@pytest.mark.parametrize("heads", [16, 24, 32, 64, 80, 128])
def test_heads(heads: int) -> None:
    World([70, 5], heads=heads).check()


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("arch", [90, 100])
def test_both_chips_configurations_at_the_real_widths(fp8: bool, arch: int) -> None:
    world = World([140], heads=64, rank=512, rope=64, block=64, fp8=fp8)
    world.check(config=choose_config(64, arch, fp8))


def test_rows_of_drafts_are_causal_among_themselves() -> None:
    World([66, 130, 9], [4, 3, 9]).check()


def test_empty_sequences_padding_rows_and_no_rows_at_all() -> None:
    World([5, 0, 70], padding=3).check()
    World([], padding=2).check()
    out, lse = World([]).run()
    assert out.shape == (0, 16, 64) and lse.shape == (0, 16)


def test_padding_rows_are_zero() -> None:
    out, lse = World([200], padding=2).run()
    assert not out[1:].any() and (lse[1:] == -math.inf).all()


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("context", [60, 129, 300])
def test_a_latent_that_is_no_number_shows_in_its_own_rows_alone(fp8: bool, context: int) -> None:
    """However many parts a row has: sampling then says that the logits are not finite."""
    world = World([context, context], rank=128, fp8=fp8)
    block = int(world.batch.block_tables[0, 0])
    world.layer[block, 3] = 0xFF if fp8 else torch.nan
    out, lse = world.run()
    assert out[0].isnan().all() and lse[0].isnan().all()
    assert out[1].isfinite().all() and lse[1].isfinite().all()
    q = world.q.clone()
    q[1, 2] = torch.nan
    out, lse = world.run(q=q)
    assert out[1, 2].isnan().all() and lse[1, 2].isnan()
    assert out[1, :2].isfinite().all() and lse[1, :2].isfinite().all()


@pytest.mark.parametrize("fp8", [False, True])
def test_a_row_alone_is_the_row_in_company(fp8: bool) -> None:
    rank = 128 if fp8 else 64
    world = World([200, 64, 129], [3, 1, 2], fp8=fp8, rank=rank, heads=20)
    out, lse = world.run()
    whole = world.batch
    for row in range(whole.num_tokens):
        plan = plan_decode(whole, 20, rank, partitions=SMALL).rows(row, row + 1)
        alone = world.run(replace(plan, launches=((0, 1),)), world.q[row : row + 1], programs=1)
        assert torch.equal(alone[0][0], out[row]) and torch.equal(alone[1][0], lse[row])


def test_block_size_programs_and_workspace_change_no_bit() -> None:
    out, lse = World([200, 64, 300], [2, 1, 1]).run()
    for block, programs, workspace in ((64, 1, 1 << 30), (32, 7, 1), (16, 2, 50_000)):
        world = World([200, 64, 300], [2, 1, 1], block=block)
        plan = world.plan(workspace=workspace)
        assert workspace > 1 << 20 or len(plan.launches) == len(plan.pieces) > 1
        assert plan.workspace_bytes(16, 64) <= max(workspace, plan.max_parts * 16 * 65 * 4)
        again = world.run(plan, programs=programs)
        assert torch.equal(again[0], out) and torch.equal(again[1], lse)


def test_a_known_total_of_contexts_needs_less_workspace_and_changes_no_bit() -> None:
    world = World([300, 5, 3, 2])
    out, lse = world.run()
    plain, batch = world.plan(), world.batch
    world.batch = replace(batch, total_context=310)
    known = world.plan()
    world.batch = replace(batch, host=batch)
    exact = world.plan()
    assert plain.max_units == 4 * 4 and known.max_units == 4 + 310 // 64
    assert exact.max_units == 4 + 3 == int(known.work_start[-1])
    assert plain.workspace_bytes(16, 64) > known.workspace_bytes(16, 64)
    assert known.workspace_bytes(16, 64) > exact.workspace_bytes(16, 64)
    for plan in (known, exact):
        again = world.run(plan)
        assert torch.equal(again[0], out) and torch.equal(again[1], lse)


def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that a launch leaves are NaN until they are written."""
    empty = torch.empty

    def made(*sizes: object, **more: object) -> Tensor:
        found = empty(*sizes, **more)
        return found.fill_(torch.nan) if found.is_floating_point() else found

    monkeypatch.setattr(torch, "empty", made)


@pytest.mark.parametrize("fp8", [False, True])
def test_a_captured_step_is_right_for_every_mix_of_contexts(
    fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One batch object of 6 rows, room for 700 positions in all, 500 of them in one row at most:
    filled anew as a replay does, most units not there, parts of NaN. Each row's bits are those it
    has alone."""
    poisoned(monkeypatch)
    rank = 128 if fp8 else 64
    mixes = ([1, 1, 1, 1, 1, 1], [300, 1, 64, 65], [], [130, 129, 128, 127, 126, 60])
    worlds = [World(mix, rank=rank, fp8=fp8, padding=6 - len(mix)) for mix in mixes]
    captured = ForwardBatch(
        token_ids=torch.zeros(6, dtype=torch.int64),
        positions=torch.zeros(6, dtype=torch.int64),
        slot_mapping=torch.zeros(6, dtype=torch.int64),
        query_start=torch.zeros(7, dtype=torch.int32),
        context_len=torch.zeros(6, dtype=torch.int32),
        block_tables=torch.zeros(6, 40, dtype=torch.int32),
        logits_rows=torch.arange(6),
        max_query_len=1,
        max_context_len=500,
        total_context=700,
    )
    for world in worlds:
        new = world.batch
        n = new.num_sequences
        captured.positions.copy_(new.positions)
        captured.query_start[: n + 1] = new.query_start
        captured.query_start[n:] = n
        captured.block_tables[:n, : new.block_tables.shape[1]] = new.block_tables
        plan = plan_decode(captured, 16, rank, partitions=SMALL)
        assert len(plan.launches) == 1 and plan.max_units == 6 + 700 // 64 < 6 * plan.max_parts
        out, lse = mla_decode(
            world.q, world.layer, plan, captured.block_tables, 1 / math.sqrt(rank), rope=16
        )
        want, want_lse = world.twin()
        assert (out.double() - want).abs().max() <= TOLERANCE * want.abs().max().clamp(min=1)
        assert torch.equal(lse.isfinite(), want_lse.isfinite())
        for row in range(0, n, 3):
            alone = world.run(world.plan().rows(row, row + 1), world.q[row : row + 1])
            assert torch.equal(alone[0][0], out[row]) and torch.equal(alone[1][0], lse[row])


def test_a_prefix_that_sequences_share_counts_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows attend to more positions than the cache has: what two held alone before is poisoned."""
    poisoned(monkeypatch)
    world = World([300, 260, 290, 1])
    tables, shared = world.batch.block_tables, 256 // world.block
    for other in (1, 2):
        world.layer[tables[other, :shared].long()] = world.layer[0].clone()
        tables[other, :shared] = tables[0, :shared]
    held = int((~world.layer.flatten(0, 1).isnan().any(1)).sum())
    whole, total = world.batch, 300 + 260 + 290 + 1
    assert held == total - 2 * 256
    for known in ({"host": whole}, {"total_context": total}, {}):
        world.batch = replace(whole, **known)
        plan = world.plan()
        assert int(plan.work_start[-1]) == 4 + 4 + 4 + 1 <= plan.max_units
        world.check(plan=plan)


def test_a_larger_bound_of_contexts_changes_no_bit() -> None:
    world = World([40, 20])
    out, lse = world.run()
    assert world.plan().max_parts == 1
    world.batch = replace(world.batch, max_context_len=1000)
    assert world.plan().max_parts > 1
    again = world.run()
    assert torch.equal(again[0], out) and torch.equal(again[1], lse)


def with_tree(world: World, paths: list[list[int]]) -> World:
    """paths: slots of each of the last rows, with -1 behind."""
    rows = world.batch.num_tokens
    ancestors = torch.full((rows, 5), -1, dtype=torch.int32)
    for row, path in enumerate(paths, start=rows - len(paths)):
        ancestors[row, : len(path)] = torch.tensor(path, dtype=torch.int32)
    world.batch = replace(world.batch, ancestors=ancestors)
    return world


@pytest.mark.parametrize("fp8", [False, True])
def test_a_node_of_a_tree_is_the_end_of_a_chain_along_its_path(fp8: bool) -> None:
    rank = 128 if fp8 else 64
    chain = World([64 + 3], [3], fp8=fp8, rank=rank)
    want = chain.run()
    slots = chain.batch.slot_mapping.tolist()
    # The same positions by a tree: nodes moved to slots of their own, the old ones poisoned.
    moved = World([64 + 3], [3], fp8=fp8, rank=rank)
    flat = moved.layer.flatten(0, 1)
    new = [1, 7, 3]  # of block 0
    for old, slot in zip(slots, new, strict=True):
        flat[slot] = flat[old]
        flat[old] = flat[0]
    with_tree(moved, [new[:1], new[:2], new])
    moved.check()
    got = moved.run()
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_siblings_see_their_own_path_only() -> None:
    world = World([70], [4])
    slots = world.batch.slot_mapping.tolist()
    at = world.batch.positions.clone()
    at[2] = at[1]  # rows 1 and 2: siblings, children of row 0; row 3 follows row 2
    at[3] = at[1] + 1
    world.batch = replace(world.batch, positions=at)
    with_tree(world, [[slots[1]], [slots[2]], [slots[2], slots[3]]]).check()


@pytest.mark.parametrize("fp8", [False, True])
def test_rows_cut_by_load_are_right_too(fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several pieces among whole ones and padding, in one launch and in several, which
    count their own load; a step that is captured for more positions than come."""
    poisoned(monkeypatch)
    world = World([700, 40, 1030], [1, 2, 2], fp8=fp8, rank=128, padding=2)
    for units, launches in ((8, 1), (1, 1), (8, 7)):
        plan = world.plan(ByLoad(units), workspace=None if launches == 1 else 1)
        assert len(plan.launches) == launches
        parts = plan.work_start.diff().tolist()
        assert parts == {8: [1, 1, 1, 2, 2, 1, 1], 1: [1] * 7}[units]
        world.check(plan=plan)
    batch = replace(world.batch, max_context_len=4000, total_context=9000)
    captured = plan_decode(batch, world.q.shape[1], 128, partitions=ByLoad(8))
    assert captured.max_units == 7 + 8 and captured.max_parts == 8
    world.check(plan=captured)


def test_rows_cut_by_load_take_trees_of_drafts() -> None:
    world = World([1100], [4], rank=128)
    slots = world.batch.slot_mapping.tolist()
    at = world.batch.positions.clone()
    at[2] = at[1]
    at[3] = at[1] + 1
    world.batch = replace(world.batch, positions=at)
    with_tree(world, [[slots[0]], [slots[1]], [slots[2]], [slots[2], slots[3]]])
    plan = world.plan(ByLoad(100))
    assert plan.work_start.diff().tolist() == [4] * 4
    world.check(plan=plan)


def test_partitions_count_the_same_on_the_host_and_as_tensors() -> None:
    for cuts in (SMALL, DETERMINISTIC, Partitions(256, 0, 256)):
        lengths = [0, 1, 64, 65, 128, 129, 1024, 1025, 16384, 16385, 18433, 131072]
        assert cuts.counts(torch.tensor(lengths)).tolist() == [cuts.count(n) for n in lengths]
    assert DETERMINISTIC.count(1024) == 1 and DETERMINISTIC.count(131072) == 72
    with pytest.raises(ShapeRefused, match="multiples of 64"):
        Partitions(100, 0, 64)


def test_wrong_shapes_are_refused() -> None:
    world = World([5])
    assert row_bytes(512, 64, True) == 656 and row_bytes(512, 64) == 1152
    with pytest.raises(ShapeRefused, match="block size"):
        mla_decode(
            world.q, torch.zeros(4, 48, 80).bfloat16(), world.plan(), world.batch.block_tables,
            1.0, rope=16,
        )  # fmt: skip
    with pytest.raises(ShapeRefused, match="rows"):
        world.run(q=world.q[:0])
    with pytest.raises(ShapeRefused, match="powers of two"):
        World([5], rank=96).run()
    assert isinstance(choose_config(128, 90), DecodeConfig)
