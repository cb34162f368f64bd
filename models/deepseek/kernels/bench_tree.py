"""Times attention over trees of drafts against chains of as many rows.

`python -m models.deepseek.kernels.bench_tree [--threads N] [--seconds S]` prints a table. Plain
chain, chain told as a tree and tree run in turns over the same cache; ratios are medians of paired
ratios, cost over the plain chain's. A chain told as a tree must give the same bits, or it stops.
Shapes: the bundled checkpoint's attention and that of bench.py.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from models.arguments import Parser, at_least, between
from models.deepseek.kernels.base import Kernels
from models.deepseek.kernels.bench import batch_for, seconds
from models.deepseek.kernels.select import create_kernels
from models.interface import ForwardBatch, ancestor_slots

BF16 = torch.bfloat16
BLOCK = 16


@dataclass(frozen=True)
class Shape:
    name: str
    heads: int
    rank: int
    rope: int


SHAPES = (Shape("bundled", 4, 96, 32), Shape("1.7 B", 16, 512, 64))
# Sequences, slots in use, parents of a tree with branches.
STEPS: tuple[tuple[int, int, tuple[int, ...]], ...] = (
    (1, 300, (-1, -1, 0)),
    (1, 300, (-1, -1, 0, 0, 1, 2, 4)),
    (1, 1500, (-1, -1, 0, 0, 1, 2, 4)),
    (8, 500, (-1, -1, 0)),
)


def with_trees(plain: ForwardBatch, parents: Seq[int]) -> ForwardBatch:
    """The last rows of each sequence as the nodes of a tree, in the slots that they have."""
    rows: list[list[int]] = []
    positions: list[int] = []
    for s in range(plain.num_sequences):
        end, blocks = int(plain.context_len[s]), plain.block_tables[s].tolist()
        root = end - 1 - len(parents)
        slots = [blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(root, end)]
        paths = ancestor_slots(parents, slots)
        rows += paths
        positions += [root + len(path) for path in paths]
    depth = max(map(len, rows))
    padded = [path + [-1] * (depth - len(path)) for path in rows]
    return replace(
        plain,
        positions=torch.tensor(positions),
        ancestors=torch.tensor(padded, dtype=torch.int32),
    )


def row(
    kernels: Kernels, shape: Shape, step: tuple[int, int, tuple[int, ...]], budget: float
) -> str:
    sequences, context, parents = step
    count = len(parents) + 1
    plain = batch_for(context, count, sequences, BLOCK)
    layer = torch.randn(plain.block_tables.numel(), BLOCK, shape.rank + shape.rope).to(BF16)
    q = torch.randn(count * sequences, shape.heads, shape.rank + shape.rope).to(BF16)

    def attend(batch: ForwardBatch) -> Tensor:
        latent, rope = q[..., : shape.rank], q[..., shape.rank :]
        return kernels.latent_attention(latent, rope, layer, batch, 0.07)

    told = with_trees(plain, range(-1, len(parents) - 1))
    tree = with_trees(plain, parents)
    if not torch.equal(attend(plain), attend(told)):
        raise SystemExit(f"{shape.name}: a chain that is told as a tree has other results")
    attend(tree)
    times: list[tuple[float, float, float]] = []
    end = time.perf_counter() + budget
    while len(times) < 9 or time.perf_counter() < end:
        chain, as_tree, branched = (
            seconds(partial(attend, batch)) for batch in (plain, told, tree)
        )
        times.append((chain, as_tree, branched))
    of_plain = statistics.median(x[0] for x in times) * 1e6
    ratios = [statistics.median(x[i] / x[0] for x in times) for i in (1, 2)]
    return (
        f"| {shape.name} | {sequences} x {count} of {context} | {of_plain:.0f} | "
        f"{ratios[0]:.3f} | {ratios[1]:.3f} |"
    )


def main() -> None:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=at_least(1), default=torch.get_num_threads())
    parser.add_argument("--seconds", type=between(0), default=1.0, help="time for each row")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    choice = create_kernels("native")
    print(f"{choice.reason}; {options.threads} threads\n")
    print("| attention | rows | chain us | told as a tree | tree |")
    print("| --- | --- | ---: | ---: | ---: |")
    for shape in SHAPES:
        for step in STEPS:
            print(row(choice.kernels, shape, step, options.seconds), flush=True)


if __name__ == "__main__":
    main()
