"""BlockPool: which KV blocks are free, and how many owners each of the others has.

Knows: block numbers, counts, generations. Knows nothing of what lies in a block or who owns it.
An owner is a sequence or the prefix tree. A block's generation grows each time it is handed out,
so that a stale owner is found when it gives back what is no longer its own.
"""

from __future__ import annotations


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self.owners = [0] * num_blocks
        self.generations = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: low ids first, warm ids again

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def allocate(self) -> tuple[int, int]:
        """-> (block, generation) with one owner. The caller has seen to it that one is free."""
        assert self._free, "BlockPool: no free block (make room first)"
        block = self._free.pop()
        assert self.owners[block] == 0, f"block {block} was free and owned"
        self.owners[block] = 1
        self.generations[block] += 1
        return block, self.generations[block]

    def retain(self, block: int) -> int:
        """One more owner of a block in use -> its generation."""
        assert self.owners[block] > 0, f"block {block} is free: nobody may retain it"
        self.owners[block] += 1
        return self.generations[block]

    def release(self, block: int, generation: int) -> int:
        """One owner less -> owners left; at 0 the block is free again."""
        assert self.generations[block] == generation, (
            f"block {block} generation {generation} was given back, now {self.generations[block]}"
        )
        assert self.owners[block] > 0, f"block {block} is given back twice"
        self.owners[block] -= 1
        if self.owners[block] == 0:
            self._free.append(block)
        return self.owners[block]

    def check(self) -> None:
        """Invariants, for tests and after errors: each block is free or owned, never both."""
        assert len(set(self._free)) == len(self._free), "a block lies in the free list twice"
        free = set(self._free)
        for block, owners in enumerate(self.owners):
            assert (owners == 0) == (block in free), f"block {block}: owners={owners}"
