"""Trees of drafts through whole models: every path gives what a chain gives, bit for bit.

In company, in halves, in the MTP layer, and after accepted nodes have become part of the sequence.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dispatch.local import LocalDispatcher
from ep.group import EPGroup
from models.deepseek.kernels.errors import KernelsUnavailable
from models.deepseek.kernels.select import create_kernels
from models.deepseek.load import load_model
from models.deepseek.model import DeepSeekModel
from models.deepseek.random_checkpoint import write_random_checkpoint
from models.deepseek.random_families import family_config
from models.deepseek.reference import ReferenceModel
from models.deepseek.split import split_batch
from models.interface import ForwardBatch
from models.offline import OfflineRunner

SINGLE = EPGroup.single()
SMALL = {"num_hidden_layers": 3, "vocab_size": 128, "n_routed_experts": 8, "n_group": 4}
CASES = [(k, d) for k in ("torch", "native") for d in (torch.float32, torch.bfloat16)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tree")
    write_random_checkpoint(made, family_config("v3", **SMALL), tokenizer=False)
    return made


def load(folder: Path, kernels: str, dtype: torch.dtype, **settings: Any) -> DeepSeekModel:
    try:
        found = create_kernels(kernels).kernels
    except KernelsUnavailable as error:
        pytest.skip(str(error).splitlines()[0])
    return load_model(
        folder,
        dtype=dtype,
        kernels=found,
        group=SINGLE,
        dispatcher_factory=lambda config: LocalDispatcher(SINGLE, config),
        **settings,
    )


def poisoned(model: DeepSeekModel, block_size: int, seed: int = 0) -> OfflineRunner:
    runner = OfflineRunner(model, 256 // block_size, block_size, seed)
    for layer in runner.cache.layers:
        layer.fill_(math.nan)
    return runner


def tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 128, (count,), generator=generator).tolist()


def path_to(parents: list[int], node: int) -> list[int]:
    return [] if node < 0 else [*path_to(parents, parents[node]), node]


trees = st.lists(st.integers(0, 10), min_size=1, max_size=9).map(
    lambda drawn: [min(x - 1, i - 1) if x % 2 else i - 1 for i, x in enumerate(drawn)]
)


@pytest.mark.parametrize("kernels, dtype", CASES, ids=str)
def test_paths_are_chains(folder: Path, kernels: str, dtype: torch.dtype) -> None:
    model = load(folder, kernels, dtype)

    @settings(
        max_examples=6 if kernels == "torch" else 30,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(trees, st.sampled_from([1, 4, 16]), st.sampled_from([3, 61, 125]), st.data())
    def check(parents: list[int], block_size: int, length: int, data: st.DataObject) -> None:
        if kernels == "torch":
            length = length % 58  # its time is by positions
        prompt, drafts = tokens(length, 1), tokens(len(parents), 2)
        halves = data.draw(st.booleans())
        runner = poisoned(model, block_size)
        runner.step({0: prompt[:-1], 1: tokens(5, 3), 2: tokens(7, 4)})
        other = data.draw(trees)
        out = runner.step(
            {1: tokens(1 + len(other), 5), 0: prompt[-1:] + drafts, 2: tokens(1, 6)},
            halves=halves,
            trees={0: parents, 1: other},
        )
        mtp = runner.draft({0: out.hidden[0]}, {0: [*drafts, 9]}, trees={0: parents}).logits[0]
        assert not out.logits[0].isnan().any()
        following = tokens(2, 7)
        for node in [i for i in range(len(parents)) if i not in parents]:
            path = path_to(parents, node)
            rows = [0, *(i + 1 for i in path)]
            chain = poisoned(model, 3 + node, seed=node)
            chain.step({0: prompt[:-1]})
            want = chain.step({0: prompt[-1:] + [drafts[i] for i in path]})
            assert torch.equal(out.logits[0][rows], want.logits[0])
            assert torch.equal(out.hidden[0][rows], want.hidden[0])
            next_tokens = [[*drafts, 9][i] for i in rows]
            assert torch.equal(mtp[rows], chain.draft(want.hidden, {0: next_tokens}).logits[0])
        # The last path is accepted, or its beginning: what follows is as after the chain.
        kept = path[: data.draw(st.integers(0, len(path)))]
        runner.accept(0, kept)
        later = runner.step({1: [5], 0: following})
        chain = poisoned(model, 16, seed=1)
        chain.step({0: prompt + [drafts[i] for i in kept]})
        want = chain.step({0: following})
        assert torch.equal(later.logits[0], want.logits[0])

    check()


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_the_reference_agrees(folder: Path, kernels: str) -> None:
    model, reference = load(folder, kernels, torch.float32), ReferenceModel(folder)
    prompt, parents = tokens(9, 0), [-1, -1, 0, 0, 1, 2]
    drafts = tokens(len(parents), 1)
    runner = poisoned(model, 4)
    runner.step({0: prompt[:-1]})
    got = runner.step({0: prompt[-1:] + drafts}, trees={0: parents})
    rows = [*range(-1, len(prompt) - 1), *(p + len(prompt) for p in parents)]
    want = reference.forward(prompt + drafts, rows)
    # parents are nodes, -1 the last known token; the reference counts rows from the first on.
    assert float((got.logits[0] - want.logits[len(prompt) - 1 :]).abs().max()) < 2e-4
    plain = reference.forward(prompt + drafts).logits[len(prompt) - 1 :]
    assert float((want.logits[len(prompt) - 1 :] - plain).abs().max()) > 1e-2
    runner = poisoned(model, 4)
    hidden = runner.step({0: prompt + drafts}, trees={0: parents}).hidden
    mtp = runner.draft(hidden, {0: prompt[1:] + drafts + [4]}, trees={0: parents}).logits[0]
    again = reference.draft(want.hidden, prompt[1:] + drafts + [4], parents=rows)
    assert float((mtp - again.logits).abs().max()) < 2e-4


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_the_naive_form_follows_paths(
    folder: Path, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fast mode, where a tree is long enough to attend by heads; alone, and beside others."""
    model = load(folder, kernels, torch.float32, deterministic=False)
    assert model._naive_from is not None
    monkeypatch.setattr(model, "_naive_from", 4)
    prompt, parents, drafts = tokens(20, 0), [-1, -1, 0, 1, 3], tokens(5, 1)
    for company in ({}, {1: tokens(2, 2)}):
        runner = poisoned(model, 4)
        runner.step({0: prompt[:-1]})
        out = runner.step({**company, 0: prompt[-1:] + drafts}, trees={0: parents}).logits[0]
        for path in ([0, 2], [1, 3, 4]):
            chain = poisoned(model, 4)
            want = chain.step({0: prompt + [drafts[i] for i in path]}).logits[0][len(prompt) - 1 :]
            assert float((out[[0, *(i + 1 for i in path)]] - want).abs().max()) < 2e-4


def test_a_half_carries_its_paths() -> None:
    """Cut within a tree: a node's path is complete in its own half, though its parent is not."""
    paths = torch.arange(14, dtype=torch.int32).view(7, 2)
    batch = ForwardBatch(
        token_ids=torch.arange(7),
        positions=torch.tensor([4, 9, 10, 10, 11, 11, 12]),
        slot_mapping=torch.tensor([1, 20, 21, 22, 23, 24, 25]),
        query_start=torch.tensor([0, 1, 7], dtype=torch.int32),
        context_len=torch.tensor([5, 15], dtype=torch.int32),
        block_tables=torch.tensor([[0, -1], [1, 2]], dtype=torch.int32),
        logits_rows=torch.arange(7),
        max_query_len=6,
        max_context_len=15,
        ancestors=paths,
    )
    first, second = split_batch(batch)
    assert first.ancestors is not None and second.ancestors is not None
    assert torch.equal(torch.cat((first.ancestors, second.ancestors)), paths)
    assert first.num_tokens == len(first.ancestors) == 4
    assert second.context_len.tolist() == [15] and first.context_len.tolist() == [5, 12]
