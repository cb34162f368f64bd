"""Times every kernel against the best that plain torch offers, on this machine, now.

`moeserve bench kernels` shows it. Ours and torch's runs alternate, so that a busy neighbour hurts
both; the ratio is the median of paired ratios. Weights rotate through copies larger than any cache,
as they do in a model. Shapes: a layer of a 1.7 B V3-shaped model (hidden 1024, 64 experts of 704,
16 heads, latent 512 + 64).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor

from models.deepseek.kernels.base import GateSpec, Kernels
from models.interface import ForwardBatch

HIDDEN, EXPERTS, TOP_K, INTER = 1024, 64, 6, 704
HEADS, RANK, ROPE, NOPE, VALUE = 16, 512, 64, 128, 128
COLD_BYTES = 192 << 20  # weights that rotate: several times the last-level cache
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """One row of the table. flops and bytes are of one call; theirs None: torch has no match."""

    name: str
    ours: Callable[[], object]
    theirs: Callable[[], object] | None
    flops: float
    bytes: float


@dataclass(frozen=True)
class Limits:
    gflops: float
    gbytes: float


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure_limits() -> Limits:
    """The most this machine did just now: bf16 product of torch, one read of 256 MiB."""
    x, w = torch.randn(1024, 2048).to(BF16), torch.randn(4096, 2048).to(BF16)
    product = min(seconds(lambda: F.linear(x, w)) for _ in range(12))
    big = torch.ones(64 << 20)
    read = min(seconds(big.sum) for _ in range(12))
    return Limits(2 * 1024 * 2048 * 4096 / product / 1e9, big.nbytes / read / 1e9)


def rotating(make: Callable[[], Tensor]) -> list[Tensor]:
    first = make()
    return [first, *(make() for _ in range(max(1, COLD_BYTES // first.nbytes)))]


def linear_case(kernels: Kernels, rows: int, n: int, k: int, dtype: torch.dtype) -> Case:
    x = torch.randn(rows, k).to(dtype)
    plain = rotating(lambda: torch.randn(n, k).to(dtype))
    packed = cycle([kernels.linear_weight(w, dtype) for w in plain])
    turn = cycle(plain)
    size = dtype.itemsize
    return Case(
        f"linear {str(dtype)[6:]} {rows}x{k}x{n}",
        lambda: kernels.linear(x, next(packed)),
        lambda: F.linear(x, next(turn)),
        2.0 * rows * n * k,
        (n * k + rows * (n + k)) * size,
    )


def mlp_case(kernels: Kernels, rows: int) -> Case:
    x = torch.randn(rows, HIDDEN).to(BF16)
    gate_up = rotating(lambda: (torch.randn(2 * INTER, HIDDEN) / 32).to(BF16))
    down = [(torch.randn(HIDDEN, INTER) / 32).to(BF16) for _ in gate_up]
    pairs = cycle(list(zip(gate_up, down, strict=True)))
    packed = cycle(
        [
            (kernels.linear_weight(a, BF16), kernels.linear_weight(b, BF16))
            for a, b in zip(gate_up, down, strict=True)
        ]
    )

    def theirs() -> Tensor:
        first, second = next(pairs)
        gate, up = F.linear(x, first).chunk(2, -1)
        return F.linear(F.silu(gate) * up, second)

    def ours() -> Tensor:
        return kernels.mlp(x, *next(packed))

    return Case(f"mlp {rows} rows", ours, theirs, 6.0 * rows * INTER * HIDDEN, 6.0 * INTER * HIDDEN)


def routed(rows: int) -> tuple[Tensor, Tensor]:
    flat = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(rows)]).flatten()
    order = flat.argsort(stable=True)
    offsets = torch.zeros(EXPERTS + 1, dtype=torch.int32)
    offsets[1:] = torch.bincount(flat, minlength=EXPERTS).cumsum(0)
    return (order // TOP_K).int(), offsets


def experts_case(kernels: Kernels, rows: int) -> Case:
    x = torch.randn(rows, HIDDEN).to(BF16)
    stacked = kernels.allocate_experts(EXPERTS, HIDDEN, INTER, BF16)
    gate_up = (torch.randn(EXPERTS, 2 * INTER, HIDDEN) / 32).to(BF16)
    down = (torch.randn(EXPERTS, HIDDEN, INTER) / 32).to(BF16)
    for slot in range(EXPERTS):
        stacked.store(slot, gate_up[slot, :INTER], gate_up[slot, INTER:], down[slot])
    routes = cycle([routed(rows) for _ in range(16)])
    ours_routes = cycle([routed(rows) for _ in range(16)])

    def theirs() -> Tensor:
        pair_rows, offsets = next(routes)
        bounds = offsets.tolist()
        out = torch.empty(len(pair_rows), HIDDEN, dtype=BF16)
        for slot in range(EXPERTS):
            start, stop = bounds[slot], bounds[slot + 1]
            if start < stop:
                gate, up = F.linear(x[pair_rows[start:stop]], gate_up[slot]).chunk(2, -1)
                out[start:stop] = F.linear(F.silu(gate) * up, down[slot])
        return out

    used = statistics.mean(
        int((offsets.diff() > 0).sum()) for _, offsets in (routed(rows) for _ in range(16))
    )
    return Case(
        f"experts {rows} tokens",
        lambda: kernels.experts(x, *next(ours_routes), stacked),
        theirs,
        6.0 * rows * TOP_K * INTER * HIDDEN,
        used * 6.0 * INTER * HIDDEN,
    )


def gate_case(kernels: Kernels, rows: int) -> Case:
    x = torch.randn(rows, HIDDEN).to(BF16)
    weight, bias = torch.randn(EXPERTS, HIDDEN) / 32, torch.randn(EXPERTS) / 10
    spec = GateSpec(TOP_K, 8, 4, "sigmoid", "top2", True, 2.5)

    def theirs() -> Tensor:
        scores = torch.sigmoid(F.linear(x.float(), weight))
        choice = (scores + bias).view(rows, 8, -1)
        kept = choice.topk(2, -1).values.sum(-1).topk(4, -1).indices
        mask = torch.ones(rows, 8, dtype=torch.bool).scatter_(1, kept, False)
        choice = choice.masked_fill(mask.unsqueeze(-1), float("-inf")).flatten(1)
        weights = scores.gather(1, choice.topk(TOP_K, -1).indices)
        return weights / weights.sum(-1, keepdim=True) * 2.5

    flops = 2.0 * rows * EXPERTS * HIDDEN
    return Case(
        f"gate {rows} rows",
        lambda: kernels.gate(x, weight, bias, spec),
        theirs,
        flops,
        4.0 * EXPERTS * HIDDEN + 2.0 * rows * HIDDEN,
    )


def norm_case(kernels: Kernels, rows: int) -> Case:
    x, residual = torch.randn(rows, HIDDEN).to(BF16), torch.zeros(rows, HIDDEN, dtype=BF16)
    weight = torch.ones(HIDDEN)
    narrow = weight.to(BF16)

    def theirs() -> Tensor:
        residual.add_(x)
        return F.rms_norm(residual, (HIDDEN,), narrow, 1e-6)

    return Case(
        f"add_rms_norm {rows} rows",
        lambda: kernels.add_rms_norm(residual, x, weight, 1e-6),
        theirs,
        4.0 * rows * HIDDEN,
        8.0 * rows * HIDDEN,
    )


def batch_for(context: int, queries: int, sequences: int, block: int) -> ForwardBatch:
    per = -(-context // block)
    tables = torch.randperm(per * sequences).int().view(sequences, per)
    start = torch.arange(sequences + 1, dtype=torch.int32) * queries
    total = queries * sequences
    return ForwardBatch(
        token_ids=torch.zeros(total, dtype=torch.int64),
        positions=torch.arange(context - queries, context).repeat(sequences),
        slot_mapping=torch.zeros(total, dtype=torch.int64),
        query_start=start,
        context_len=torch.full((sequences,), context, dtype=torch.int32),
        block_tables=tables,
        logits_rows=torch.zeros(0, dtype=torch.int64),
        max_query_len=queries,
        max_context_len=context,
    )


def attention_case(
    kernels: Kernels, sequences: int, context: int, queries: int, naive: bool = False
) -> Case:
    batch = batch_for(context, queries, sequences, 16)
    total, width = queries * sequences, RANK + ROPE
    layer = torch.randn(batch.block_tables.numel(), 16, width).to(BF16)
    seen = (context - (queries - 1) / 2) * total  # (query, position) pairs
    cached = 2.0 * sequences * context * width
    if naive:
        q = torch.randn(total, HEADS, NOPE + ROPE).to(BF16)
        plain = (torch.randn(HEADS * (NOPE + VALUE), RANK) / 22).to(BF16)
        kv_b = kernels.linear_weight(plain, BF16)
        scale = (NOPE + ROPE) ** -0.5

        def theirs_naive() -> Tensor:
            rows = layer[batch.block_tables.long()].view(sequences, -1, width)[:, :context]
            wide = F.linear(rows[..., :RANK], plain).view(sequences, context, HEADS, -1)
            k_rope = rows[:, :, None, RANK:].expand(-1, -1, HEADS, -1)
            keys = torch.cat((wide[..., :NOPE], k_rope), -1).transpose(1, 2)
            values = wide[..., NOPE:].transpose(1, 2)
            query = q.view(sequences, queries, HEADS, -1).transpose(1, 2)
            return F.scaled_dot_product_attention(
                query, keys, values, is_causal=queries == context, scale=scale
            )

        expand = 2.0 * sequences * context * RANK * HEADS * (NOPE + VALUE)
        return Case(
            f"naive attention {sequences} x {queries} of {context}",
            lambda: kernels.naive_attention(q, layer, kv_b, batch, scale, VALUE),
            theirs_naive,
            2.0 * seen * HEADS * (NOPE + ROPE + VALUE) + expand,
            cached,
        )
    q_latent = torch.randn(total, HEADS, RANK).to(BF16)
    q_rope = torch.randn(total, HEADS, ROPE).to(BF16)
    hidden = torch.ones(queries, context, dtype=torch.bool).triu(context - queries + 1)

    def theirs() -> Tensor:
        rows = layer[batch.block_tables.long()].view(sequences, -1, width)[:, :context]
        query = torch.cat((q_latent, q_rope), -1).view(sequences, queries * HEADS, width)
        scores = (query @ rows.transpose(1, 2)).float() * 0.07
        if queries > 1:
            scores = scores.view(sequences, queries, HEADS, context)
            scores = scores.masked_fill(hidden[:, None], float("-inf"))
            scores = scores.view(sequences, queries * HEADS, context)
        return scores.softmax(-1).to(BF16) @ rows[..., :RANK]

    return Case(
        f"latent attention {sequences} x {queries} of {context}",
        lambda: kernels.latent_attention(q_latent, q_rope, layer, batch, 0.07),
        theirs,
        2.0 * seen * HEADS * (2 * RANK + ROPE),
        cached,
    )


def per_head_case(kernels: Kernels, rows: int) -> Case:
    x = torch.randn(rows, HEADS, NOPE).to(BF16)
    plain = rotating(lambda: torch.randn(HEADS * RANK, NOPE).to(BF16))
    packed = cycle([kernels.linear_weight(w, BF16) for w in plain])
    turn = cycle([w.view(HEADS, RANK, NOPE).transpose(1, 2).contiguous() for w in plain])
    return Case(
        f"per_head {rows} rows",
        lambda: kernels.per_head(x, next(packed), HEADS),
        lambda: torch.bmm(x.transpose(0, 1), next(turn)),
        2.0 * rows * HEADS * RANK * NOPE,
        2.0 * HEADS * RANK * NOPE,
    )


@dataclass(frozen=True)
class Maker:
    """name: of the case that it makes. Only one case's weights are in memory at a time."""

    name: str
    make: Callable[[], Case]


def all_cases(kernels: Kernels) -> list[Maker]:
    makers: list[Maker] = []

    def add(name: str, case: Callable[..., Case], *sizes: object, **more: object) -> None:
        makers.append(Maker(name, partial(case, kernels, *sizes, **more)))

    for rows in (1, 4, 8, 16, 32, 128, 1024):
        add(f"linear bfloat16 {rows}x{HIDDEN}x4096", linear_case, rows, 4096, HIDDEN, BF16)
    add(f"linear bfloat16 1x{HIDDEN}x576", linear_case, 1, 576, HIDDEN, BF16)
    for rows in (1, 8, 1024):
        add(f"linear float32 {rows}x{HIDDEN}x4096", linear_case, rows, 4096, HIDDEN, torch.float32)
    for rows in (1, 8, 32, 1024):
        add(f"experts {rows} tokens", experts_case, rows)
    for rows in (1, 32, 1024):
        add(f"mlp {rows} rows", mlp_case, rows)
        add(f"gate {rows} rows", gate_case, rows)
        add(f"add_rms_norm {rows} rows", norm_case, rows)
        add(f"per_head {rows} rows", per_head_case, rows)
    for one in ((1, 512, 1), (32, 512, 1), (1, 8192, 1), (1, 1024, 1024)):
        add(f"latent attention {one[0]} x {one[2]} of {one[1]}", attention_case, *one)
    add("naive attention 1 x 1024 of 1024", attention_case, 1, 1024, 1024, naive=True)
    return makers


def run_case(case: Case, budget: float) -> tuple[float, float | None, float | None]:
    """Median seconds of ours and theirs, and the median of paired ratios theirs / ours."""
    case.ours()
    if case.theirs:
        case.theirs()
    ours: list[float] = []
    theirs: list[float] = []
    end = time.perf_counter() + budget
    while len(ours) < 5 or (time.perf_counter() < end and len(ours) < 400):
        ours.append(seconds(case.ours))
        if case.theirs:
            theirs.append(seconds(case.theirs))
    if not theirs:
        return statistics.median(ours), None, None
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    return statistics.median(ours), statistics.median(theirs), statistics.median(ratios)


@dataclass(frozen=True)
class Row:
    """One kernel, measured: seconds of a call (medians), ratio theirs / ours of pairs, and shares
    of what this machine did in the same run."""

    kernel: str
    ours: float
    theirs: float | None
    ratio: float | None
    gflops: float
    of_peak: float
    gbytes: float
    of_read: float


def measure(case: Case, limits: Limits, budget: float) -> Row:
    """budget: seconds for it."""
    ours, theirs, ratio = run_case(case, budget)
    gflops, gbytes = case.flops / ours / 1e9, case.bytes / ours / 1e9
    return Row(
        case.name,
        ours,
        theirs,
        ratio,
        gflops,
        gflops / limits.gflops,
        gbytes,
        gbytes / limits.gbytes,
    )
