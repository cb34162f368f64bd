"""Law 5 at the level of kernels: a row's bits depend on that row alone.

Each kernel is run on many rows and then on parts of them (alone, permuted, in other chunks, with
other block sizes, with one thread and two); every row must come out bitwise the same.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from models.deepseek.kernels.base import GateSpec, Kernels
from models.deepseek.kernels.errors import KernelsUnavailable
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
def kernels(request: pytest.FixtureRequest) -> Kernels:
    if request.param == "torch":
        return TorchKernels()
    try:
        return NativeKernels(VARIANTS[request.param])
    except KernelsUnavailable as error:
        pytest.skip(str(error).splitlines()[0])


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def normal(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).to(dtype)


def same_rows(
    call: Callable[[Tensor], Tensor], rows: int, set_threads: Callable[[int], None]
) -> None:
    """call(indices) computes those rows together."""
    set_threads(2)
    whole = call(torch.arange(rows))
    for threads in (1, 2):
        set_threads(threads)
        order = torch.randperm(rows)
        assert torch.equal(call(order), whole[order])
        at = 0
        for size in (1, 2, 3, 5, 7, 8, 13):  # every row in one part
            part = torch.arange(at, min(at + size, rows))
            assert torch.equal(call(part), whole[part]), f"rows {at}..{at + size - 1}"
            at += size
        assert torch.equal(call(torch.arange(rows)), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_rows(
    kernels: Kernels, dtype: torch.dtype, set_threads: Callable[[int], None]
) -> None:
    torch.manual_seed(1)
    rows, hidden, inter = 39, 200, 96
    x = normal(rows, hidden, dtype=dtype)
    weight = kernels.linear_weight(normal(330, hidden, dtype=dtype), dtype)
    same_rows(lambda i: kernels.linear(x[i], weight), rows, set_threads)
    gate_up = kernels.linear_weight(normal(2 * inter, hidden, dtype=dtype, scale=0.1), dtype)
    down = kernels.linear_weight(normal(hidden, inter, dtype=dtype, scale=0.1), dtype)
    same_rows(lambda i: kernels.mlp(x[i], gate_up, down), rows, set_threads)
    gain = normal(hidden)
    same_rows(lambda i: kernels.rms_norm(x[i], gain, 1e-6), rows, set_threads)
    heads = normal(rows, 3, 40, dtype=dtype)
    absorbed = kernels.linear_weight(normal(3 * 72, 40, dtype=dtype), dtype)
    same_rows(lambda i: kernels.per_head(heads[i], absorbed, 3), rows, set_threads)


def test_many_rows_and_few(kernels: Kernels) -> None:
    """Several row blocks of one product, against single rows of it."""
    torch.manual_seed(2)
    x = normal(500, 1030, dtype=torch.bfloat16)
    weight = kernels.linear_weight(normal(80, 1030, dtype=torch.bfloat16), torch.bfloat16)
    whole = kernels.linear(x, weight)
    for row in (0, 77, 239, 240, 499):
        assert torch.equal(kernels.linear(x[row : row + 1], weight)[0], whole[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_gate_rows(
    kernels: Kernels, dtype: torch.dtype, scoring: str, set_threads: Callable[[int], None]
) -> None:
    torch.manual_seed(3)
    x, weight, bias = (
        normal(39, 100, dtype=dtype),
        normal(40, 100, scale=0.1),
        normal(40, scale=0.1),
    )
    spec = GateSpec(6, 8, 4, scoring, "top2", True, 2.5)
    for part in (0, 1):
        same_rows(
            lambda i, part=part: kernels.gate(x[i], weight, bias, spec)[part], 39, set_threads
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_expert_rows(
    kernels: Kernels, dtype: torch.dtype, set_threads: Callable[[int], None]
) -> None:
    """A token's expert rows, and their sum, whatever else is routed and wherever experts lie."""
    torch.manual_seed(4)
    rows, experts, hidden, inter, top_k = 39, 8, 72, 40, 3
    x = normal(rows, hidden, dtype=dtype)
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(rows)])
    weights = torch.rand(rows, top_k)
    parts = [
        (
            normal(inter, hidden, dtype=dtype, scale=0.1),
            normal(inter, hidden, dtype=dtype, scale=0.1),
            normal(hidden, inter, dtype=dtype, scale=0.1),
        )
        for _ in range(experts)
    ]

    def run_with(place: list[int]) -> Callable[[Tensor], Tensor]:
        """place[expert] is its slot."""
        stacked = kernels.allocate_experts(experts, hidden, inter, dtype)
        for expert, slot in enumerate(place):
            stacked.store(slot, *parts[expert])

        def call(i: Tensor) -> Tensor:
            slots = torch.tensor(place)[ids[i]].flatten()
            order = slots.argsort(stable=True)
            offsets = torch.zeros(experts + 1, dtype=torch.int32)
            offsets[1:] = torch.bincount(slots, minlength=experts).cumsum(0)
            y = kernels.experts(x[i], (order // top_k).int(), offsets, stacked)
            return kernels.combine_pairs(y, order.argsort().view(-1, top_k), weights[i])

        return call

    straight = run_with(list(range(experts)))
    same_rows(straight, rows, set_threads)
    moved = run_with(torch.randperm(experts).tolist())
    assert torch.equal(moved(torch.arange(rows)), straight(torch.arange(rows)))


# -- attention -------------------------------------------------------------------------------


def one_sequence(
    rows: Tensor, first: int, count: int, block_size: int, dtype: torch.dtype
) -> tuple[Tensor, ForwardBatch]:
    """A cache that holds rows[: first + count] of one sequence and NaN elsewhere; the batch of its
    positions first .. first + count - 1."""
    context = first + count
    blocks = -(-context // block_size)
    layer = torch.full((blocks + 2, block_size, rows.shape[1]), math.nan, dtype=dtype)
    table = torch.randperm(blocks + 2)[:blocks].int().view(1, -1)
    for p in range(context):
        layer[table[0, p // block_size], p % block_size] = rows[p]
    return layer, batch_of([(first, count)], table)


def batch_of(spans: list[tuple[int, int]], tables: Tensor) -> ForwardBatch:
    counts = [count for _, count in spans]
    start = torch.zeros(len(spans) + 1, dtype=torch.int32)
    start[1:] = torch.tensor(counts, dtype=torch.int32).cumsum(0)
    return ForwardBatch(
        token_ids=torch.zeros(sum(counts), dtype=torch.int64),
        positions=torch.cat([torch.arange(first, first + count) for first, count in spans]),
        slot_mapping=torch.zeros(sum(counts), dtype=torch.int64),
        query_start=start,
        context_len=torch.tensor([first + count for first, count in spans], dtype=torch.int32),
        block_tables=tables,
        logits_rows=torch.zeros(0, dtype=torch.int64),
        max_query_len=max(counts),
        max_context_len=max(first + count for first, count in spans),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [3, 16])
def test_attention_chunks_blocks_threads(
    kernels: Kernels, dtype: torch.dtype, heads: int, set_threads: Callable[[int], None]
) -> None:
    """All queries at once against chunks of 1, 3, 5, 64, over blocks of 1, 4, 16 and 7."""
    torch.manual_seed(heads)
    length, rank, rope, scale = 140, 32, 16, 0.15
    rows = normal(length, rank + rope, dtype=dtype)
    q = normal(length, heads, rank + rope, dtype=dtype)

    def run(first: int, count: int, block_size: int) -> Tensor:
        layer, batch = one_sequence(rows, first, count, block_size, dtype)
        part = q[first : first + count]
        return kernels.latent_attention(part[..., :rank], part[..., rank:], layer, batch, scale)

    set_threads(2)
    whole = run(0, length, 16)
    cuts = ((1, 64, 1), (4, 5, 2), (16, 64, 1), (7, 3, 2), (16, 140, 1))
    if kernels.name == "torch":  # a Python loop: two of them say enough
        cuts = cuts[:2]
    for block_size, chunk, threads in cuts:
        set_threads(threads)
        for first in range(0, length, chunk):
            count = min(chunk, length - first)
            assert torch.equal(run(first, count, block_size), whole[first : first + count])
    for row in (0, 1, 62, 63, 64, 65, 127, 128, 139):
        assert torch.equal(run(row, 1, 4)[0], whole[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_over_several_spans(
    kernels: Kernels, dtype: torch.dtype, set_threads: Callable[[int], None]
) -> None:
    """A long context, where one query is split over the threads, against many queries."""
    torch.manual_seed(6)
    first, count, rank, rope, heads, scale = 1500, 30, 32, 16, 4, 0.15
    rows = normal(first + count, rank + rope, dtype=dtype)
    q = normal(count, heads, rank + rope, dtype=dtype)

    def run(begin: int, end: int, threads: int) -> Tensor:
        set_threads(threads)
        layer, batch = one_sequence(rows, first + begin, end - begin, 16, dtype)
        part = q[begin:end]
        return kernels.latent_attention(part[..., :rank], part[..., rank:], layer, batch, scale)

    whole = run(0, count, 1)
    assert torch.equal(run(0, count, 2), whole)
    for begin, end in ((0, 1), (29, 30), (35 - 24, 40 - 24), (12, 13)):
        for threads in (1, 2):
            assert torch.equal(run(begin, end, threads), whole[begin:end])


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_in_company(
    kernels: Kernels, dtype: torch.dtype, set_threads: Callable[[int], None]
) -> None:
    """Sequences together and alone, over one shared cache."""
    torch.manual_seed(7)
    set_threads(2)
    rank, rope, heads, block = 32, 16, 6, 4
    spans = [(0, 5), (99, 1), (600, 3), (63, 2), (0, 1)]
    ends = [first + count for first, count in spans]
    layer = torch.full((300, block, rank + rope), math.nan, dtype=dtype)
    free = torch.randperm(300).tolist()
    tables = torch.full((len(spans), 160), -1, dtype=torch.int32)
    for s, end in enumerate(ends):
        for b in range(-(-end // block)):
            tables[s, b] = free.pop()
            used = min(block, end - b * block)
            layer[tables[s, b], :used] = normal(used, rank + rope, dtype=dtype)
    q = normal(sum(count for _, count in spans), heads, rank + rope, dtype=dtype)
    together = kernels.latent_attention(
        q[..., :rank], q[..., rank:], layer, batch_of(spans, tables), 0.15
    )
    at = 0
    for s, (first, count) in enumerate(spans):
        part = q[at : at + count]
        alone = kernels.latent_attention(
            part[..., :rank],
            part[..., rank:],
            layer,
            batch_of([(first, count)], tables[s : s + 1]),
            0.15,
        )
        assert torch.equal(alone, together[at : at + count])
        at += count
    assert not together.isnan().any()


# -- threads ---------------------------------------------------------------------------------


def test_callers_on_many_threads(set_threads: Callable[[int], None]) -> None:
    """One instance used by five Python threads at once: each gets its own rows right."""
    try:
        kernels = NativeKernels()
    except KernelsUnavailable as error:
        pytest.skip(str(error).splitlines()[0])
    torch.manual_seed(8)
    x = normal(40, 256, dtype=torch.bfloat16)
    gate_up = kernels.linear_weight(normal(512, 256, dtype=torch.bfloat16), torch.bfloat16)
    down = kernels.linear_weight(normal(256, 256, dtype=torch.bfloat16), torch.bfloat16)
    set_threads(1)
    want = kernels.mlp(x, gate_up, down)
    set_threads(3)
    wrong: list[int] = []

    def run(number: int) -> None:
        for turn in range(60):
            first = (number * 7 + turn) % 40
            count = 1 + turn % 9
            got = kernels.mlp(x[first : first + count], gate_up, down)
            if not torch.equal(got, want[first : first + count]):
                wrong.append(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_forked_child_works_alone(set_threads: Callable[[int], None]) -> None:
    """The helpers stay behind in the parent; the child must neither wait for them nor differ."""
    try:
        kernels = NativeKernels()
    except KernelsUnavailable as error:
        pytest.skip(str(error).splitlines()[0])
    torch.manual_seed(9)
    x = normal(9, 512)
    weight = kernels.linear_weight(normal(700, 512), torch.float32)
    set_threads(2)
    want = kernels.linear(x, weight)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(kernels.linear(x, weight), want) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
