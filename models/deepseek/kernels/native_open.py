"""Which compiled library serves: the one for the compiler at hand, or one kept from earlier.

A kept library is of the same sources for the same processor, but from a compiler that cannot be
asked any more: it must load and compute what the torch kernels compute before it is used. The
library's description says so, and why; a refusal is part of the error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from models.deepseek.kernels.build import build, kept
from models.deepseek.kernels.errors import KernelArgumentError, KernelsUnavailable
from models.deepseek.kernels.native_attention import NativeAttention
from models.deepseek.kernels.native_dense import NativeDense
from models.deepseek.kernels.native_experts import NativeExperts
from models.deepseek.kernels.native_library import NativeLibrary, load_library
from models.deepseek.kernels.native_weights import NativeExpertWeights, NativeLinearWeight
from models.deepseek.kernels.torch_kernels import TorchKernels
from models.interface import ForwardBatch

ROWS, WIDTH, SLOTS = 5, 96, 3  # more than a panel of 64 features, no multiple of it


def open_library(defines: tuple[str, ...] = ()) -> NativeLibrary:
    """Raises KernelsUnavailable with the reason of `build` when no kept library can stand in."""
    try:
        return load_library(build(defines))
    except KernelsUnavailable as error:
        why = str(error).splitlines()[0]
        refused = ""
        for library in kept(defines, why):
            try:
                loaded = load_library(library)
                wrong = self_check(loaded)
            except (KernelsUnavailable, KernelArgumentError) as unusable:
                wrong = [str(unusable)]
            if not wrong:
                return loaded
            refused += f"; kept {library.path.name} refused: {', '.join(wrong)}"
        if refused:
            raise KernelsUnavailable(f"{why}{refused}\n{error}") from error
        raise


def self_check(library: NativeLibrary) -> list[str]:
    """The kernels whose results are not those of the torch kernels, on small inputs; [] is good."""
    wrong = []
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2)):
        for name, got, want in _results(library, dtype):
            limit = tolerance * float(want.abs().max())
            if not float((got.float() - want.float()).abs().max()) <= limit:  # NaN is wrong
                wrong.append(f"{name} in {dtype}")
    return wrong


def _results(library: NativeLibrary, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(kernel, what the library gives, what torch gives)."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    twin, dense = TorchKernels(), NativeDense(library)
    x, w = normal(ROWS, WIDTH), normal(2 * WIDTH, WIDTH)
    native_w, twin_w = NativeLinearWeight(library, w, dtype), twin.linear_weight(w, dtype)
    yield "linear", dense.linear(x, native_w), twin.linear(x, twin_w)
    scale = torch.rand(WIDTH, generator=random)
    yield "rms_norm", dense.rms_norm(x, scale, 1e-6), twin.rms_norm(x, scale, 1e-6)

    experts = NativeExperts(library)
    stacked = NativeExpertWeights(library, SLOTS, WIDTH, WIDTH, dtype)
    twin_stacked = twin.allocate_experts(SLOTS, WIDTH, WIDTH, dtype)
    for slot in range(SLOTS):
        parts = [normal(WIDTH, WIDTH) for _ in range(3)]
        stacked.store(slot, *parts)
        twin_stacked.store(slot, *parts)
    slots = torch.tensor([[0, 1], [2, -1], [1, 0], [2, 1], [-1, 0]], dtype=torch.int32)
    pair_rows, offsets, index = experts.sort_pairs(slots, SLOTS)
    y = experts.experts(x, pair_rows, offsets, stacked)
    yield "experts", y, twin.experts(x, *twin.sort_pairs(slots, SLOTS)[:2], twin_stacked)
    weights = torch.rand(ROWS, 2, generator=random)
    home = experts.combine_pairs(y, index, weights)
    yield "combine_pairs", home, twin.combine_pairs(y, index, weights)

    q, q_rope, layer = normal(ROWS, 2, 32), normal(ROWS, 2, 8), normal(3, 4, 40)
    batch = _one_sequence(torch.tensor([[2, 0, 1]], dtype=torch.int32), context=11)
    attended = NativeAttention(library).latent_attention(q, q_rope, layer, batch, 0.2)
    yield "latent_attention", attended, twin.latent_attention(q, q_rope, layer, batch, 0.2)
    tree = replace(
        batch,  # two children of the row at position 6, a child of each
        positions=torch.tensor([6, 7, 7, 8, 8]),
        ancestors=torch.tensor([[-1, -1], [3, -1], [4, -1], [3, 5], [4, 6]], dtype=torch.int32),
    )
    attended = NativeAttention(library).latent_attention(q, q_rope, layer, tree, 0.2)
    yield "latent_attention of a tree", attended, twin.latent_attention(q, q_rope, layer, tree, 0.2)


def _one_sequence(tables: Tensor, context: int) -> ForwardBatch:
    """The last ROWS positions of one sequence whose latents are in the cache."""
    positions = torch.arange(context - ROWS, context)
    return ForwardBatch(
        token_ids=torch.zeros(ROWS, dtype=torch.int64),
        positions=positions,
        slot_mapping=torch.zeros(ROWS, dtype=torch.int64),
        query_start=torch.tensor([0, ROWS], dtype=torch.int32),
        context_len=torch.tensor([context], dtype=torch.int32),
        block_tables=tables,
        logits_rows=torch.zeros(0, dtype=torch.int64),
        max_query_len=ROWS,
        max_context_len=context,
    )
