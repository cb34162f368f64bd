"""MLA prefill over a paged prefix and new tokens in the interpreter, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from models.deepseek.kernels.gpu.errors import ShapeRefused
from models.deepseek.kernels.gpu.mla_prefill import CONFIGS, cost, mla_prefill, mla_prefill_twin
from models.deepseek.kernels.gpu.mla_prefill_plan import PrefillPlan, plan_prefill
from models.deepseek.kernels.gpu.mla_rows import pack_rows_twin, read_rows_twin

NOPE, ROPE, VALUE, HEADS = 32, 16, 16, 2
SCALE = 1 / math.sqrt(NOPE + ROPE)
TOLERANCE = 2**-7  # chances and outputs rounded to bf16, of the largest value


class World:
    def __init__(
        self, context: list[int], new: list[int], *, fp8: bool = False, block: int = 16,
        seed: int = 0,
    ) -> None:  # fmt: skip
        g = torch.Generator().manual_seed(seed)
        self.rank = 128 if fp8 else 64
        self.context, self.new, self.fp8, self.block = context, new, fp8, block
        needed = [-(-n // block) for n in context]
        order = (torch.randperm(sum(needed), generator=g) + 1).tolist()  # block 0 is nobody's
        self.tables = torch.zeros(len(context), max([*needed, 1]) + 1, dtype=torch.int32)
        rows = torch.full(((sum(needed) + 1) * block, self.rank + ROPE), torch.nan)
        self.slots, fresh, q = [], [], []
        for s, n in enumerate(context):
            mine = [order.pop() for _ in range(needed[s])]
            self.tables[s, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
            at = torch.arange(n)
            flat = torch.tensor([*mine, 0])[at // block] * block + at % block
            own = torch.Generator().manual_seed(50 * seed + s)
            rows[flat] = torch.randn(n, self.rank + ROPE, generator=own)
            fresh.append(rows[flat[n - new[s] :]].bfloat16())
            q.append(torch.randn(n, HEADS, NOPE + ROPE, generator=own)[n - new[s] :])
            self.slots.append(flat)
        if fp8:
            packed = pack_rows_twin(rows[:, : self.rank], rows[:, self.rank :])
            packed[rows.isnan().any(dim=1)] = 0xFF
        else:
            packed = rows.bfloat16()
        self.layer = packed.view(-1, block, packed.shape[1])
        self.rows = torch.cat(fresh)
        self.q = torch.cat(q).bfloat16()
        own = torch.Generator().manual_seed(9)
        kv_b = torch.randn(HEADS * (NOPE + VALUE), self.rank, generator=own) / 8
        self.kv_b = kv_b.bfloat16()
        self.largest = 0

    def expand(self, latent: Tensor) -> Tensor:
        self.largest = max(self.largest, latent.shape[0])
        wide = latent.double() @ self.kv_b.double().T  # float64: the same whatever comes along
        return wide.bfloat16().view(-1, HEADS, NOPE + VALUE)

    def plan(self, chunk: int = 128, workspace: int = 256) -> PrefillPlan:
        return plan_prefill(self.context, self.new, chunk=chunk, workspace=workspace)

    def run(
        self, plan: PrefillPlan | None = None, fresh: bool = False, arch: int = 90
    ) -> tuple[Tensor, Tensor]:
        return mla_prefill(
            self.q, self.layer, self.tables, plan or self.plan(), self.expand, SCALE,
            rank=self.rank, nope=NOPE, value=VALUE, rows=self.rows if fresh else None,
            config=CONFIGS[arch],
        )  # fmt: skip

    def twin(self, fresh: bool = False) -> tuple[Tensor, Tensor]:
        outs, lses, row = [], [], 0
        for s, n in enumerate(self.context):
            new = self.new[s]
            latents = read_rows_twin(self.layer, self.slots[s], self.rank, ROPE)
            latents[:, : self.rank] = latents[:, : self.rank].float().bfloat16()
            if fresh:
                latents[n - new :] = self.rows[row : row + new].double()
            q = self.q[row : row + new]
            out, lse = mla_prefill_twin(q, latents, self.kv_b, n - new, SCALE, VALUE)
            outs, lses, row = [*outs, out], [*lses, lse], row + new
        return torch.cat(outs), torch.cat(lses)

    def check(self, plan: PrefillPlan | None = None, fresh: bool = False, arch: int = 90) -> None:
        out, lse = self.run(plan, fresh, arch)
        want, want_lse = self.twin(fresh)
        assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
        worst = want.abs().max() if want.numel() else torch.tensor(1.0)
        assert ((out.double() - want).abs() <= TOLERANCE * worst.clamp(min=1)).all()
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("prefix", [0, 1, 127, 128, 200])
def test_a_prefix_and_new_tokens(prefix: int, arch: int) -> None:
    World([prefix + 5], [5]).check(arch=arch)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("block", [16, 32, 64])
def test_ragged_sequences_and_some_without_tokens(fp8: bool, block: int) -> None:
    World([130, 40, 0, 129, 7], [130, 0, 0, 1, 3], fp8=fp8, block=block).check()


def test_many_new_tokens_over_several_chunks_and_tiles() -> None:
    World([300], [300]).check()
    World([300], [150]).check()


def test_nothing_to_do() -> None:
    out, lse = World([9, 0], [0, 0]).run()
    assert out.shape == (0, HEADS, VALUE) and lse.shape == (0, HEADS)


def test_fresh_rows_take_the_place_of_what_an_fp8_cache_holds() -> None:
    world = World([70, 140], [70, 9], fp8=True)
    for s, slots in enumerate(world.slots):  # new tokens' slots need not even be written
        world.layer.flatten(0, 1)[slots[world.context[s] - world.new[s] :]] = 0xFF
    world.check(fresh=True)


def test_one_chunk_is_the_same_without_carrying() -> None:
    world = World([100, 60], [10, 60])
    alone, carrying = world.plan(), world.plan(workspace=128)
    assert len(alone.rounds) == 1 and len(carrying.rounds) == 2
    for one, two in zip(world.run(alone), world.run(carrying), strict=True):
        assert torch.equal(one, two)


def test_the_cut_of_a_prompt_and_company_change_no_bit() -> None:
    whole, lse = World([200], [200]).run()
    row = 0
    for end, size in ((3, 3), (131, 128), (199, 68), (200, 1)):
        for others in ([], [150]):
            world = World([end, *others], [size, *others])
            # The same sequence 0: its generator draws latents first, then queries.
            full = World([200], [200])
            world.q[:size] = full.q[end - size : end]
            flat = world.layer.flatten(0, 1)
            flat[world.slots[0]] = full.layer.flatten(0, 1)[full.slots[0][:end]]
            out, part_lse = world.run()
            assert torch.equal(out[:size], whole[row : row + size])
            assert torch.equal(part_lse[:size], lse[row : row + size])
        row += size


@pytest.mark.parametrize("workspace", [128, 200, 384])
def test_the_workspace_holds(workspace: int) -> None:
    world = World([300, 90, 128], [300, 4, 60])
    plan = world.plan(workspace=workspace)
    world.check(plan)
    assert 0 < world.largest <= workspace
    most = max(r.positions for r in plan.rounds)
    held = most * 2 * (world.rank + ROPE + HEADS * (NOPE + VALUE))
    carried = world.q.shape[0] * HEADS * 4 * VALUE
    assert plan.workspace_bytes(HEADS, world.rank, ROPE, NOPE, VALUE) == held + carried


def test_every_pair_of_row_and_position_is_in_one_tile() -> None:
    context, new = [9000, 3, 4096, 5000], [5000, 3, 1, 0]
    plan = plan_prefill(context, new)
    seen = dict.fromkeys(range(sum(new)), 0)
    for row, rows, position, _, start, size in plan.attend.tolist():
        for m in range(rows):
            assert position + m >= start
            seen[row + m] += min(size, position + m + 1 - start)
    first = 0
    for n, c in zip(new, context, strict=True):
        assert [seen[first + m] for m in range(n)] == [c - n + m + 1 for m in range(n)]
        first += n
    assert all(r.positions <= plan.workspace for r in plan.rounds)


def test_cost_counts_pairs() -> None:
    flops = cost([100], [100], heads=1).flops - cost([100], [0], heads=1).flops
    assert flops == 2 * (320 * 5050 + 512 * 256 * 100)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ShapeRefused, match="new <= context"):
        plan_prefill([3], [4])
    with pytest.raises(ShapeRefused, match="workspace no less"):
        plan_prefill([3], [1], chunk=256, workspace=128)
    world = World([5], [5])
    with pytest.raises(ShapeRefused, match="rows"):
        world.run(plan_prefill([5], [4], chunk=128, workspace=128))
    world.expand = lambda latent: latent  # type: ignore[method-assign]
    with pytest.raises(ShapeRefused, match="expand"):
        world.run()
