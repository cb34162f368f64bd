"""Whole tiny models through TritonKernels on a device: law 5 bit for bit, and the torch kernels.

The interpreter cannot prove the first: its products are numpy's, whose order follows a row's place.
There (TRITON_INTERPRET=1) the bodies run with a bound in place of equality, at small sizes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from w8a8_kernels import W8A8

from dispatch.local import LocalDispatcher
from ep.group import EPGroup
from models.deepseek.kernels.gpu.language import INTERPRETED
from models.deepseek.load import load_model
from models.deepseek.model import DeepSeekModel
from models.deepseek.random_checkpoint import write_random_checkpoint
from models.deepseek.random_families import family_config
from models.offline import OfflineRunner

ON_GPU = torch.cuda.is_available()
LARGE = ON_GPU and not INTERPRETED
DEVICE = "cuda" if ON_GPU else "cpu"
SINGLE = EPGroup.single()
LENGTH = 300 if LARGE else 5
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2, "vocab_size": 128, "hidden_size": 128, "intermediate_size": 128,
    "n_routed_experts": 8, "num_nextn_predict_layers": 0,
}  # fmt: skip
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_GPU and not INTERPRETED, reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Path]:
    config = family_config("v3", **({} if LARGE else SIZES))
    return {
        fp8: write_random_checkpoint(
            tmp_path_factory.mktemp(str(fp8)), config, tokenizer=False, fp8=fp8
        )
        for fp8 in (None, "fp32", "pow2")
    }


def load(folder: Path, kernels: Any, device: str, deterministic: bool = True) -> DeepSeekModel:
    return load_model(
        folder,
        dtype=torch.bfloat16,
        kernels=kernels,
        group=SINGLE,
        dispatcher_factory=lambda config: LocalDispatcher(SINGLE, config),
        weights="auto" if kernels.fp8_is_fast else "fp8",
        deterministic=deterministic,
        device=device,
    )


def ours(folder: Path, deterministic: bool = True) -> DeepSeekModel:
    from models.deepseek.kernels.gpu.triton_kernels import TritonKernels

    return load(folder, TritonKernels(fast=not deterministic), DEVICE, deterministic)


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 128, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def check_same(got: Tensor, want: Tensor, fp8: str | None, what: str) -> None:
    if LARGE:
        assert torch.equal(got, want), what
    else:
        assert float((got - want).abs().max()) < (0.5 if fp8 else 0.03), what


@pytest.mark.parametrize("fp8", [None, "fp32", "pow2"])
def test_chunks_company_and_blocks_change_no_bit(
    checkpoints: dict[str | None, Path], fp8: str | None
) -> None:
    model, prompt = ours(checkpoints[fp8]), tokens(LENGTH)
    whole = OfflineRunner(model, num_blocks=64).step({0: prompt}).logits[0]
    assert whole.isfinite().all()
    for size in (1, 7, 64, 130) if LARGE else (3,):
        runner = OfflineRunner(model, num_blocks=64)
        parts = [prompt[at : at + size] for at in range(0, LENGTH, size)]
        got = torch.cat([runner.step({0: part}).logits[0] for part in parts])
        check_same(got, whole, fp8, f"chunks of {size}")
    if not LARGE:
        return
    for block_size in (32, 64):
        runner = OfflineRunner(model, num_blocks=64, block_size=block_size, seed=3)
        check_same(runner.step({0: prompt}).logits[0], whole, fp8, f"blocks of {block_size}")
    for company in (1, 40, 200):
        runner = OfflineRunner(model, num_blocks=1024)
        runner.step({0: prompt[:200], **{s: tokens(1 + s % 9, s) for s in range(1, 1 + company)}})
        others = {s: tokens(1, 100 + s) for s in range(1, 1 + company)}
        got = runner.step({**others, 0: prompt[200:]}).logits[0]
        check_same(got, whole[200:], fp8, f"{company} others")


@pytest.mark.parametrize("fp8", [None, "fp32"])
def test_a_path_of_a_tree_is_the_chain(
    checkpoints: dict[str | None, Path], fp8: str | None
) -> None:
    """Drafts in a tree behind a prompt: each node's logits are those of its path as a chain."""
    model, prompt = ours(checkpoints[fp8]), tokens(LENGTH)
    drafts, parents = [5, 9, 40], [-1, 0, -1]
    runner = OfflineRunner(model, num_blocks=64)
    runner.step({0: prompt[:-1]})
    tree = runner.step({0: [prompt[-1], *drafts]}, trees={0: parents}).logits[0]
    for path in ([0, 1], [2]):
        runner = OfflineRunner(model, num_blocks=64)
        runner.step({0: prompt[:-1]})
        chain = runner.step({0: [prompt[-1], *(drafts[i] for i in path)]}).logits[0]
        check_same(tree[[0, *(1 + i for i in path)]], chain, fp8, f"path {path}")


@pytest.mark.parametrize("fp8", [None, "fp32", "pow2"])
@pytest.mark.parametrize("deterministic", [True, False])
def test_logits_are_the_torch_kernels(
    checkpoints: dict[str | None, Path], fp8: str | None, deterministic: bool
) -> None:
    """In bf16 hundredths of logits of size 1; in e4m3 last bits move codes, and now and then the
    pick of an expert: most rows stay within some hundredths in the mean."""
    prompt = tokens(min(LENGTH, 40))
    model, twin = (
        ours(checkpoints[fp8], deterministic),
        load(checkpoints[fp8], W8A8(), "cpu", deterministic),
    )
    if not deterministic:
        model._naive_from = twin._naive_from = 4
    got = OfflineRunner(model, num_blocks=16).step({0: prompt}).logits[0].cpu()
    want = OfflineRunner(twin, num_blocks=16).step({0: prompt}).logits[0]
    off = (got - want).square().mean(dim=1).sqrt()
    assert got.isfinite().all()
    assert float(off.median()) < (0.1 if fp8 else 0.02)
