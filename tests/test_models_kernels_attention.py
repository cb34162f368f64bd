"""Attention and per-head kernels, each build against float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from kernel_cases import DTYPES, close, kernels, normal  # noqa: F401
from torch import Tensor

from models.deepseek.kernels.base import Kernels, LinearWeight, MlaShape
from models.deepseek.kernels.mla_parts import mla_by_parts
from models.interface import ForwardBatch

# -- attention -------------------------------------------------------------------------------


def paged(
    contexts: list[int], queries: list[int], block_size: int, width: int, dtype: torch.dtype
) -> tuple[Tensor, ForwardBatch, list[Tensor]]:
    """A cache full of NaN in which only what the sequences hold is set; rows of each sequence."""
    blocks = [-(-context // block_size) for context in contexts]
    num_blocks = sum(blocks) + 3
    free = torch.randperm(num_blocks).tolist()
    layer = torch.full((num_blocks, block_size, width), math.nan, dtype=dtype)
    tables = torch.full((len(contexts), max(blocks, default=0) + 1), -1, dtype=torch.int32)
    rows = []
    for s, (context, count) in enumerate(zip(contexts, blocks, strict=True)):
        tables[s, :count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
        rows.append(normal(context, width, dtype=dtype))
        for p in range(context):
            layer[tables[s, p // block_size], p % block_size] = rows[s][p]
    positions = [torch.arange(c - q, c) for c, q in zip(contexts, queries, strict=True)]
    return layer, batch_of(positions, contexts, queries, tables), rows


def batch_of(
    positions: list[Tensor], contexts: list[int], queries: list[int], tables: Tensor
) -> ForwardBatch:
    total = sum(queries)
    start = torch.zeros(len(queries) + 1, dtype=torch.int32)
    start[1:] = torch.tensor(queries, dtype=torch.int32).cumsum(0)
    return ForwardBatch(
        token_ids=torch.zeros(total, dtype=torch.int64),
        positions=torch.cat([torch.zeros(0, dtype=torch.int64), *positions]),
        slot_mapping=torch.zeros(total, dtype=torch.int64),
        query_start=start,
        context_len=torch.tensor(contexts, dtype=torch.int32),
        block_tables=tables,
        logits_rows=torch.zeros(0, dtype=torch.int64),
        max_query_len=max(queries, default=0),
        max_context_len=max(contexts, default=0),
    )


def attention_reference(
    q: Tensor, keys: list[Tensor], values: list[Tensor], batch: ForwardBatch, scale: float
) -> Tensor:
    """q [T, H, a], keys [context, H, a], values [context, H, v] of each sequence, in float64."""
    out = []
    for s, (k, v) in enumerate(zip(keys, values, strict=True)):
        for row in range(int(batch.query_start[s]), int(batch.query_start[s + 1])):
            seen = int(batch.positions[row]) + 1
            scores = torch.einsum("ha,pha->hp", q[row].double(), k[:seen].double()) * scale
            out.append(torch.einsum("hp,phv->hv", scores.softmax(-1), v[:seen].double()))
    return torch.stack(out) if out else q.double()[..., : values[0].shape[-1] if values else 0]


ATTENTION_CASES = [
    ([1], [1], 16, 1, 32, 16),
    ([70, 3, 64], [1, 3, 2], 4, 4, 32, 16),
    ([200, 65], [37, 1], 16, 3, 48, 8),
    ([66, 5], [66, 5], 1, 16, 20, 4),
    ([600], [2], 16, 20, 64, 16),
    ([1100, 40], [1, 1], 16, 4, 32, 16),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("contexts, queries, block_size, heads, rank, rope", ATTENTION_CASES)
def test_latent_attention(
    kernels: Kernels,
    contexts: list[int],
    queries: list[int],
    block_size: int,
    heads: int,
    rank: int,
    rope: int,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(sum(contexts))
    layer, batch, rows = paged(contexts, queries, block_size, rank + rope, dtype)
    q = normal(sum(queries), heads, rank + rope + 6, dtype=dtype)
    q_latent, q_rope = q[..., :rank], q[..., rank + 6 :]
    scale = (rank + rope) ** -0.5
    got = kernels.latent_attention(q_latent, q_rope, layer, batch, scale)
    whole = torch.cat((q_latent, q_rope), -1)
    keys = [r.unsqueeze(1).expand(-1, heads, -1) for r in rows]
    want = attention_reference(whole, keys, [k[..., :rank] for k in keys], batch, scale)
    assert got.dtype == dtype
    close(got, want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("contexts, queries, block_size, heads, rank, rope", ATTENTION_CASES)
def test_naive_attention(
    kernels: Kernels,
    contexts: list[int],
    queries: list[int],
    block_size: int,
    heads: int,
    rank: int,
    rope: int,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(sum(contexts))
    nope, value = 24, 40
    layer, batch, rows = paged(contexts, queries, block_size, rank + rope, dtype)
    q = normal(sum(queries), heads, nope + rope, dtype=dtype)
    kv_b = normal(heads * (nope + value), rank, dtype=dtype, scale=rank**-0.5)
    scale = (nope + rope) ** -0.5
    got = kernels.naive_attention(q, layer, kernels.linear_weight(kv_b, dtype), batch, scale, value)
    keys, values = [], []
    for r in rows:
        wide = (r[:, :rank].double() @ kv_b.double().t()).to(dtype).view(len(r), heads, -1)
        k_rope = r[:, None, rank:].expand(-1, heads, -1)
        keys.append(torch.cat((wide[..., :nope], k_rope), -1))
        values.append(wide[..., nope:])
    close(got, attention_reference(q, keys, values, batch, scale), dtype, 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_an_empty_step(kernels: Kernels, dtype: torch.dtype) -> None:
    layer, batch, _ = paged([], [], 16, 48, dtype)
    q = normal(0, 4, 48, dtype=dtype)
    assert kernels.latent_attention(q[..., :32], q[..., 32:], layer, batch, 1.0).shape == (0, 4, 32)
    kv_b = kernels.linear_weight(normal(4 * 24, 32, dtype=dtype), dtype)
    assert kernels.naive_attention(q[..., :32], layer, kv_b, batch, 1.0, 8).shape == (0, 4, 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, heads, dim", [(0, 4, 16), (1, 1, 64), (7, 3, 6)])
def test_rope(kernels: Kernels, rows: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(dim)
    x = normal(rows, heads, dim + 8, dtype=dtype)[..., 8:]
    angle = torch.rand(40, dim // 2) * 6
    cos_sin = torch.cat((angle.cos(), angle.sin()), -1)
    positions = torch.randint(0, 40, (rows,))
    got = kernels.rope(x, positions, cos_sin)
    turn = torch.polar(torch.ones(rows, 1, dim // 2).double(), angle[positions].double()[:, None])
    pairs = torch.view_as_complex(x.double().reshape(rows, heads, dim // 2, 2)) * turn
    assert got.dtype == dtype and got.is_contiguous()
    close(got, torch.view_as_real(pairs).reshape(rows, heads, dim), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_cache(kernels: Kernels, dtype: torch.dtype) -> None:
    joined = normal(5, 50, dtype=dtype)
    layer = torch.zeros(4, 3, 24, dtype=dtype)
    slots = torch.tensor([11, 0, 4, 7, 2])
    kernels.write_cache(layer, joined[:, :16], joined[:, 20:28], slots)
    flat = layer.view(12, 24)
    assert torch.equal(flat[slots], torch.cat((joined[:, :16], joined[:, 20:28]), -1))
    untouched = [i for i in range(12) if i not in slots.tolist()]
    assert flat[untouched].abs().sum() == 0
    kernels.write_cache(layer, joined[:0, :16], joined[:0, 20:28], slots[:0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows, heads, a, b",
    [(0, 2, 4, 4), (1, 16, 128, 64), (7, 3, 32, 24), (9, 5, 9, 7), (40, 4, 16, 200)],
)
def test_per_head(
    kernels: Kernels, rows: int, heads: int, a: int, b: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(a + b)
    x = normal(rows, heads, a + 2, dtype=dtype)[..., :a]
    w = normal(heads * b, a, dtype=dtype)
    got = kernels.per_head(x, kernels.linear_weight(w, dtype), heads)
    want = torch.einsum("tha,hba->thb", x.double(), w.double().view(heads, b, a))
    close(got, want, dtype)


@pytest.mark.parametrize("rows, top_k, slots", [(0, 2, 3), (1, 1, 1), (7, 3, 5), (50, 6, 64)])
def test_sort_pairs(kernels: Kernels, rows: int, top_k: int, slots: int) -> None:
    torch.manual_seed(rows)
    ids = torch.randint(-1, slots, (rows, top_k), dtype=torch.int32)
    pair_rows, offsets, index = kernels.sort_pairs(ids, slots)
    assert (pair_rows.dtype, offsets.dtype, index.dtype) == (torch.int32, torch.int32, torch.int64)
    pairs = [(s, r, k) for r in range(rows) for k, s in enumerate(ids[r].tolist()) if s >= 0]
    pairs.sort()
    assert pair_rows.tolist() == [r for _, r, _ in pairs]
    assert offsets.tolist() == [sum(s < slot for s, _, _ in pairs) for slot in range(slots + 1)]
    assert index.shape == ids.shape
    for at, (_, row, k) in enumerate(pairs):
        assert index[row, k] == at
    assert int((index >= 0).sum()) == len(pairs)


@dataclass(frozen=True)
class Mla:
    """MlaWeights of one layer, packed by some kernels."""

    qkv_a: LinearWeight
    q_a_norm: Tensor | None
    q_b: LinearWeight | None
    kv_a_norm: Tensor
    w_uk: LinearWeight
    w_uv: LinearWeight
    o: LinearWeight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("query_rank", [None, 24])
@pytest.mark.parametrize("contexts, queries", [([], []), ([70, 3, 140], [1, 3, 2]), ([300], [270])])
def test_absorbed_mla_is_its_parts(
    kernels: Kernels,
    contexts: list[int],
    queries: list[int],
    query_rank: int | None,
    dtype: torch.dtype,
) -> None:
    """The fused layer: the same bits as kernel after kernel, in its output and in the cache."""
    torch.manual_seed(sum(contexts))
    hidden, heads, nope, rope, rank, value = 72, 3, 16, 8, 32, 20

    def packed(n: int, k: int) -> LinearWeight:
        return kernels.linear_weight(normal(n, k, dtype=dtype, scale=k**-0.5), dtype)

    first = query_rank or heads * (nope + rope)
    weights = Mla(
        qkv_a=packed(first + rank + rope, hidden),
        q_a_norm=None if query_rank is None else normal(query_rank),
        q_b=None if query_rank is None else packed(heads * (nope + rope), query_rank),
        kv_a_norm=normal(rank),
        w_uk=packed(heads * rank, nope),
        w_uv=packed(heads * value, rank),
        o=packed(hidden, heads * value),
    )
    shape = MlaShape(heads, nope, rope, rank, value, 0.2, 1e-6)
    cos_sin = normal(400, rope)
    layer, batch, _ = paged(contexts, queries, 16, rank + rope, dtype)
    slots = [
        int(batch.block_tables[s, p // 16]) * 16 + p % 16
        for s, (context, count) in enumerate(zip(contexts, queries, strict=True))
        for p in range(context - count, context)
    ]
    batch = replace(batch, slot_mapping=torch.tensor(slots, dtype=torch.int64))
    x = normal(sum(queries), hidden, dtype=dtype)
    by_parts, fused = layer.clone(), layer.clone()
    want = mla_by_parts(kernels, weights, shape, cos_sin)(x, by_parts, batch)
    got = kernels.absorbed_mla(weights, shape, cos_sin)(x, fused, batch)
    assert got.shape == (sum(queries), hidden)
    assert torch.equal(got, want)
    assert torch.equal(fused.view(torch.uint8), by_parts.view(torch.uint8))
    assert not got.isnan().any()
