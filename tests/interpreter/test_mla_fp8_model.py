"""A tiny model whose latents lie in FP8, by Triton kernels beside the torch kernels, both
quantising from fp32 (what torch kernels do by themselves, from rows rounded to bf16 first, moves
codes, and by them now and then a pick of an expert)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from w8a8_kernels import W8A8

from dispatch.local import LocalDispatcher
from ep.group import EPGroup
from models.deepseek.kernels.base import Kernels
from models.deepseek.kernels.fp8_latents import read_rows
from models.deepseek.kernels.gpu.mla_cache import write_latents_twin
from models.deepseek.kernels.gpu.mla_rows import pack_rows_twin, read_rows_twin
from models.deepseek.kernels.gpu.triton_kernels import TritonKernels
from models.deepseek.load import load_model
from models.deepseek.model import DeepSeekModel
from models.deepseek.random_checkpoint import write_random_checkpoint
from models.deepseek.random_families import family_config
from models.interface import ForwardBatch
from models.offline import OfflineRunner

SINGLE = EPGroup.single()
SMALL: dict[str, Any] = {
    "num_hidden_layers": 2, "vocab_size": 128, "hidden_size": 128, "intermediate_size": 128,
    "n_routed_experts": 8, "num_nextn_predict_layers": 1, "first_k_dense_replace": 1,
}  # fmt: skip
PROMPT = [3, 120, 17, 99, 4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("v3")
    return write_random_checkpoint(made, family_config("v3", **SMALL), tokenizer=False)


class Twin(W8A8):
    """Torch kernels that quantise latents from fp32, as the GPU's one launch does."""

    def write_latents(
        self, layer: Tensor, latent: Tensor, k_rope: Tensor, batch: ForwardBatch, norm: Tensor,
        eps: float, cos_sin: Tensor,
    ) -> None:  # fmt: skip
        wide = write_latents_twin(latent, k_rope, norm, eps, batch.positions, cos_sin)
        rows = pack_rows_twin(wide[:, : latent.shape[1]], wide[:, latent.shape[1] :])
        layer.view(-1, layer.shape[2])[batch.slot_mapping] = rows


def load(folder: Path, kernels: Kernels, deterministic: bool = True) -> DeepSeekModel:
    return load_model(
        folder,
        dtype=torch.bfloat16,
        kernels=kernels,
        group=SINGLE,
        dispatcher_factory=lambda config: LocalDispatcher(SINGLE, config),
        deterministic=deterministic,
        fp8_cache=True,
    )


def rows(runner: OfflineRunner, layer: int) -> Tensor:
    """What the sequence's latents read, by position, and as bytes."""
    state = runner._sequences[0]
    slots = torch.tensor([state.slot(p, runner.block_size) for p in range(state.length)])
    return runner.cache.layers[layer].flatten(0, 1)[slots]


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_model(folder: Path, deterministic: bool) -> None:
    """The first layer's codes and keys are the twin's, and scales but for the last bit of a norm;
    logits are as near as those of a cache in bf16. Fast mode writes the same bytes and expands keys
    and values from them. So does the MTP layer."""
    models = [
        load(folder, k, deterministic) for k in (TritonKernels(fast=not deterministic), Twin())
    ]
    for model in models:
        model._naive_from = None if deterministic else 4
    ours, twin = (OfflineRunner(model, num_blocks=4) for model in models)
    got, want = (runner.step({0: PROMPT}) for runner in (ours, twin))
    rank, rope = models[0].config.kv_lora_rank, models[0].config.qk_rope_head_dim
    found = rows(ours, 0)
    values = read_rows(found, rank, torch.bfloat16)
    expected = rows(twin, 0)
    exact = torch.ones(found.shape[1], dtype=torch.bool)
    exact[rank : rank + 4 * (rank // 128)] = False
    assert torch.equal(found[:, exact], expected[:, exact])
    scales = [x[:, ~exact].contiguous().view(torch.float32) for x in (found, expected)]
    torch.testing.assert_close(*scales, rtol=1e-6, atol=0)
    wide = read_rows_twin(found.view(1, *found.shape), torch.arange(len(PROMPT)), rank, rope)
    assert torch.equal(values, wide.bfloat16())
    off = (got.logits[0] - want.logits[0]).abs()
    assert bool(got.logits[0].isfinite().all()) and float(off.max()) < 0.05
    more = [runner.step({0: [7]}).logits[0] for runner in (ours, twin)]
    assert float((more[0] - more[1]).abs().max()) < 0.05
    # From the same rows: last bits of hidden ones move codes.
    following = {0: [*PROMPT[1:], 9]}
    drafts = [runner.draft({0: want.hidden[0]}, following).logits[0] for runner in (ours, twin)]
    assert float((drafts[0] - drafts[1]).abs().max()) < 0.05


def test_chunks_write_the_same_bytes(folder: Path) -> None:
    """The embedding's latents do not depend on what else is in the step."""
    model = load(folder, TritonKernels())
    whole, cut = (OfflineRunner(model, num_blocks=4) for _ in range(2))
    whole.step({0: PROMPT})
    cut.step({0: PROMPT[:2]})
    cut.step({0: PROMPT[2:], 1: [9]})
    assert float((rows(whole, 0) == rows(cut, 0)).double().mean()) > 0.97
