"""Trees of drafts in attention: each path has the bits of a chain, whatever lies beside it."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kernel_cases import DTYPES, kernels, normal  # noqa: F401
from torch import Tensor

from models.deepseek.kernels.base import Kernels, MlaShape, MlaWeights
from models.deepseek.kernels.errors import KernelArgumentError
from models.deepseek.kernels.torch_kernels import TorchKernels
from models.interface import ForwardBatch, PagedKVCache, ancestor_slots, copy_latents

HIDDEN, RANK, ROPE, NOPE, VALUE = 40, 16, 8, 8, 12


@dataclass(frozen=True)
class Tree:
    """Row 0 is at position root; before it, `before` more rows of the sequence are in the step."""

    root: int
    parents: tuple[int, ...]
    before: int = 0

    @property
    def num_rows(self) -> int:
        return self.before + 1 + len(self.parents)

    def path(self, node: int) -> list[int]:
        """Nodes from the root's child to this one."""
        return [] if node < 0 else [*self.path(self.parents[node]), node]

    @property
    def ends(self) -> list[int]:
        """The nodes without children; -1 (the root) in an empty tree."""
        return [i for i in range(-1, len(self.parents)) if i not in self.parents]


@dataclass(frozen=True)
class Sequence:
    """before [root - before, w]: what its cache holds; rows [t, w]: of the step, chain or tree."""

    tree: Tree
    before: Tensor
    rows: Tensor

    def chain(self, node: int) -> Sequence:
        """The path to a node, as a sequence without branches."""
        here = [self.tree.before + 1 + i for i in self.tree.path(node)]
        keep = [*range(self.tree.before + 1), *here]
        line = Tree(self.tree.root, tuple(range(-1, len(here) - 1)), self.tree.before)
        return Sequence(line, self.before, self.rows[keep])


def place(
    sequences: list[Sequence], block_size: int, seed: int, branches: bool = True
) -> tuple[Tensor, ForwardBatch, Tensor]:
    """A cache full of NaN but for what the sequences hold before the step, the batch, and its rows
    [T, w]. Blocks in any order. branches: chains tell their ancestors too."""
    chance = random.Random(seed)
    starts = [len(s.before) for s in sequences]
    ends = [a + s.tree.num_rows for a, s in zip(starts, sequences, strict=True)]
    counts = [-(-end // block_size) for end in ends]
    free = list(range(sum(counts) + 2))
    chance.shuffle(free)
    rows = torch.cat([s.rows for s in sequences])
    layer = torch.full((len(free), block_size, RANK + ROPE), math.nan, dtype=rows.dtype)
    table = torch.full((len(sequences), max(counts) + 1), -1, dtype=torch.int32)
    positions, slots, query_start, paths = [], [], [0], []
    for s, (sequence, start, end) in enumerate(zip(sequences, starts, ends, strict=True)):
        blocks = [free.pop() for _ in range(counts[s])]
        table[s, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        where = [blocks[p // block_size] * block_size + p % block_size for p in range(end)]
        flat = layer.view(-1, RANK + ROPE)
        flat[where[:start]] = sequence.before[:, : RANK + ROPE]
        own, tree = where[start:], sequence.tree
        found = ancestor_slots(tree.parents, own[tree.before :])
        paths += [[]] * tree.before + found
        positions += [*range(start, tree.root), *(tree.root + len(p) for p in found)]
        slots += own
        query_start.append(query_start[-1] + tree.num_rows)
    width = max(map(len, paths)) + chance.randrange(3)
    padded = [p + [-1] * (width - len(p)) for p in paths]
    batch = ForwardBatch(
        token_ids=torch.zeros(len(rows), dtype=torch.int64),
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        query_start=torch.tensor(query_start, dtype=torch.int32),
        context_len=torch.tensor(ends, dtype=torch.int32),
        block_tables=table,
        logits_rows=torch.zeros(0, dtype=torch.int64),
        max_query_len=max(s.tree.num_rows for s in sequences),
        max_context_len=max(ends),
    )
    if branches:
        paths_of_rows = torch.tensor(padded, dtype=torch.int32).view(len(rows), width)
        batch = replace(batch, ancestors=paths_of_rows)
    return layer, batch, rows


@st.composite
def parents(draw: st.DrawFn) -> tuple[int, ...]:
    most = draw(st.sampled_from([3, 8, 20]))
    deep = draw(st.booleans())  # a node's parent is near, or anywhere
    found: list[int] = []
    for i in range(draw(st.integers(0, most))):
        found.append(draw(st.integers(max(-1, i - 3) if deep else -1, i - 1)))
    return tuple(found)


NEAR_BORDERS = [0, 1, 5, 58, 63, 64, 120, 126, 127, 128]
FAR = [250, 508, 511, 512, 640]


@st.composite
def steps(draw: st.DrawFn) -> list[Tree]:
    roots = st.sampled_from(NEAR_BORDERS + FAR)
    trees = []
    for _ in range(draw(st.integers(1, 3))):
        root = draw(roots)
        trees.append(Tree(root, draw(parents()), draw(st.integers(0, min(root, 2)))))
    return trees


def sequences_of(trees: list[Tree], width: int, dtype: torch.dtype) -> list[Sequence]:
    """Random rows; width: of a row of the step, at least the cache's."""
    return [
        Sequence(
            tree,
            normal(tree.root - tree.before, RANK + ROPE, dtype=dtype),
            normal(tree.num_rows, width, dtype=dtype),
        )
        for tree in trees
    ]


def compare(run: Any, sequences: list[Sequence], block_size: int, seed: int) -> None:
    """run(layer, batch, rows) -> [T, ...]: paths in the step of all, and each by itself."""
    layer, batch, rows = place(sequences, block_size, seed)
    together = run(layer, batch, rows)
    assert not together.isnan().any()
    begin = 0
    for sequence in sequences:
        own = together[begin : begin + sequence.tree.num_rows]
        begin += sequence.tree.num_rows
        for number, node in enumerate(sequence.tree.ends):
            chain = sequence.chain(node)
            head = list(range(sequence.tree.before + 1))
            on_path = [*head, *(len(head) + i for i in sequence.tree.path(node))]
            size = 1 + (seed + number) % 9
            alone = run(*place([chain], size, seed + number, branches=bool(number % 2)))
            assert torch.equal(own[on_path], alone), (sequence.tree, node)


def slow_or_many(kernels: Kernels) -> int:
    return 5 if isinstance(kernels, TorchKernels) else 20


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["absorbed", "naive"])
def test_paths_attend_as_chains_do(kernels: Kernels, dtype: torch.dtype, form: str) -> None:
    slow = isinstance(kernels, TorchKernels)

    def attention(heads: int) -> Any:
        kv_b = kernels.linear_weight(
            normal(heads * (NOPE + VALUE), RANK, dtype=dtype, scale=RANK**-0.5), dtype
        )

        def run(layer: Tensor, batch: ForwardBatch, rows: Tensor) -> Tensor:
            layer.view(-1, RANK + ROPE)[batch.slot_mapping] = rows[:, : RANK + ROPE]
            q = rows[:, RANK + ROPE :].reshape(len(rows), heads, -1)
            if form == "naive":
                return kernels.naive_attention(q, layer, kv_b, batch, 0.3, VALUE)
            return kernels.latent_attention(q[..., :RANK], q[..., RANK:], layer, batch, 0.3)

        return run

    @settings(
        max_examples=slow_or_many(kernels),
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    # 50 heads: a tree is several tiles of the native kernel.
    @given(steps(), st.sampled_from([3, 50]), st.sampled_from([1, 3, 16, 64]), st.integers(0, 99))
    @example([Tree(126, (-1, -1, 0, 0, 1, 2, 2, 3), 1), Tree(63, (-1, 0, 0))], 3, 3, 1)
    @example([Tree(127, (-1, -1, 0, 1, 2, 3, 4, 5))], 3, 16, 2)
    @example([Tree(509, (-1, -1, 0, 1, 2, 3, 4, 5))], 50, 16, 2)
    def check(trees: list[Tree], heads: int, block_size: int, seed: int) -> None:
        if slow:  # its time is by positions
            heads, trees = 2, [replace(t, root=t.root % 130, before=0) for t in trees[:2]]
        torch.manual_seed(seed)
        width = RANK + ROPE + heads * ((RANK if form == "absorbed" else NOPE) + ROPE)
        compare(attention(heads), sequences_of(trees, width, dtype), block_size, seed)

    check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("root", [5, 6])
def test_the_order_of_a_sum_is_a_chains(kernels: Kernels, dtype: torch.dtype, root: int) -> None:
    """All positions count alike; a large value stands first and is taken away by the deepest nodes,
    so that what is left shows how each sum between them was rounded (brain floats: in pairs)."""
    torch.manual_seed(root)
    large = normal(RANK + ROPE, dtype=dtype) * 2**18
    tree = Tree(root, (-1, -1, -1, 0, 1, 0, 2, 3, 4, 5, 6))
    before, rows = normal(root, RANK + ROPE, dtype=dtype), normal(12, RANK + ROPE, dtype=dtype)
    before[0], rows[8:] = large, -large

    def run(layer: Tensor, batch: ForwardBatch, rows: Tensor) -> Tensor:
        layer.view(-1, RANK + ROPE)[batch.slot_mapping] = rows
        q = torch.zeros(len(rows), 2, RANK + ROPE, dtype=dtype)
        return kernels.latent_attention(q[..., :RANK], q[..., RANK:], layer, batch, 0.3)

    compare(run, [Sequence(tree, before, rows)], 4, root)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_whole_layer_writes_and_attends(kernels: Kernels, dtype: torch.dtype) -> None:
    """absorbed_mla: rotary positions by depth, latents to the nodes' own slots."""
    torch.manual_seed(0)
    heads = 2

    def packed(n: int, k: int) -> object:
        return kernels.linear_weight(normal(n, k, dtype=dtype, scale=k**-0.5), dtype)

    weights: MlaWeights = SimpleNamespace(  # type: ignore[assignment]
        qkv_a=packed(24 + RANK + ROPE, HIDDEN),
        q_a_norm=normal(24),
        q_b=packed(heads * (NOPE + ROPE), 24),
        kv_a_norm=normal(RANK),
        w_uk=packed(heads * RANK, NOPE),
        w_uv=packed(heads * VALUE, RANK),
        o=packed(HIDDEN, heads * VALUE),
    )
    layer_of = kernels.absorbed_mla(
        weights, MlaShape(heads, NOPE, ROPE, RANK, VALUE, 0.3, 1e-6), normal(160, ROPE)
    )

    def run(layer: Tensor, batch: ForwardBatch, rows: Tensor) -> Tensor:
        return layer_of(rows, layer, batch)

    trees = [Tree(62, (-1, -1, 0, 1, 1, 2, 0), 2), Tree(9, ()), Tree(126, (-1, 0, -1, 1, 3))]
    compare(run, sequences_of(trees, HIDDEN, dtype), 4, 5)


def test_wrong_ancestors_are_refused(kernels: Kernels) -> None:
    if isinstance(kernels, TorchKernels):
        pytest.skip("the twin relies on torch's own checks")
    sequences = sequences_of([Tree(3, (-1, -1))], 2 * (RANK + ROPE), torch.float32)
    layer, batch, rows = place(sequences, 4, 0)
    q = rows.view(len(rows), 2, -1)

    def attend(ancestors: Tensor) -> None:
        wrong = replace(batch, ancestors=ancestors)
        kernels.latent_attention(q[..., :RANK], q[..., RANK:], layer, wrong, 0.3)

    assert batch.ancestors is not None
    attend(batch.ancestors)
    beyond, gap = batch.ancestors.clone(), torch.full((3, 6), -1, dtype=torch.int32)
    beyond[1, 0] = layer.shape[0] * layer.shape[1]
    gap[2, 1] = 0
    for wrong in (beyond, gap, torch.zeros(3, 6, dtype=torch.int32)):  # too many for position 3
        with pytest.raises(KernelArgumentError, match="ancestors: a row must have slots"):
            attend(wrong)
    for wrong in (batch.ancestors.long(), batch.ancestors[1:], batch.ancestors.t()):
        with pytest.raises(KernelArgumentError, match="ancestors"):
            attend(wrong)


@given(st.data())
def test_latents_are_read_before_they_are_written(data: st.DataObject) -> None:
    slots = st.lists(st.integers(0, 11), unique=True, max_size=8)
    to = data.draw(slots)
    source = data.draw(st.lists(st.integers(0, 11), min_size=len(to), max_size=len(to)))
    layers = [torch.randn(3, 4, 5), torch.randn(3, 4, 5)]
    before = [layer.clone().view(12, 5) for layer in layers]
    copy_latents(PagedKVCache(layers, 4), torch.tensor(source).long(), torch.tensor(to).long())
    for layer, was in zip(layers, before, strict=True):
        for i in range(12):
            want = was[source[to.index(i)]] if i in to else was[i]
            assert torch.equal(layer.view(12, 5)[i], want)


def test_paths_of_a_tree() -> None:
    assert ancestor_slots((-1, 0, 0, -1, 2), [7, 10, 11, 12, 13, 20]) == [
        [], [10], [10, 11], [10, 12], [13], [10, 12, 20],
    ]  # fmt: skip
    assert ancestor_slots((), [4]) == [[]]
