"""The largest logit of each row and its lowest id; with it the sums that a softmax needs.

Rows are cut in chunks, a program each, so that few rows fill a GPU as well; who comes after joins a
row's chunks in one order (law 5). Greedy decoding needs no more than this.

Shape letters: B rows, V vocabulary, C chunks of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.deepseek.kernels.gpu.aot import CompileCase
from models.deepseek.kernels.gpu.cost import KernelCost
from models.deepseek.kernels.gpu.errors import ShapeRefused
from models.deepseek.kernels.gpu.language import tl, triton

CHUNK = 4096  # ids of a program: 32 blocks of the race (sampling.py)


@triton.jit
def peak_kernel(
    logits, temperature, peaks, ids, sums, stride, vocab, chunks,
    chunk: tl.constexpr, with_sums: tl.constexpr,
):  # fmt: skip
    """logits [B, V] fp32 -> of each chunk the largest [B, C] fp32, its lowest id [B, C] int32, and
    (with_sums) the sum of exp((l - largest) / temperature) [B, C] fp32. A NaN counts as infinite.
    Bytes: 4BV. FLOPs none on matrix units: bound by bytes, 3BV comparisons, with sums 4BV
    operations more. Programs: rows, chunks."""
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = number * chunk + tl.arange(0, chunk)
    value = tl.load(logits + row * stride + at, mask=at < vocab, other=float("-inf"))
    value = tl.where(value == value, value, float("inf"))
    peak = tl.max(value, axis=0)
    place = row * chunks + number
    tl.store(peaks + place, peak)
    tl.store(ids + place, tl.min(tl.where((value == peak) & (at < vocab), at, vocab), axis=0))
    if with_sums:
        heat = tl.load(temperature + row)
        heat = tl.where(heat > 0, heat, 1.0)
        top = tl.where(peak == float("-inf"), 0.0, peak)  # a chunk of -inf sums to 0
        raised = tl.exp(tl.div_rn(value, heat) - tl.div_rn(top, heat))
        tl.store(sums + place, tl.sum(raised, axis=0))


@triton.jit
def best_of_row(peaks, ids, row, chunks, vocab, block_c: tl.constexpr):
    """-> largest logit, its lowest id."""
    at = tl.arange(0, block_c)
    peak = tl.load(peaks + row * chunks + at, mask=at < chunks, other=float("-inf"))
    top = tl.max(peak, axis=0)
    of_chunk = tl.load(ids + row * chunks + at, mask=at < chunks, other=vocab)
    best = tl.min(tl.where((peak == top) & (at < chunks), of_chunk, vocab), axis=0)
    return top, best


@triton.jit
def greedy_kernel(peaks, ids, tokens, failed, vocab, chunks, block_c: tl.constexpr):
    """peaks, ids [B, C] -> tokens [B] int64, failed [B]. Bytes: 8BC. FLOPs none: 3BC comparisons.
    One program a row."""
    row = tl.program_id(0).to(tl.int64)
    top, best = best_of_row(peaks, ids, row, chunks, vocab, block_c)
    tl.store(tokens + row, best.to(tl.int64))
    tl.store(failed + row, (top == float("inf")) | (top == float("-inf")))


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits [B, V] fp32 -> tokens [B] int64 (the lowest id of a tie), failed [B] bool."""
    peaks, ids, _ = row_peaks(logits, None)
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    failed = torch.empty(rows, dtype=torch.bool, device=logits.device)
    if rows:
        chunks = peaks.shape[1]
        greedy_kernel[(rows,)](
            peaks, ids, tokens, failed, vocab, chunks, block_c=triton.next_power_of_2(chunks),
            num_warps=1,
        )  # fmt: skip
    return tokens, failed


def row_peaks(logits: Tensor, temperature: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """logits [B, V] fp32 -> largest, lowest id, sum of each chunk [B, C] (peak_kernel). temperature
    None: no sums."""
    if logits.dim() != 2 or logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ShapeRefused(
            f"logits is {logits.dtype} {tuple(logits.shape)}: must be float32 [B, V], rows "
            "that lie together"
        )
    rows, vocab = logits.shape
    if vocab < 1:
        raise ShapeRefused(f"logits is {tuple(logits.shape)}: a row must have a token")
    chunks = triton.cdiv(vocab, CHUNK)
    peaks, sums = torch.empty(2, rows, chunks, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    if rows:
        peak_kernel[(rows, chunks)](
            logits, peaks if temperature is None else temperature, peaks, ids, sums,
            logits.stride(0), vocab, chunks, chunk=CHUNK, with_sums=temperature is not None,
            num_warps=4,
        )  # fmt: skip
    return peaks, ids, sums


def argmax_cost(rows: int, vocab: int) -> KernelCost:
    return KernelCost(4 * rows * vocab, rows * vocab)


def argmax_twin(logits: Tensor) -> Tensor:
    """[B, V] -> [B] int64: the first of a stable sort."""
    return logits.double().sort(dim=1, descending=True, stable=True).indices[:, 0]


def compile_cases() -> list[CompileCase]:
    types = {
        "logits": "*fp32", "temperature": "*fp32", "peaks": "*fp32", "ids": "*i32", "sums": "*fp32",
        "tokens": "*i64", "failed": "*i1", "stride": "i32", "vocab": "i32", "chunks": "i32",
    }  # fmt: skip
    wide = {90: ("wide loads",), 100: ("wide loads",)}
    whole = ("stride", "vocab")
    cases = [
        CompileCase(
            peak_kernel, "row_peaks", f"{CHUNK}{' sums' if sums else ''} w4", types,
            {"chunk": CHUNK, "with_sums": sums}, divisible=whole, wants=wide,
        )
        for sums in (False, True)
    ]  # fmt: skip
    block_c = 32  # of 129280 ids
    cases.append(
        CompileCase(
            greedy_kernel, "greedy", f"{block_c} w1", types, {"block_c": block_c}, num_warps=1,
            divisible=whole,
        )
    )  # fmt: skip
    return cases
