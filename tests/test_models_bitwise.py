"""Law 5 at the level of the model: chunks, company, block size, placement change no bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dispatch.local import LocalDispatcher
from ep.group import EPGroup
from ep.placement import ExpertPlacement
from models.deepseek.kernels.errors import KernelsUnavailable
from models.deepseek.kernels.select import create_kernels
from models.deepseek.load import load_model
from models.deepseek.model import DeepSeekModel
from models.deepseek.random_checkpoint import write_random_checkpoint
from models.deepseek.random_families import family_config
from models.offline import OfflineRunner

SINGLE = EPGroup.single()
LENGTH = 70


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        family: write_random_checkpoint(
            tmp_path_factory.mktemp(family), family_config(family), tokenizer=False
        )
        for family in ("v3", "v2-lite")
    }


def cases(*families: str) -> pytest.MarkDecorator:
    """Both kernels, both dtypes, these families."""
    params = [
        (kernels, dtype, family)
        for kernels in ("torch", "native")
        for dtype in (torch.float32, torch.bfloat16)
        for family in families
    ]
    ids = [f"{kernels}-{str(dtype)[6:]}-{family}" for kernels, dtype, family in params]
    return pytest.mark.parametrize("load", params, ids=ids, indirect=True)


@pytest.fixture
def load(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> Any:
    name, dtype, family = request.param
    try:
        kernels = create_kernels(name).kernels
    except KernelsUnavailable as error:
        pytest.skip(str(error).splitlines()[0])

    def make(placement: ExpertPlacement | None = None) -> DeepSeekModel:
        return load_model(
            checkpoints[family],
            dtype=dtype,
            kernels=kernels,
            group=SINGLE,
            dispatcher_factory=lambda config: LocalDispatcher(SINGLE, config),
            placement=placement,
        )

    return make


def tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 512, (count,), generator=generator).tolist()


def chunked(runner: OfflineRunner, name: int, prompt: list[int], size: int) -> torch.Tensor:
    parts = [prompt[i : i + size] for i in range(0, len(prompt), size)]
    return torch.cat([runner.step({name: part}).logits[name] for part in parts])


@cases("v3", "v2-lite")
def test_chunks_blocks_company_and_placement(load: Any) -> None:
    model, prompt = load(), tokens(LENGTH)
    expected = OfflineRunner(model, num_blocks=8).step({0: prompt}).logits[0]
    for size in (1, 3, 5, 64):
        got = chunked(OfflineRunner(model, num_blocks=8), 0, prompt, size)
        assert torch.equal(got, expected), f"chunks of {size}"
    for block_size in (1, 4, 32):
        runner = OfflineRunner(model, num_blocks=96, block_size=block_size, seed=block_size)
        assert torch.equal(runner.step({0: prompt}).logits[0], expected), f"blocks of {block_size}"
    for company in (1, 7, 39):
        runner = OfflineRunner(model, num_blocks=64)
        head = prompt[:50]
        runner.step({0: head, **{s: tokens(1 + s % 5, s) for s in range(1, 1 + company)}})
        others = {s: tokens(1, 100 + s) for s in range(1, 1 + company)}
        got = runner.step({**others, 0: prompt[50:]}).logits[0]
        assert torch.equal(got, expected[50:]), f"{company} others"
    rows = model.config.num_placement_layers()
    table = [[(5 * slot + row) % 16 for slot in range(24)] for row in range(rows)]
    moved = load(ExpertPlacement.from_physical_to_logical(table, num_ranks=1))
    assert torch.equal(OfflineRunner(moved, num_blocks=8).step({0: prompt}).logits[0], expected)


@cases("v3")  # the one with an MTP layer
def test_drafts_do_not_depend_on_chunks_or_company(load: Any) -> None:
    model, prompt = load(), tokens(40)
    assert model.num_mtp_layers == 1
    following = [*prompt[1:], 3]
    runner = OfflineRunner(model, num_blocks=32)
    hidden = runner.step({0: prompt}).hidden[0]
    expected = runner.draft({0: hidden}, {0: following}).logits[0]
    runner = OfflineRunner(model, num_blocks=32, block_size=4)
    out = runner.step({1: tokens(9, 1), 0: prompt, 2: tokens(3, 2)}).hidden
    other = tokens(9, 3)
    got = []
    for begin in range(0, 40, 3):
        end = min(begin + 3, 40)
        chunk = {1: out[1][:1], 0: out[0][begin:end]} if begin < 9 else {0: out[0][begin:end]}
        following_rows = {s: other[:1] if s else following[begin:end] for s in chunk}
        got.append(runner.draft(chunk, following_rows).logits[0])
    assert torch.equal(torch.cat(got), expected)


@pytest.fixture
def threads() -> Any:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_released_routing_over_a_long_context_with_any_number_of_threads(
    dtype: torch.dtype, threads: Any, tmp_path: Path
) -> None:
    """256 experts in 8 groups, top 8 as released, and more positions than one tile of anything."""
    try:
        kernels = create_kernels("native").kernels
    except KernelsUnavailable as error:
        pytest.skip(str(error).splitlines()[0])
    config = family_config(
        "v3", num_hidden_layers=2, n_routed_experts=256, n_group=8, topk_group=4,
        num_experts_per_tok=8, moe_intermediate_size=32, num_nextn_predict_layers=0,
    )  # fmt: skip
    write_random_checkpoint(tmp_path, config, dtype=torch.float32, tokenizer=False)
    model = load_model(
        tmp_path,
        dtype=dtype,
        kernels=kernels,
        group=SINGLE,
        dispatcher_factory=lambda config: LocalDispatcher(SINGLE, config),
    )
    prompt = tokens(1050)
    threads(1)
    expected = OfflineRunner(model, num_blocks=70).step({0: prompt}).logits[0]
    for count, size, block_size in ((2, 333, 4), (3, 1050, 16), (5, 64, 1)):
        threads(count)
        runner = OfflineRunner(model, num_blocks=1120 // block_size, block_size=block_size)
        got = chunked(runner, 0, prompt, size)
        assert torch.equal(got, expected), f"{count} threads, chunks of {size}"
