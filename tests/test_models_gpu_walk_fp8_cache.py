"""A model with an FP8 cache walked with fake tensors on cuda: every launch is one that is compiled
ahead of time, and nothing is waited for."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from fake_cuda import CUDA, FakeCuda, move
from walked_model import batch, both_modes, walking

from models.deepseek.kernels.gpu.mla_prefill import mla_prefill
from models.deepseek.kernels.gpu.mla_prefill_plan import plan_prefill
from models.deepseek.model import DeepSeekModel
from models.interface import copy_latents

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="triton is built for Linux only")


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    with walking() as walked:
        yield walked


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, DeepSeekModel]:
    return both_modes(tmp_path_factory.mktemp("v3"), fp8_cache=True)


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
