"""Every kernel of every implementation against a float64 reference, over ragged shapes.

The native library is built four times: as this machine has it, and without BF16, AVX-512 and all
SIMD instructions, so that the paths of other machines are checked here too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from models.deepseek.kernels.base import GateSpec, Kernels, LinearWeight, MlaShape
from models.deepseek.kernels.errors import KernelsUnavailable
from models.deepseek.kernels.mla_parts import mla_by_parts
from models.deepseek.kernels.native_kernels import NativeKernels
from models.deepseek.kernels.torch_kernels import TorchKernels
from models.interface import ForwardBatch

VARIANTS = {
    "native": (),
    "native-no-bf16": ("MOESERVE_NO_BF16",),
    "native-avx2": ("MOESERVE_NO_AVX512",),
    "native-portable": ("MOESERVE_NO_SIMD",),
}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module", params=["torch", *VARIANTS])
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    before = torch.get_num_threads()
    torch.set_num_threads(1 if request.param == "torch" else 2)
    try:
        yield TorchKernels() if request.param == "torch" else NativeKernels(VARIANTS[request.param])
    except KernelsUnavailable as error:
        pytest.skip(str(error).splitlines()[0])
    finally:
        torch.set_num_threads(before)


def normal(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).to(dtype)


def close(got: Tensor, want: Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
    """want is float64. float32: 2e-5 of the typical size; bfloat16: its rounding, twice."""
    assert got.shape == want.shape
    if want.numel() == 0:
        return
    size = max(want.abs().max().item(), 1e-6) * scale
    limit = (2e-5 if dtype == torch.float32 else 1.2e-2) * size
    error = (got.double() - want).abs().max().item()
    assert error <= limit, f"error {error}, limit {limit}"


def spec(
    top_k: int = 4,
    num_groups: int = 1,
    topk_groups: int = 1,
    scoring: str = "sigmoid",
    group_score: str = "top2",
    renormalise: bool = True,
    scale: float = 2.5,
) -> GateSpec:
    return GateSpec(top_k, num_groups, topk_groups, scoring, group_score, renormalise, scale)


# -- dense -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows, n, k",
    [(0, 8, 8), (1, 1, 1), (7, 33, 17), (33, 200, 130), (5, 576, 64), (300, 70, 96), (13, 48, 513)],
)
def test_linear(kernels: Kernels, rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows + n + k)
    x, w = normal(rows, k, dtype=dtype), normal(n, k, dtype=dtype)
    weight = kernels.linear_weight(w, dtype)
    assert torch.equal(weight.unpack(), w)
    assert (weight.out_features, weight.in_features) == (n, k)
    want = x.double() @ w.double().t()
    close(kernels.linear(x, weight), want, dtype)
    for out_dtype in DTYPES:
        got = kernels.linear(x, weight, out_dtype)
        assert got.dtype == out_dtype
        close(got, want, out_dtype)
    wide = torch.cat((x, normal(rows, 3, dtype=dtype)), dim=1)
    assert torch.equal(kernels.linear(wide[:, :k], weight), kernels.linear(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, width", [(0, 16), (1, 7), (7, 100), (33, 512)])
def test_rms_norm(kernels: Kernels, rows: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows + width)
    x, weight = normal(rows, width + 5, dtype=dtype)[:, :width], normal(width)
    other = normal(rows, width, dtype=dtype)

    def want(rows_: Tensor) -> Tensor:
        rows_ = rows_.double()
        inverse = (rows_.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        return rows_ * inverse * weight.double()

    got = kernels.rms_norm(x, weight, 1e-6)
    assert got.dtype == dtype and got.is_contiguous()
    close(got, want(x), dtype)
    residual, total = x.clone(), (x.float() + other.float()).to(dtype)
    got = kernels.add_rms_norm(residual, other, weight, 1e-6)
    assert torch.equal(residual, total)
    close(got, want(total), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows, hidden, inter", [(0, 8, 8), (1, 64, 128), (7, 33, 21), (50, 96, 80)]
)
def test_mlp(kernels: Kernels, rows: int, hidden: int, inter: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows + inter)
    x = normal(rows, hidden, dtype=dtype)
    gate_up = normal(2 * inter, hidden, dtype=dtype, scale=hidden**-0.5)
    down = normal(hidden, inter, dtype=dtype, scale=inter**-0.5)
    got = kernels.mlp(x, kernels.linear_weight(gate_up, dtype), kernels.linear_weight(down, dtype))
    close(got, gated(x, gate_up[:inter], gate_up[inter:], down), dtype, 2)


def gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    wide = x.double()
    left = wide @ gate.double().t()
    hidden = left * torch.sigmoid(left) * (wide @ up.double().t())
    return hidden.to(x.dtype).double() @ down.double().t()


# -- experts ---------------------------------------------------------------------------------


def gate_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, s: GateSpec
) -> tuple[list[list[int]], list[list[float]]]:
    """Row by row in Python, in the order the protocol states."""
    ids, weights = [], []
    for row in x.double() @ weight.double().t():
        score = torch.sigmoid(row) if s.scoring == "sigmoid" else torch.softmax(row, -1)
        choice = score if bias is None else score + bias.double()
        size = len(choice) // s.num_groups
        if s.num_groups > 1:
            counted = 2 if s.group_score == "top2" else 1
            groups = [
                sum(sorted(choice[g * size : (g + 1) * size].tolist())[::-1][:counted])
                for g in range(s.num_groups)
            ]
            order = sorted(range(s.num_groups), key=lambda g: (-groups[g], g))
            kept = set(order[: s.topk_groups])
            fill = -math.inf if s.scoring == "sigmoid" else 0.0
            choice = torch.tensor(
                [c if i // size in kept else fill for i, c in enumerate(choice.tolist())],
                dtype=torch.float64,
            )
        picked = sorted(range(len(choice)), key=lambda i: (-choice[i].item(), i))[: s.top_k]
        chosen = [score[i].item() for i in picked]
        total = sum(chosen) + 1e-20 if s.renormalise else 1.0
        ids.append(picked)
        weights.append([c / total * s.scale for c in chosen])
    return ids, weights


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows, experts, hidden, bias_at, s",
    [
        (0, 8, 16, 0.0, spec()),
        (1, 64, 70, 0.0, spec(6)),
        (33, 256, 128, 0.3, spec(8, 8, 4)),
        (7, 16, 33, -5.0, spec(4, 4, 2)),  # negative choice scores in every group
        (9, 40, 64, None, spec(6, 1, 1, "softmax", "max", False, 1.0)),
        (9, 160, 64, None, spec(6, 8, 3, "softmax", "max", False, 16.0)),
        (3, 6, 8, 0.1, spec(6, 6, 6)),  # groups of one
    ],
)
def test_gate(
    kernels: Kernels,
    rows: int,
    experts: int,
    hidden: int,
    bias_at: float | None,
    s: GateSpec,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(rows + experts)
    x, weight = normal(rows, hidden, dtype=dtype), normal(experts, hidden, scale=hidden**-0.5)
    bias = None if bias_at is None else bias_at + 0.2 * normal(experts)
    ids, weights = kernels.gate(x, weight, bias, s)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    want_ids, want_weights = gate_reference(x, weight, bias, s)
    assert ids.tolist() == want_ids
    close(
        weights, torch.tensor(want_weights, dtype=torch.float64).view(rows, s.top_k), weights.dtype
    )


def test_gate_gives_ties_to_the_lowest_id(kernels: Kernels) -> None:
    weight = torch.zeros(16, 8)
    x = torch.ones(2, 8)
    ids, _ = kernels.gate(x, weight, None, spec(4, 4, 2))
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    bias = torch.zeros(16)
    bias[[5, 13]] = 1.0
    ids, _ = kernels.gate(x, weight, bias, spec(4, 4, 2))
    assert ids.tolist() == [[5, 13, 4, 6]] * 2
    ids, _ = kernels.gate(x, weight, None, spec(3, 1, 1, "softmax", "max", False, 1.0))
    assert ids.tolist() == [[0, 1, 2]] * 2


def route(rows: int, slots: int, top_k: int, used: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs sorted by slot over the first `used` slots: pair_rows, offsets, index [T, K]."""
    ids = torch.stack([torch.randperm(used)[:top_k] for _ in range(rows)]) if rows else None
    flat = ids.flatten() if ids is not None else torch.zeros(0, dtype=torch.int64)
    order = flat.argsort(stable=True)
    offsets = torch.zeros(slots + 1, dtype=torch.int32)
    offsets[1:] = torch.bincount(flat, minlength=slots).cumsum(0)
    return (order // top_k).int(), offsets, order.argsort().view(rows, top_k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows, slots, used, hidden, inter",
    [(0, 4, 4, 16, 16), (1, 8, 5, 64, 128), (7, 6, 3, 33, 21), (90, 5, 4, 80, 72)],
)
def test_experts(
    kernels: Kernels,
    rows: int,
    slots: int,
    used: int,
    hidden: int,
    inter: int,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(rows + inter)
    x = normal(rows, hidden, dtype=dtype)
    stacked = kernels.allocate_experts(slots, hidden, inter, dtype)
    parts = []
    for slot in range(slots):
        gate = normal(inter, hidden, dtype=dtype, scale=hidden**-0.5)
        up = normal(inter, hidden, dtype=dtype, scale=hidden**-0.5)
        down = normal(hidden, inter, dtype=dtype, scale=inter**-0.5)
        stacked.store(slot, gate, up, down)
        parts.append((gate, up, down))
    for slot in range(slots):
        assert all(torch.equal(a, b) for a, b in zip(stacked.fetch(slot), parts[slot], strict=True))
    pair_rows, offsets, index = route(rows, slots, 3, used)
    got = kernels.experts(x, pair_rows, offsets, stacked)
    want = torch.zeros(got.shape, dtype=torch.float64)
    for slot in range(slots):
        pairs = slice(int(offsets[slot]), int(offsets[slot + 1]))
        want[pairs] = gated(x[pair_rows[pairs].long()], *parts[slot])
    close(got, want, dtype, 2)

    moved = kernels.allocate_experts(slots, hidden, inter, dtype)
    for slot in range(slots):
        assert stacked.bundle(slot).dtype == torch.uint8
        moved.bundle(slot).copy_(stacked.bundle(slot))
    assert torch.equal(kernels.experts(x, pair_rows, offsets, moved), got)

    weights = torch.rand(rows, 3)
    index[::2, 1] = -1
    combined = kernels.combine_pairs(got, index, weights)
    total = torch.zeros(rows, hidden, dtype=torch.float64)
    for k in range(3):
        here = index[:, k] >= 0
        total[here] += got[index[here, k]].double() * weights[here, k].double().unsqueeze(1)
    assert combined.dtype == torch.float32
    close(combined, total, torch.float32)


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
