"""A model with an FP8 cache walked with fake tensors on cuda: every launch is one that is compiled
ahead of time, and nothing is waited for."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_cuda import CUDA, FakeCuda, UnlaunchedKernels, fake_cuda, move

from dispatch.local import LocalDispatcher
from ep.group import EPGroup
from models.deepseek.kernels.gpu.launches import uncovered
from models.deepseek.kernels.gpu.mla_prefill import mla_prefill
from models.deepseek.kernels.gpu.mla_prefill_plan import plan_prefill
from models.deepseek.kernels.gpu.registry import all_cases
from models.deepseek.load import load_model
from models.deepseek.model import DeepSeekModel
from models.deepseek.random_checkpoint import write_random_checkpoint
from models.deepseek.random_families import family_config
from models.interface import ForwardBatch, copy_latents

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="triton is built for Linux only")


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    with warnings.catch_warnings(), fake_cuda() as walked, torch.inference_mode():
        warnings.simplefilter("ignore")  # the address of a fake tensor is asked for
        yield walked
        assert uncovered(walked.launches, all_cases()) == []


def batch(counts: list[int], context: int) -> ForwardBatch:
    rows, num = sum(counts), len(counts)
    one: dict[str, Any] = {"dtype": torch.int64, "device": CUDA}
    small: dict[str, Any] = {"dtype": torch.int32, "device": CUDA}
    return ForwardBatch(
        token_ids=torch.zeros(rows, **one),
        positions=torch.zeros(rows, **one),
        slot_mapping=torch.zeros(rows, **one),
        query_start=torch.zeros(num + 1, **small),
        context_len=torch.zeros(num, **small),
        block_tables=torch.zeros(num, -(-context // 16), **small),
        logits_rows=torch.zeros(num, **one),
        max_query_len=max(counts, default=0),
        max_context_len=context,
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, DeepSeekModel]:
    """By deterministic."""
    config = family_config("v3", num_hidden_layers=2)
    folder = tmp_path_factory.mktemp("v3")
    write_random_checkpoint(folder, config, tokenizer=False, fp8="fp32")
    group = EPGroup.single()

    def load(deterministic: bool) -> DeepSeekModel:
        return load_model(
            folder,
            dtype=torch.bfloat16,
            kernels=UnlaunchedKernels(torch.device("cpu")),
            group=group,
            dispatcher_factory=lambda config: LocalDispatcher(group, config),
            deterministic=deterministic,
            fp8_cache=True,
        )

    return {True: load(True), False: load(False)}


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_step(fake: FakeCuda, models: dict[bool, DeepSeekModel], deterministic: bool) -> None:
    model = models[deterministic]
    move(model)
    cache = model.cache_spec.allocate(64, 16, CUDA)
    assert {(x.dtype, x.shape[2]) for x in cache.layers} == {
        (torch.uint8, model.config.cache_bytes(2, fp8=True))
    }
    for counts in ([1] * 6, [3, 3], []):
        model.forward(batch(counts, 200), cache, None, halves=max(counts, default=0) == 1)
    drafted = batch([1, 1], 200)
    hidden = torch.zeros(2, model.config.hidden_size, dtype=cache.dtype, device=CUDA)
    model.draft(drafted, hidden, drafted.token_ids, cache)
    copy_latents(cache, drafted.slot_mapping, drafted.slot_mapping)
    names = {x.name for x in fake.launches}
    assert {"mla_cache_kernel", "mla_decode_kernel"} <= names and fake.waits == []
    if deterministic:
        return
    # Long prompts, whose lengths are given here: the one launch that writes, then chunks of heads.
    config, kernels = model.config, model.kernels
    weights = model.weights.layers[0].attention
    assert weights.kv_b is not None
    heads, value = config.num_attention_heads, config.v_head_dim
    lengths = batch([60, 40], 200)
    latent = torch.zeros(100, config.kv_lora_rank, dtype=torch.bfloat16, device=CUDA)
    key = torch.zeros(100, config.qk_rope_head_dim, dtype=torch.bfloat16, device=CUDA)
    table = model._attention.cos_sin
    norm = weights.kv_a_norm
    kernels.write_latents(cache.layers[0], latent, key, lengths, norm, 1e-6, table)

    def expand(latents: torch.Tensor) -> torch.Tensor:
        wide = kernels.linear(latents, weights.kv_b)  # type: ignore[arg-type]
        return wide.view(-1, heads, config.qk_nope_head_dim + value)

    q = torch.zeros(100, heads, config.qk_head_dim, dtype=torch.bfloat16, device=CUDA)
    out = mla_prefill(
        q, cache.layers[0], lengths.block_tables, plan_prefill([200, 40], [60, 40], CUDA), expand,
        config.softmax_scale, rank=config.kv_lora_rank, nope=config.qk_nope_head_dim, value=value,
    )[0]  # fmt: skip
    assert out.shape == (100, heads, value) and fake.waits == []
    assert {"mla_gather_kernel", "mla_prefill_kernel"} <= {x.name for x in fake.launches}
