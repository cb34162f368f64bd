"""TritonKernels whole, in the interpreter: tiny models beside the torch kernels."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from w8a8_kernels import W8A8

from dispatch.local import LocalDispatcher
from ep.group import EPGroup
from models.deepseek.kernels.base import Kernels
from models.deepseek.kernels.gpu.mla_adapters import MlaProblem, MlaStep, StepDecoder, TritonMla
from models.deepseek.kernels.gpu.triton_attention import PlansOfBatch
from models.deepseek.kernels.gpu.triton_kernels import TritonKernels
from models.deepseek.load import load_model
from models.deepseek.model import DeepSeekModel
from models.deepseek.random_checkpoint import write_random_checkpoint
from models.deepseek.random_families import family_config
from models.interface import ForwardBatch
from models.offline import OfflineRunner

SINGLE = EPGroup.single()
SMALL = {
    "num_hidden_layers": 2, "vocab_size": 128, "hidden_size": 128, "intermediate_size": 128,
    "n_routed_experts": 8, "num_nextn_predict_layers": 0,
}  # fmt: skip
PROMPT = [3, 120, 17, 99, 4]
CASES = [("v3", "auto"), ("v2-lite", "auto"), ("v3-fp8", "fp8"), ("v3-pow2", "fp8")]


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


def load(
    checkpoint: Path, kernels: Kernels, weights: str = "auto", deterministic: bool = True
) -> DeepSeekModel:
    return load_model(
        checkpoint,
        dtype=torch.bfloat16,
        kernels=kernels,
        group=SINGLE,
        dispatcher_factory=lambda config: LocalDispatcher(SINGLE, config),
        weights=weights,
        deterministic=deterministic,
    )


def logits(model: DeepSeekModel, prompt: list[int]) -> Tensor:
    return OfflineRunner(model, num_blocks=4).step({0: prompt}).logits[0]


@pytest.mark.parametrize(("name", "weights"), CASES)
def test_logits_of_a_model(checkpoints: dict[str, Path], name: str, weights: str) -> None:
    """Logits of size 1. bf16: both round at the same places but for probabilities of attention,
    which the kernel rounds to bf16 as well: some hundredths after two layers. In e4m3 such a last
    bit moves codes by a sixteenth: some hundredths in the mean (as much as a rounding of the twin's
    own attention to bf16 makes); the first row attends to itself alone, with probability 1, and
    has none of it. A pick of another expert would show as some tenths; these prompts have none."""
    got = logits(load(checkpoints[name], TritonKernels(), weights), PROMPT)
    want = logits(load(checkpoints[name], W8A8(), weights), PROMPT)
    off = (got - want).abs()
    assert got.isfinite().all() and 0.5 < float(want.std()) < 2
    if weights == "fp8":
        assert float(off[0].max()) < 1e-5
        assert float(off.square().mean(dim=1).sqrt().max()) < 0.1
    else:
        assert float(off.max()) < 0.03
        assert torch.equal(got.argmax(dim=1), want.argmax(dim=1))


def test_steps_give_what_one_step_gives(checkpoints: dict[str, Path]) -> None:
    """Chunks of a prompt, then a token beside another sequence: the same logits but for the last
    bits of products, whose order in the interpreter follows a row's place in its tile."""
    model = load(checkpoints["v3"], TritonKernels())
    runner = OfflineRunner(model, num_blocks=8)
    whole = runner.step({0: PROMPT}).logits[0]
    runner = OfflineRunner(model, num_blocks=8)
    first = runner.step({1: PROMPT[:3], 2: [9]}).logits[1]
    rest = runner.step({2: [8], 1: PROMPT[3:]}).logits[1]
    assert float((torch.cat((first, rest)) - whole).abs().max()) < 0.03


@pytest.mark.parametrize("name", ["v3", "v3-fp8"])
def test_no_rows_at_all(checkpoints: dict[str, Path], name: str) -> None:
    """A rank without work runs every kernel on nothing (law 1)."""
    model = load(checkpoints[name], TritonKernels(), "fp8" if "fp8" in name else "auto")
    out = OfflineRunner(model, num_blocks=2).step({})
    assert out.logits == {} and out.hidden == {}


def test_fast_mode_expands_long_prompts(checkpoints: dict[str, Path]) -> None:
    """Naive attention for a sequence with many new tokens, absorbed for the one beside it."""
    model = load(checkpoints["v3"], TritonKernels(fast=True), deterministic=False)
    twin = load(checkpoints["v3"], W8A8(), deterministic=False)
    model._naive_from = twin._naive_from = 4
    steps = {0: PROMPT, 1: [7, 8]}
    got = OfflineRunner(model, num_blocks=8).step(steps).logits
    want = OfflineRunner(twin, num_blocks=8).step(steps).logits
    for sequence in steps:
        assert float((got[sequence] - want[sequence]).abs().max()) < 0.03


def test_a_plan_is_kept_for_its_batch_alone() -> None:
    def batch() -> ForwardBatch:
        return ForwardBatch(
            token_ids=torch.zeros(1, dtype=torch.int64),
            positions=torch.zeros(1, dtype=torch.int64),
            slot_mapping=torch.zeros(1, dtype=torch.int64),
            query_start=torch.tensor([0, 1], dtype=torch.int32),
            context_len=torch.ones(1, dtype=torch.int32),
            block_tables=torch.zeros(1, 1, dtype=torch.int32),
            logits_rows=torch.zeros(0, dtype=torch.int64),
            max_query_len=1,
            max_context_len=1,
        )

    plans, one, other = PlansOfBatch(), batch(), batch()
    made = iter(range(9))
    get = partial(plans.get, make=lambda: next(made))
    assert [get("a", one), get("a", one), get("b", one), get("a", other)] == [0, 0, 1, 2]
    assert [get("a", one), get("a", other), get("a", one)] == [0, 2, 0]  # halves take turns
    one.positions.fill_(5)
    assert [get("a", one), get("a", one), get("a", other)] == [3, 3, 2]
    more = [batch() for _ in range(4)]
    assert [get("a", b) for b in more] == [4, 5, 6, 7]
    assert get("a", other) == 8  # the oldest has gone


class Borrowed(TritonMla):
    """A library that takes bf16 caches only, and counts."""

    name = "borrowed"

    def __init__(self) -> None:
        self.steps = 0

    def refusal(self, problem: MlaProblem) -> str | None:
        return "no trees" if problem.trees else None

    def step(self, problem: MlaProblem, step: MlaStep) -> StepDecoder:
        self.steps += 1
        return super().step(problem, step)


def test_another_backend_decodes_what_it_can(checkpoints: dict[str, Path]) -> None:
    """One decoder a step, for all layers; a step with a tree falls back to ours, and says why."""
    library = Borrowed()
    kernels = TritonKernels(decode_backends=[library])
    runner = OfflineRunner(load(checkpoints["v3"], kernels), num_blocks=4)
    runner.step({0: [1, 2]})
    assert library.steps == 1 and kernels.choices == ("mla decode: borrowed",)
    runner.step({0: [3, 4]}, trees={0: [-1]})
    assert library.steps == 1
    assert kernels.choices[1] == "mla decode: triton (no borrowed: no trees)"
