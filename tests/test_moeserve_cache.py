"""Block pool, tables and prefix tree, driven at random against what must always be true."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moeserve.cache import BlockCache, BlockPool, BlockTables, Lease, PrefixTree
from moeserve.cache.block_hash import block_hashes

QUICK = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def test_pool_hands_each_block_out_once_and_takes_it_back_once() -> None:
    pool = BlockPool(3)
    taken = [pool.allocate() for _ in range(3)]
    assert sorted(block for block, _ in taken) == [0, 1, 2]
    assert pool.num_free == 0
    with pytest.raises(AssertionError, match="no free block"):
        pool.allocate()
    block, generation = taken[0]
    assert pool.release(block, generation) == 0
    with pytest.raises(AssertionError, match="given back twice"):
        pool.release(block, generation)
    again, newer = pool.allocate()
    assert (again, newer) == (block, generation + 1)
    with pytest.raises(AssertionError, match="generation"):
        pool.release(block, generation)  # a stale owner: the block is another sequence's now
    with pytest.raises(AssertionError, match="is free"):
        pool.release(block, newer)
        pool.retain(block)


def test_tables_grow_and_rows_are_reused_clean() -> None:
    tables = BlockTables(2, width=2)
    first, second = tables.lease(), tables.lease()
    for block in range(5):
        first.append(block, 1)
    second.append(9, 1)
    assert tables.matrix.shape == (2, 8)
    assert tables.matrix[first.row].tolist() == [0, 1, 2, 3, 4, -1, -1, -1]
    first.replace(1, 7, 3)
    assert first.ids == [0, 7, 2, 3, 4] and first.generations[1] == 3
    row = first.row
    tables.give_back(first)
    assert (tables.matrix[row] == -1).all()
    assert tables.lease().row == row
    assert tables.matrix[second.row, 0] == 9


def cache_with(tokens: list[int], *, size: int = 2, blocks: int = 8) -> tuple[BlockCache, Lease]:
    cache = BlockCache(blocks, size, max_sequences=4)
    lease = write(cache, tokens)
    return cache, lease


def begin(cache: BlockCache, tokens: list[int], salt: str = "") -> tuple[Lease, int] | None:
    return cache.open(salt, len(tokens), cache.match(tokens, salt))


def write(cache: BlockCache, tokens: list[int], salt: str = "") -> Lease:
    """A sequence that computes all of `tokens`."""
    opened = begin(cache, tokens, salt)
    assert opened is not None
    cache.grow(opened[0], len(tokens))
    cache.commit(opened[0], tokens, len(tokens))
    return opened[0]


def hits(cache: BlockCache, tokens: list[int], salt: str = "") -> int:
    """Cached tokens that a sequence of these tokens would get."""
    opened = begin(cache, tokens, salt)
    assert opened is not None
    cache.close(opened[0])
    return opened[1]


def test_a_hit_leaves_at_least_one_token_to_compute() -> None:
    cache, _ = cache_with([1, 2, 3, 4])
    assert hits(cache, [1, 2, 3, 4]) == 2
    assert hits(cache, [1, 2, 3, 4, 5]) == 4
    assert hits(cache, [1, 2]) == 0
    assert hits(cache, [1, 2, 9, 4, 5]) == 2
    assert hits(cache, [3, 4, 1, 2, 5]) == 0


def test_only_committed_full_blocks_are_hit() -> None:
    cache = BlockCache(8, 2, max_sequences=4)
    tokens = [1, 2, 3, 4, 5]
    opened = begin(cache, tokens)
    assert opened is not None
    cache.grow(opened[0], 5)
    assert hits(cache, tokens) == 0  # blocks are there, nothing is written
    cache.commit(opened[0], tokens, 3)  # half of the second block
    assert hits(cache, tokens) == 2
    cache.commit(opened[0], tokens, 5)
    assert hits(cache, tokens) == 4
    assert len(cache.tree) == 2


def test_salts_never_share() -> None:
    cache, _ = cache_with([1, 2, 3])
    assert hits(cache, [1, 2, 3], salt="other") == 0
    write(cache, [1, 2, 3], salt="other")
    assert len(cache.tree) == 2
    assert len(set(cache.tree.hashes())) == 2
    cache.check()


def test_two_that_computed_the_same_keep_one_block() -> None:
    cache = BlockCache(8, 2, max_sequences=4)
    tokens = [1, 2, 3, 4, 5]
    leases = []
    for _ in range(2):  # both begin before either has committed
        opened = begin(cache, tokens)
        assert opened is not None and opened[1] == 0
        cache.grow(opened[0], 5)
        leases.append(opened[0])
    assert cache.pool.num_used == 6
    cache.commit(leases[0], tokens, 5)
    cache.commit(leases[1], tokens, 5)
    assert cache.pool.num_used == 4  # two shared, and the partly filled last one of each
    assert leases[0].table.ids[:2] == leases[1].table.ids[:2]
    assert leases[0].table.ids[2] != leases[1].table.ids[2]
    assert cache.tables.matrix[leases[1].table.row, :3].tolist() == leases[1].table.ids
    cache.close(leases[0])
    cache.close(leases[1])
    assert cache.num_available == 8 and cache.tree.num_idle == 2
    cache.check()


def test_least_recently_used_goes_first_and_parents_after_children() -> None:
    cache = BlockCache(6, 2, max_sequences=4)
    cache.close(write(cache, [1, 2, 3, 4]))
    cache.close(write(cache, [5, 6]))
    cache.close(write(cache, [1, 2, 7, 8]))  # uses [1, 2] again
    assert cache.pool.num_free == 2
    blocks = [cache.pool.allocate() for _ in range(2)]
    order = []
    while cache.tree.num_idle:
        before = set(cache.tree.hashes())
        cache.tree.evict_one()
        order.append((before - set(cache.tree.hashes())).pop())
        cache.tree.check()
    names = {
        block_hashes([1, 2, 3, 4], 2)[1]: "34",
        block_hashes([5, 6], 2)[0]: "56",
        block_hashes([1, 2, 7, 8], 2)[1]: "78",
        block_hashes([1, 2], 2)[0]: "12",
    }
    assert [names[h] for h in order] == ["34", "56", "78", "12"]
    for block, generation in blocks:
        cache.pool.release(block, generation)
    cache.check()


def test_open_counts_idle_hits_only_once() -> None:
    """Blocks that are hit are no longer there to be taken for the rest of the prompt."""
    cache = BlockCache(3, 2, max_sequences=4)
    cache.close(write(cache, [1, 2, 3, 4]))
    assert cache.num_available == 3
    assert begin(cache, [1, 2, 3, 4, 5, 6, 7]) is None  # 4 blocks
    opened = begin(cache, [1, 2, 3, 4, 5, 6])  # 2 hit, 1 free
    assert opened is not None and opened[1] == 4 and cache.num_available == 1
    cache.grow(opened[0], 6)
    assert cache.num_available == 0


def test_events_are_netted_and_name_what_the_router_hashes() -> None:
    cache, lease = cache_with([1, 2, 3, 4, 5])
    assert cache.tree.take_changes() == (tuple(block_hashes([1, 2, 3, 4, 5], 2)), ())
    assert cache.tree.take_changes() == ((), ())
    cache.close(lease)
    cache.close(write(cache, [8, 9]))
    assert cache.tree.clear() == 3
    added, removed = cache.tree.take_changes()  # [8, 9] came and went unseen
    assert added == () and set(removed) == set(block_hashes([1, 2, 3, 4, 5], 2))


def test_block_hash_is_the_same_in_another_process() -> None:
    code = (
        "from moeserve.cache.block_hash import block_hashes; print(block_hashes(range(9), 3, 's'))"
    )
    command = [sys.executable, "-c", code]
    outs = {
        subprocess.run(
            command, env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."}, capture_output=True, text=True
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert outs == {str(block_hashes(range(9), 3, "s"))}


class CacheMachine(RuleBasedStateMachine):
    """Sequences over a tiny alphabet open, grow, commit and close in any order. `content` says
    what tokens lie in each block, as a model of the cache memory would."""

    SIZE, BLOCKS, ROWS = 2, 12, 5

    def __init__(self) -> None:
        super().__init__()
        self.cache = BlockCache(self.BLOCKS, self.SIZE, self.ROWS)
        self.content: dict[int, list[int]] = {}
        self.live: list[tuple[Lease, list[int], int]] = []  # lease, tokens, positions written
        self.router: set[int] = set()

    @precondition(lambda self: len(self.live) < self.ROWS)
    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        salt=st.sampled_from(["", "s"]),
        use_prefix=st.booleans(),
    )
    def open(self, tokens: list[int], salt: str, use_prefix: bool) -> None:
        before = self.cache.num_available
        matched = self.cache.match(tokens, salt) if use_prefix else []
        opened = self.cache.open(salt, len(tokens), matched)
        if opened is None:
            assert before < self.cache.blocks_for(len(tokens))
            return
        lease, cached = opened
        assert cached % self.SIZE == 0 and cached < len(tokens) and (use_prefix or not cached)
        for i, block in enumerate(lease.table.ids):
            assert self.content[block] == [salt, *tokens[: (i + 1) * self.SIZE]]
        self.live.append((lease, tokens, cached))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.live) - 1))
        lease, tokens, written = self.live[at]
        if written == len(tokens):
            return
        end = data.draw(st.integers(written + 1, len(tokens)))
        if self.cache.blocks_for(end) - len(lease.table.ids) > self.cache.num_available:
            return
        self.cache.grow(lease, end)
        for i in range(self.cache.blocks_for(written + 1) - 1, self.cache.blocks_for(end)):
            self.content[lease.table.ids[i]] = [
                lease.salt,
                *tokens[: min((i + 1) * self.SIZE, end)],
            ]
        self.cache.commit(lease, tokens, end)
        self.live[at] = (lease, tokens, end)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        lease, _, _ = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.cache.close(lease)

    @rule()
    def clear(self) -> None:
        self.cache.tree.clear()

    @rule()
    def report(self) -> None:
        added, removed = self.cache.tree.take_changes()
        assert not self.router & set(added) and self.router >= set(removed)
        self.router = (self.router | set(added)) - set(removed)
        assert self.router == set(self.cache.tree.hashes())

    @invariant()
    def nothing_lost_or_wrongly_shared(self) -> None:
        self.cache.check()
        owners = np.zeros(self.BLOCKS, np.int64)
        for lease, tokens, written in self.live:
            table = lease.table
            assert self.cache.tables.matrix[table.row, : len(table.ids)].tolist() == table.ids
            assert len(table.ids) == self.cache.blocks_for(written)
            for i, block in enumerate(table.ids):
                owners[block] += 1
                known = self.content[block]
                assert known == [lease.salt, *tokens[: len(known) - 1]]
                assert len(known) - 1 >= min(written, (i + 1) * self.SIZE)
        in_tree = np.zeros(self.BLOCKS, np.int64)
        in_tree[list(self.cache.tree._by_block)] = 1
        assert (owners + in_tree).tolist() == self.cache.pool.owners

    def teardown(self) -> None:
        for lease, _, _ in self.live:
            self.cache.close(lease)
        assert self.cache.num_available == self.BLOCKS
        self.cache.tree.clear()
        assert self.cache.pool.num_free == self.BLOCKS and len(self.cache.tree) == 0
        assert self.cache.tables.num_free_rows == self.ROWS
        self.cache.check()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = QUICK


def test_prefix_cache_off_shares_nothing() -> None:
    cache = BlockCache(8, 2, max_sequences=4, prefix_cache=False)
    lease = write(cache, [1, 2, 3, 4])
    assert len(cache.tree) == 0 and hits(cache, [1, 2, 3, 4, 5]) == 0
    cache.close(lease)
    assert cache.pool.num_free == 8


def test_tree_alone_refuses_to_drop_what_is_in_use() -> None:
    pool = BlockPool(2)
    tree = PrefixTree(pool, 2)
    block, generation = pool.allocate()
    tree.insert(None, (1, 2), "", block, generation)
    assert tree.num_idle == 0 and tree.clear() == 0 and len(tree) == 1
    tree.release(block, generation)
    assert tree.num_idle == 1 and tree.clear() == 1 and pool.num_free == 2
