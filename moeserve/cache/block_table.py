"""BlockTable: the block ids of one running sequence; BlockTables: all of them as one matrix.

The matrix is kept from step to step, one row a running sequence, so that a batch takes its block
tables by one indexed copy instead of walking Python lists.

Knows: ids and rows. Knows nothing of owners: retaining and releasing is `BlockCache`'s work.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class BlockTables:
    """matrix [rows, width] int32, -1 where a row has no block. The width grows by doubling."""

    def __init__(self, num_rows: int, width: int = 16) -> None:
        self.matrix: NDArray[np.int32] = np.full((num_rows, width), -1, dtype=np.int32)
        self._free_rows = list(range(num_rows - 1, -1, -1))

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def lease(self) -> BlockTable:
        assert self._free_rows, "BlockTables: more sequences run than there are rows"
        return BlockTable(self, self._free_rows.pop())

    def give_back(self, table: BlockTable) -> None:
        assert table.row >= 0, "a block table is given back twice"
        self.matrix[table.row, : len(table.ids)] = -1
        self._free_rows.append(table.row)
        table.row = -1

    def write(self, row: int, index: int, block: int) -> None:
        if index >= self.matrix.shape[1]:
            self.matrix = np.pad(
                self.matrix, ((0, 0), (0, self.matrix.shape[1])), constant_values=-1
            )
        self.matrix[row, index] = block


class BlockTable:
    """ids[i] holds the positions [i * block_size, (i + 1) * block_size) of the sequence."""

    __slots__ = ("_tables", "generations", "ids", "row")

    def __init__(self, tables: BlockTables, row: int) -> None:
        self._tables = tables
        self.row = row
        self.ids: list[int] = []
        self.generations: list[int] = []

    def append(self, block: int, generation: int) -> None:
        self._tables.write(self.row, len(self.ids), block)
        self.ids.append(block)
        self.generations.append(generation)

    def pop(self) -> tuple[int, int]:
        """The last block leaves -> its id and generation."""
        self._tables.write(self.row, len(self.ids) - 1, -1)
        return self.ids.pop(), self.generations.pop()

    def replace(self, index: int, block: int, generation: int) -> None:
        self._tables.write(self.row, index, block)
        self.ids[index] = block
        self.generations[index] = generation
