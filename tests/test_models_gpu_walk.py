"""Launchers of GPU kernels walked with fake tensors: all layouts in which rows arrive, fast mode's
prefill, halves, trees of drafts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_cuda import CUDA, FakeCuda, UnlaunchedKernels, move
from walked_model import batch, both_modes, walking

from dispatch.base import CombineForm, Layout, Received, ScaleFormat
from models.deepseek.experts import run_experts
from models.deepseek.kernels.gpu.mla_prefill import mla_prefill
from models.deepseek.kernels.gpu.mla_prefill_plan import plan_prefill
from models.deepseek.model import DeepSeekModel

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="triton is built for Linux only")
SLOTS, HIDDEN, WIDTH, PICKS = 4, 512, 256, 2


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    with walking() as walked:
        yield walked


def received(layout: Layout, rows: int, scale_format: ScaleFormat, aligned: bool) -> Received:
    """rows: of all, or of a slot where they are masked."""
    lead = (SLOTS, rows) if layout is Layout.MASKED else (rows,)
    picks = PICKS if layout is Layout.ROUTED else 1
    groups = HIDDEN // 128
    x = torch.zeros(*lead, HIDDEN, dtype=torch.bfloat16, device=CUDA)
    scales = None
    if scale_format is not ScaleFormat.NONE:
        x = torch.zeros(*lead, HIDDEN, dtype=torch.float8_e4m3fn, device=CUDA)
        packed = scale_format in (ScaleFormat.UE8M0_ROW, ScaleFormat.UE8M0_COLUMN)
        width = -(-groups // 4) if packed else groups
        kind = torch.int32 if packed else torch.float32
        if scale_format in (ScaleFormat.F32_COLUMN, ScaleFormat.UE8M0_COLUMN):
            turned = (*lead[:-1], width, lead[-1])
            scales = torch.zeros(*turned, dtype=kind, device=CUDA).transpose(-1, -2)
        else:
            scales = torch.zeros(*lead, width, dtype=kind, device=CUDA)
    return Received(
        layout,
        x,
        torch.zeros(rows, picks, dtype=torch.int32, device=CUDA),
        torch.zeros(*lead, *(() if layout is Layout.MASKED else (picks,)), device=CUDA),
        torch.zeros(SLOTS, dtype=torch.int64, device=CUDA),
        scales,
        scale_format,
        torch.zeros(SLOTS, dtype=torch.int64, device=CUDA) if aligned else None,
    )


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    ("layout", "aligned"),
    [(Layout.ROUTED, False), (Layout.EXPANDED, False), (Layout.EXPANDED, True),
     (Layout.MASKED, False)],
)  # fmt: skip
def test_rows_as_they_arrive(fake: FakeCuda, layout: Layout, aligned: bool, fp8: bool) -> None:
    kernels = UnlaunchedKernels(CUDA)
    sizes = (SLOTS, HIDDEN, WIDTH, torch.bfloat16)
    experts: Any = kernels.allocate_fp8_experts(*sizes) if fp8 else kernels.allocate_experts(*sizes)
    formats = [ScaleFormat.NONE, ScaleFormat.F32_ROW, ScaleFormat.UE8M0_ROW]
    for scale_format in formats if fp8 else formats[:1]:
        for rows in (0, 1, 64):
            for form in CombineForm:
                rows_in = received(layout, rows, scale_format, aligned)
                y, index = run_experts(kernels, rows_in, experts, form)
                assert y.device == CUDA and y.dtype == torch.bfloat16
                assert y.shape[-1] == HIDDEN
                assert index is None or index.device == CUDA
    assert fake.waits == []
    assert fake.launches


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, DeepSeekModel]:
    return both_modes(tmp_path_factory.mktemp("v3"))


def test_halves_trees_long_contexts_and_drafts(
    fake: FakeCuda, models: dict[bool, DeepSeekModel]
) -> None:
    model = models[True]
    move(model)
    cache = model.cache_spec.allocate(64, 16, CUDA)
    for counts in ([1] * 6, [1], []):  # decode in halves asks nothing
        out = model.forward(batch(counts), cache, None, halves=True)
        assert out.logits.shape == (len(counts), 512) and out.logits.device == CUDA
    mixed = batch([40, 1, 1])  # nor does what is cut within a prompt, where the host knows it
    tensors = {n: x.cpu() for n, x in vars(mixed).items() if isinstance(x, torch.Tensor)}
    fake.waits.clear()
    tensors["query_start"] = torch.tensor([0, 40, 41, 42], dtype=torch.int32)
    known = replace(mixed, host=replace(mixed, **tensors))
    assert model.forward(known, cache, None, halves=True).logits.shape == (3, 512)
    tree = replace(batch([5, 1]), ancestors=torch.zeros(6, 2, dtype=torch.int32, device=CUDA))
    model.forward(tree, cache)
    model.forward(batch([3, 3], context=40_000), cache)  # parts that are merged
    drafted = batch([1, 1])
    hidden = torch.zeros(2, 256, dtype=torch.bfloat16, device=CUDA)
    model.draft(drafted, hidden, drafted.token_ids, cache)
    assert fake.waits == []


def test_fast_mode(fake: FakeCuda, models: dict[bool, DeepSeekModel]) -> None:
    """Decode asks nothing. Long prompts ask for lengths, which are given here: keys and values are
    expanded chunk by chunk, after a prefix that is cached and without one."""
    model = models[False]
    move(model)
    cache = model.cache_spec.allocate(64, 16, CUDA)
    model.forward(batch([1] * 4), cache)
    kernels, config = model.kernels, model.config
    weights = model.weights.layers[0].attention
    assert weights.kv_b is not None and isinstance(kernels, UnlaunchedKernels)
    heads, nope, value = (
        config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim
    )  # fmt: skip
    for context, new in (([60], [60]), ([200, 40], [60, 40])):
        lengths = batch(new, max(context))
        plan = plan_prefill(context, new, CUDA)
        q = torch.zeros(sum(new), heads, config.qk_head_dim, dtype=torch.bfloat16, device=CUDA)

        def expand(latents: torch.Tensor) -> torch.Tensor:
            return kernels.linear(latents, weights.kv_b).view(-1, heads, nope + value)

        out = mla_prefill(
            q, cache.layers[0], lengths.block_tables, plan, expand, config.softmax_scale,
            rank=config.kv_lora_rank, nope=nope, value=value,
        )[0]  # fmt: skip
        assert out.shape == (sum(new), heads, value)
    assert fake.waits == []
    assert {"mla_prefill_kernel", "mla_decode_kernel"} <= {x.name for x in fake.launches}
