"""TritonKernels whole, in the interpreter: tiny models beside the torch kernels."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dispatch.local import LocalDispatcher
from ep.group import EPGroup
from models.deepseek.fp8 import Fp8Rows, linear_w8a8
from models.deepseek.kernels.base import Kernels
from models.deepseek.kernels.gpu.triton_kernels import TritonKernels
from models.deepseek.kernels.gpu.weights import TritonFp8ExpertWeights, TritonFp8LinearWeight
from models.deepseek.kernels.torch_kernels import TorchKernels
from models.deepseek.load import load_model
from models.deepseek.model import DeepSeekModel
from models.deepseek.random_checkpoint import write_random_checkpoint
from models.deepseek.random_families import family_config
from models.offline import OfflineRunner

SINGLE = EPGroup.single()
SMALL = {"num_hidden_layers": 2, "vocab_size": 256}
PROMPT = [3, 250, 17, 99, 4]
CASES = [("v3", "auto"), ("v2-lite", "auto"), ("v3-fp8", "fp8"), ("v3-pow2", "fp8")]


class W8A8(TorchKernels):
    """The torch kernels with weights in e4m3 multiplied as TritonKernels does: rows in e4m3 too."""

    def fp8_linear_weight(self, rows: Fp8Rows, dtype: torch.dtype) -> Any:
        return TritonFp8LinearWeight.of(rows, dtype)

    def allocate_fp8_experts(self, *shape: Any) -> Any:
        return TritonFp8ExpertWeights(*shape, torch.device("cpu"))

    def linear(self, x: Tensor, weight: Any, out_dtype: torch.dtype | None = None) -> Tensor:
        if not isinstance(weight, TritonFp8LinearWeight):
            return super().linear(x, weight, out_dtype)
        return linear_w8a8(
            x, weight.codes, weight.scales, ue8m0=weight.ue8m0, out_dtype=out_dtype or x.dtype
        )

    def mlp(self, x: Tensor, gate_up: Any, down: Any) -> Tensor:
        gate, up = self.linear(x, gate_up).float().chunk(2, dim=1)
        return self.linear((torch.nn.functional.silu(gate) * up).to(x.dtype), down)

    def experts(self, x: Tensor, pair_rows: Tensor, offsets: Tensor, weights: Any) -> Tensor:
        if not isinstance(weights, TritonFp8ExpertWeights):
            return super().experts(x, pair_rows, offsets, weights)
        out = x.new_zeros(pair_rows.shape[0], x.shape[1])
        w, dtype = weights, x.dtype
        for slot, (a, b) in enumerate(itertools.pairwise(offsets.tolist())):
            gate_up = TritonFp8LinearWeight(w.gate_up[slot], w.gate_up_scales[slot], dtype)
            down = TritonFp8LinearWeight(w.down[slot], w.down_scales[slot], dtype)
            gate_up.ue8m0 = down.ue8m0 = w.ue8m0
            if a < b:
                out[a:b] = self.mlp(x[pair_rows[a:b].long()], gate_up, down)
        return out


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, family, fp8 in (
        ("v3", "v3", None),
        ("v2-lite", "v2-lite", None),
        ("v3-fp8", "v3", "fp32"),
        ("v3-pow2", "v3", "pow2"),
    ):
        folder = tmp_path_factory.mktemp(name)
        config = family_config(family, **SMALL)
        made[name] = write_random_checkpoint(folder, config, tokenizer=False, fp8=fp8)
    return made


def load(checkpoint: Path, kernels: Kernels, weights: str = "auto") -> DeepSeekModel:
    return load_model(
        checkpoint,
        dtype=torch.bfloat16,
        kernels=kernels,
        group=SINGLE,
        dispatcher_factory=lambda config: LocalDispatcher(SINGLE, config),
        weights=weights,
    )


def logits(model: DeepSeekModel, prompt: list[int]) -> Tensor:
    return OfflineRunner(model, num_blocks=4).step({0: prompt}).logits[0]


@pytest.mark.parametrize(("name", "weights"), CASES)
def test_logits_of_a_model(checkpoints: dict[str, Path], name: str, weights: str) -> None:
    """Logits of size 1. bf16: both round at the same places, by sums in another order, and a value
    next to a middle falls to either side: some hundredths after two layers. A pick of another
    expert, which such a value can cause, would show as some tenths; these prompts have none."""
    got = logits(load(checkpoints[name], TritonKernels(), weights), PROMPT)
    want = logits(load(checkpoints[name], W8A8(), weights), PROMPT)
    assert got.isfinite().all() and 0.5 < float(want.std()) < 2
    assert float((got - want).abs().max()) < 0.03
    assert torch.equal(got.argmax(dim=1), want.argmax(dim=1))
