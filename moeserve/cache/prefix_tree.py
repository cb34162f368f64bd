"""PrefixTree: a radix tree over full blocks, to find what of a prompt lies in the cache already.

A node is one block; its key is the block's token ids under its parent (exact, so no collision can
mix two prompts). Each salt has a root of its own. The tree is one owner of each of its blocks;
a node which no sequence owns is idle, and idle nodes are dropped least recently used first.

Why dropping the first idle node is always right: whoever uses a node uses its ancestors too, and
gives them back after it. So a child is idle whenever its parent is, and stands before it.

Knows: token ids, blocks, the pool's counts. Knows nothing of sequences or of steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from moeserve.cache.block_hash import ROOT, block_hash
from moeserve.cache.block_pool import BlockPool


class Node:
    """block -1: a root. hash: the chain hash that the router knows the block by."""

    __slots__ = ("block", "children", "generation", "hash", "key", "parent", "salt")

    def __init__(
        self, parent: Node | None, key: tuple[int, ...], block: int, generation: int, salt: str
    ) -> None:
        self.parent, self.key, self.block, self.generation = parent, key, block, generation
        self.salt = salt
        self.children: dict[tuple[int, ...], Node] = {}
        self.hash: int = ROOT if parent is None else block_hash(parent.hash, key, salt)


class PrefixTree:
    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._roots: dict[str, Node] = {}
        self._by_block: dict[int, Node] = {}
        self._idle: OrderedDict[Node, None] = OrderedDict()
        self._changes: dict[int, bool] = {}  # hash -> added (True) or removed, since last taken

    def __len__(self) -> int:
        return len(self._by_block)

    @property
    def num_idle(self) -> int:
        """Blocks that can be had back at once."""
        return len(self._idle)

    def match(self, token_ids: Sequence[int], salt: str, max_blocks: int) -> list[Node]:
        """Longest cached prefix in whole blocks, at most max_blocks. Changes nothing."""
        found: list[Node] = []
        node = self._roots.get(salt)
        size = self._block_size
        while node is not None and len(found) < max_blocks:
            start = len(found) * size
            node = node.children.get(tuple(token_ids[start : start + size]))
            if node is not None:
                found.append(node)
        return found

    def acquire(self, node: Node) -> int:
        """A sequence becomes an owner of a node's block -> generation. Parents come first."""
        generation = self._pool.retain(node.block)
        assert generation == node.generation
        self._idle.pop(node, None)
        return generation

    def release(self, block: int, generation: int) -> None:
        """A sequence gives a block back, in the tree or not. Children come before parents."""
        if self._pool.release(block, generation) == 1:
            node = self._by_block.get(block)
            if node is not None:
                self._idle[node] = None

    def insert(
        self, parent: Node | None, key: tuple[int, ...], salt: str, block: int, generation: int
    ) -> Node:
        """Put a written block of a running sequence under `parent` (None: the salt's root).

        -> the node now standing for these tokens. If another block stands there already, that
        node is returned and acquired for the sequence, which gives its own block back itself.
        """
        if parent is None:
            parent = self._roots.get(salt)
            if parent is None:
                parent = self._roots[salt] = Node(None, (), -1, -1, salt)
        node = parent.children.get(key)
        if node is not None:
            if node.block != block:
                self.acquire(node)
            return node
        retained = self._pool.retain(block)
        assert retained == generation and block not in self._by_block
        node = parent.children[key] = Node(parent, key, block, generation, salt)
        self._by_block[block] = node
        self._note(node.hash, True)
        return node

    def evict_one(self) -> None:
        """Free the least recently used idle block."""
        node, _ = self._idle.popitem(last=False)
        self._drop(node)

    def clear(self) -> int:
        """Free all idle blocks -> how many."""
        dropped = len(self._idle)
        while self._idle:
            self.evict_one()
        return dropped

    def take_changes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(added, removed) chain hashes since the last call, netted."""
        changes, self._changes = self._changes, {}
        added = tuple(h for h, new in changes.items() if new)
        return added, tuple(h for h, new in changes.items() if not new)

    def hashes(self) -> tuple[int, ...]:
        return tuple(node.hash for node in self._by_block.values())

    def _drop(self, node: Node) -> None:
        assert not node.children, "a node with children was idle before them"
        assert node.parent is not None
        del node.parent.children[node.key]
        del self._by_block[node.block]
        left = self._pool.release(node.block, node.generation)
        assert left == 0, f"block {node.block} was idle with {left} owners"
        if node.parent.parent is None and not node.parent.children:
            del self._roots[node.salt]
        self._note(node.hash, False)

    def _note(self, hash_: int, added: bool) -> None:
        if self._changes.pop(hash_, added) == added:
            self._changes[hash_] = added

    def check(self) -> None:
        """Invariants, for tests: counts agree with the pool, children are idle before parents."""
        seen: dict[int, Node] = {}
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            assert node.parent is not None or node.children, "an empty root was kept"
            for key, child in node.children.items():
                assert child.key == key and child.parent is node and len(key) == self._block_size
                seen[child.block] = child
                stack.append(child)
        assert seen == self._by_block
        order = {node: i for i, node in enumerate(self._idle)}
        for block, node in seen.items():
            assert self._pool.generations[block] == node.generation
            assert (self._pool.owners[block] == 1) == (node in order)
            if node in order:
                for child in node.children.values():
                    assert order[child] < order[node]
