"""BlockCache: pool, tables and prefix tree as the scheduler uses them.

A sequence's blocks are first those it shares through the tree (its committed path), then its own.
Only the last one may be partly empty, and whole ones behind it that drafts were given. Blocks enter
the tree after the step that wrote them has been committed, never before: a half-written block can
not be hit.

Knows: token ids, counts of written positions. Knows nothing of requests, budgets or order.
"""

from __future__ import annotations

from collections.abc import Sequence

from moeserve.cache.block_pool import BlockPool
from moeserve.cache.block_table import BlockTable, BlockTables
from moeserve.cache.prefix_tree import Node, PrefixTree


class Lease:
    """What a running sequence holds: its table, and how far its blocks stand in the tree."""

    __slots__ = ("node", "num_committed", "salt", "table")

    def __init__(self, table: BlockTable, salt: str) -> None:
        self.table = table
        self.salt = salt
        self.node: Node | None = None  # of the last committed block
        self.num_committed = 0  # blocks in the tree


class BlockCache:
    def __init__(
        self, num_blocks: int, block_size: int, max_sequences: int, prefix_cache: bool = True
    ) -> None:
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.pool = BlockPool(num_blocks)
        self.tree = PrefixTree(self.pool, block_size)
        self.tables = BlockTables(max_sequences)

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now: free ones and idle cached ones."""
        return self.pool.num_free + self.tree.num_idle

    def blocks_for(self, num_positions: int) -> int:
        return -(-num_positions // self.block_size)

    def match(self, token_ids: Sequence[int], salt: str) -> list[Node]:
        """Cached blocks that a sequence of these tokens may begin with. At least one of the tokens
        is left to compute: the last one's logits are wanted. Changes nothing."""
        if not self.prefix_cache:
            return []
        return self.tree.match(token_ids, salt, (len(token_ids) - 1) // self.block_size)

    def open(
        self, salt: str, num_positions: int, matched: Sequence[Node]
    ) -> tuple[Lease, int] | None:
        """Begin a sequence on its matched blocks -> (lease, cached tokens), or None if the blocks
        of `num_positions` positions are not to be had now. Matched blocks are owned at once, the
        others come by `grow`."""
        idle_hits = sum(self.pool.owners[node.block] == 1 for node in matched)
        missing = self.blocks_for(num_positions) - len(matched)
        if missing > self.num_available - idle_hits:
            return None
        lease = Lease(self.tables.lease(), salt)
        for node in matched:
            lease.table.append(node.block, self.tree.acquire(node))
        if matched:
            lease.node, lease.num_committed = matched[-1], len(matched)
        return lease, len(matched) * self.block_size

    def grow(self, lease: Lease, num_positions: int) -> None:
        """Own blocks for `num_positions` positions; the caller has seen that they are there."""
        table = lease.table
        for _ in range(self.blocks_for(num_positions) - len(table.ids)):
            if not self.pool.num_free:
                self.tree.evict_one()
            table.append(*self.pool.allocate())

    def shrink(self, lease: Lease, num_positions: int) -> int:
        """Give back the blocks behind `num_positions` positions, none of the committed -> how
        many."""
        table, keep = lease.table, max(self.blocks_for(num_positions), lease.num_committed)
        spare = max(len(table.ids) - keep, 0)
        for _ in range(spare):
            self.tree.release(*table.pop())
        return spare

    def commit(self, lease: Lease, token_ids: Sequence[int], num_written: int) -> None:
        """The first `num_written` positions lie in the cache: full blocks go into the tree. Where
        the tree has the same tokens already, its block is kept and ours becomes free."""
        if not self.prefix_cache:
            return
        size, table = self.block_size, lease.table
        while (lease.num_committed + 1) * size <= num_written:
            i = lease.num_committed
            block, generation = table.ids[i], table.generations[i]
            key = tuple(token_ids[i * size : (i + 1) * size])
            lease.node = self.tree.insert(lease.node, key, lease.salt, block, generation)
            if lease.node.block != block:
                table.replace(i, lease.node.block, lease.node.generation)
                left = self.pool.release(block, generation)
                assert left == 0, f"an uncommitted block had {left} more owners"
            lease.num_committed += 1

    def close(self, lease: Lease) -> None:
        """Give everything back. Committed blocks stay cached until their place is wanted."""
        table = lease.table
        for block, generation in zip(reversed(table.ids), reversed(table.generations), strict=True):
            self.tree.release(block, generation)
        self.tables.give_back(table)
        lease.node = None

    def check(self) -> None:
        self.pool.check()
        self.tree.check()
