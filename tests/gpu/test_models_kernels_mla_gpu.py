"""MLA's kernels on a device: cache write, decode, prefill, at DeepSeek-V3's shapes.

What the interpreter cannot prove: that the matrix units' sums do not depend on the program that
makes them (law 5), that asynchronous copies and persistent programs keep tiles apart, that masked
loads leave NaN where it lies. In triton's interpreter (TRITON_INTERPRET=1) each body runs on a CPU
at small sizes, so that no line runs first on a GPU.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from models.deepseek.config import Rope
from models.deepseek.kernels.gpu.language import INTERPRETED
from models.deepseek.kernels.gpu.mla_cache import write_latents, write_latents_twin
from models.deepseek.kernels.gpu.mla_decode import cuts_by_load, mla_decode
from models.deepseek.kernels.gpu.mla_plan import ByLoad, plan_decode, row_slots_twin
from models.deepseek.kernels.gpu.mla_prefill import mla_prefill, mla_prefill_twin
from models.deepseek.kernels.gpu.mla_prefill_plan import plan_prefill
from models.deepseek.kernels.gpu.mla_rows import pack_rows_twin, read_rows_twin, row_bytes
from models.deepseek.rope import cos_sin_table
from models.interface import ForwardBatch

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
LARGE = ON_GPU and not INTERPRETED
RANK, ROPE, NOPE, VALUE = 512, 64, 128, 128
SCALE = 0.1352337788608801  # DeepSeek-V3's, YaRN's part in it
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_GPU and not INTERPRETED, reason="needs a CUDA device"),
]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


class Cached:
    """Sequences in a paged cache that is NaN wherever nobody's position lies."""

    def __init__(self, contexts: list[int], new: list[int], block: int, fp8: bool) -> None:
        random = torch.Generator().manual_seed(7)
        needed = [-(-n // block) for n in contexts]
        order = (torch.randperm(sum(needed), generator=random) + 1).tolist()
        tables = torch.zeros(len(contexts), max(needed) + 1, dtype=torch.int32)
        rows = torch.full(((sum(needed) + 1) * block, RANK + ROPE), torch.nan, device=DEVICE)
        self.slots = []
        for s, n in enumerate(contexts):
            mine = torch.tensor([order.pop() for _ in range(needed[s])])
            tables[s, : len(mine)] = mine
            at = torch.arange(n)
            self.slots.append((mine[at // block] * block + at % block).to(DEVICE))
            rows[self.slots[-1]] = normal(n, RANK + ROPE, seed=s)
        if fp8:
            packed = pack_rows_twin(rows[:, :RANK], rows[:, RANK:])
            packed[rows.isnan().any(dim=1)] = 0xFF
        else:
            packed = rows.bfloat16()
        self.layer = packed.view(-1, block, packed.shape[1])
        self.block, self.contexts, self.new, self.tables = block, contexts, new, tables.to(DEVICE)
        positions = [p for n, m in zip(contexts, new, strict=True) for p in range(n - m, n)]
        starts = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
        ids = torch.zeros(len(positions), dtype=torch.int64, device=DEVICE)
        self.batch = ForwardBatch(
            token_ids=ids,
            positions=torch.tensor(positions, device=DEVICE),
            slot_mapping=ids,
            query_start=starts.to(DEVICE),
            context_len=torch.tensor(contexts, dtype=torch.int32, device=DEVICE),
            block_tables=self.tables,
            logits_rows=ids[:0],
            max_query_len=max(new),
            max_context_len=max(contexts),
        )


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("heads", [128, 64, 32, 16])
def test_decode(heads: int, fp8: bool) -> None:
    contexts = [1, 1000, 1024, 1025, 4096, 20000, 70] if LARGE else [1, 70]
    heads = heads if LARGE else 16
    cached = Cached(contexts, [1] * (len(contexts) - 1) + [3], 64 if heads > 32 else 16, fp8)
    q = normal(cached.batch.num_tokens, heads, RANK + ROPE, seed=99).bfloat16()
    out, lse = mla_decode(q, cached.layer, plan_decode(cached.batch, heads), cached.tables, SCALE)
    host = ForwardBatch(**{k: _to_cpu(v) for k, v in vars(cached.batch).items()})
    for row in range(len(q)):
        slots = row_slots_twin(host, row, cached.block).to(DEVICE)
        keys = read_rows_twin(cached.layer, slots, RANK, ROPE)
        scores = q[row].double() @ keys.T * SCALE
        want = torch.softmax(scores, 1) @ keys[:, :RANK]
        # bf16 chances and output, of the largest latent; FP8: keys in bf16 before they are scored.
        assert ((out[row].double() - want).abs() <= 2**-6 * want.abs().max()).all(), row
        assert ((lse[row].double() - torch.logsumexp(scores, 1)).abs() <= 0.05).all(), row


def _to_cpu(value: object) -> object:
    return value.cpu() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("fp8", [False, True])
def test_a_row_of_decode_is_its_own(fp8: bool) -> None:
    contexts = [5000, 3, 1024, 2049] + [900] * 60 if LARGE else [70, 3]
    heads = 128 if LARGE else 16
    cached = Cached(contexts, [3, 1, *[1] * (len(contexts) - 2)], 64, fp8)
    q = normal(cached.batch.num_tokens, heads, RANK + ROPE, seed=98).bfloat16()
    plan = plan_decode(cached.batch, heads)
    out, lse = mla_decode(q, cached.layer, plan, cached.tables, SCALE)
    for row in range(6) if LARGE else range(2):
        alone = plan.rows(row, row + 1)
        one = mla_decode(q[row : row + 1], cached.layer, alone, cached.tables, SCALE, programs=1)
        assert torch.equal(one[0][0], out[row]) and torch.equal(one[1][0], lse[row])
    split = plan_decode(cached.batch, heads, workspace=1)
    again = mla_decode(q, cached.layer, split, cached.tables, SCALE)
    assert torch.equal(again[0], out) and torch.equal(again[1], lse)
    cuts = cuts_by_load(heads, DEVICE, fp8) if LARGE else ByLoad(9)
    other = mla_decode(
        q, cached.layer, plan_decode(cached.batch, heads, partitions=cuts), cached.tables, SCALE
    )
    assert (other[0].float() - out.float()).abs().max() <= 2**-6 * out.float().abs().max()


@pytest.mark.parametrize("fp8", [False, True])
def test_a_captured_step_is_right_for_other_contexts(fp8: bool) -> None:
    """Room for the sum of contexts, of which any row may have most; the rest is padding."""
    mixes = ([20000, 1, 1025, 700], [3000, 3000], [1] * 8) if LARGE else ([70, 1], [9])
    heads, rows = (128, 8) if LARGE else (16, 2)
    longest, total = max(map(max, mixes)), max(map(sum, mixes))
    batch = ForwardBatch(
        token_ids=torch.zeros(rows, dtype=torch.int64, device=DEVICE),
        positions=torch.full((rows,), -1, device=DEVICE),
        slot_mapping=torch.full((rows,), -1, device=DEVICE),
        query_start=torch.zeros(rows + 1, dtype=torch.int32, device=DEVICE),
        context_len=torch.zeros(rows, dtype=torch.int32, device=DEVICE),
        block_tables=torch.zeros(rows, longest // 64 + 3, dtype=torch.int32, device=DEVICE),
        logits_rows=torch.arange(rows, device=DEVICE),
        max_query_len=1,
        max_context_len=longest,
        total_context=total,
    )
    q = normal(rows, heads, RANK + ROPE, seed=97).bfloat16()
    worlds = [Cached(mix, [1] * len(mix), 64, fp8) for mix in mixes]
    layer = torch.zeros_like(max((w.layer for w in worlds), key=len))

    def step() -> tuple[Tensor, Tensor]:
        return mla_decode(q, layer, plan_decode(batch, heads), batch.block_tables, SCALE)

    graph = None
    if LARGE:
        step()  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = step()
    for world in worlds:
        n = world.batch.num_tokens
        batch.positions.fill_(-1)[:n] = world.batch.positions
        batch.query_start.fill_(n)[: n + 1] = world.batch.query_start
        batch.block_tables[:n, : world.tables.shape[1]] = world.tables
        layer[: len(world.layer)] = world.layer
        if graph is None:
            out, lse = step()
        else:
            graph.replay()
        plan = plan_decode(world.batch, heads)
        want = mla_decode(q[:n], world.layer, plan, world.tables, SCALE)
        assert torch.equal(out[:n], want[0]) and torch.equal(lse[:n], want[1])
        assert not out[n:].any() and (lse[n:] == -math.inf).all()


@pytest.mark.parametrize("fp8", [False, True])
def test_prefill(fp8: bool) -> None:
    contexts, new = ([5000, 700, 4097], [300, 700, 1]) if LARGE else ([70, 9], [5, 9])
    heads = 16 if LARGE else 2
    cached = Cached(contexts, new, 64, fp8)
    kv_b = (normal(heads * (NOPE + VALUE), RANK, seed=5) * 0.05).bfloat16()
    q = normal(sum(new), heads, NOPE + ROPE, seed=6).bfloat16()

    def expand(latent: Tensor) -> Tensor:
        wide = latent.double() @ kv_b.double().T  # float64: the same whatever comes along
        return wide.bfloat16().view(-1, heads, NOPE + VALUE)

    def run(batch: Cached, queries: Tensor) -> tuple[Tensor, Tensor]:
        plan = plan_prefill(batch.contexts, batch.new, DEVICE)
        return mla_prefill(queries, batch.layer, batch.tables, plan, expand, SCALE)

    out, lse = run(cached, q)
    row = 0
    for s, n in enumerate(contexts):
        latents = read_rows_twin(cached.layer, cached.slots[s], RANK, ROPE)
        latents[:, :RANK] = latents[:, :RANK].float().bfloat16()
        part = slice(row, row + new[s])
        want, want_lse = mla_prefill_twin(q[part], latents, kv_b, n - new[s], SCALE, VALUE)
        assert ((out[part].double() - want).abs() <= 2**-6 * want.abs().max()).all()
        torch.testing.assert_close(lse[part].double(), want_lse, rtol=1e-3, atol=2e-3)
        row += new[s]
    # The last tokens of the first sequence alone: the same bits.
    few = min(4, new[0])
    cached.contexts, cached.new = contexts[:1], [few]
    again = run(cached, q[new[0] - few : new[0]])
    assert torch.equal(again[0], out[new[0] - few : new[0]])
    assert torch.equal(again[1], lse[new[0] - few : new[0]])


@pytest.mark.parametrize("fp8", [False, True])
def test_cache_write(fp8: bool) -> None:
    tokens = 3000 if LARGE else 3
    joined = normal(tokens, 1536 + RANK + ROPE, seed=1).bfloat16()
    latent, key = joined[:, 1536 : 1536 + RANK], joined[:, 1536 + RANK :]
    weight, positions = normal(RANK, seed=2), torch.arange(tokens, device=DEVICE) * 7
    table = cos_sin_table(Rope(theta=10000.0, yarn=None), ROPE, 7 * tokens).to(DEVICE)
    blocks = -(-tokens // 64) + 1
    dtype = torch.uint8 if fp8 else torch.bfloat16
    width = row_bytes(RANK, ROPE, fp8) // dtype.itemsize
    layer = torch.zeros(blocks, 64, width, dtype=dtype, device=DEVICE)
    random = torch.Generator().manual_seed(3)
    slots = torch.randperm(blocks * 64, generator=random)[:tokens].to(DEVICE)
    write_latents(latent, key, weight, 1e-6, positions, table, slots, layer)
    want = write_latents_twin(latent, key, weight, 1e-6, positions, table)
    rows = read_rows_twin(layer, slots, RANK, ROPE)
    step = 2**-4 if fp8 else 2**-8  # half a unit of e4m3 or of bf16; small ones by their block
    floor = want[:, :RANK].abs().amax(dim=1, keepdim=True) / 448 if fp8 else 0.0
    error = (rows - want)[:, :RANK].abs()
    assert (error <= step * want[:, :RANK].abs() + floor).all()
    assert ((rows - want)[:, RANK:].abs() <= 2**-8 * want[:, RANK:].abs() + 2**-14).all()
    others = torch.ones(blocks * 64, dtype=torch.bool, device=DEVICE)
    others[slots] = False
    assert not layer.flatten(0, 1)[others].view(torch.uint8).any()
    assert math.isfinite(float(rows.abs().max()))
