"""The shapes that are timed: DeepSeek-V3's, and tiny ones with which all of it can be walked.

Plain numbers. decode: rows a GPU; prefill: tokens of a step; experts: a GPU's.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    hidden: int = 7168
    inter: int = 2048  # of an expert
    dense_inter: int = 18432
    heads: int = 128
    q_rank: int = 1536
    rank: int = 512
    rope: int = 64
    nope: int = 128
    value: int = 128
    vocab: int = 129280
    routed: int = 256
    groups: int = 8
    kept_groups: int = 4
    top_k: int = 8
    block: int = 64  # positions of a cache block
    decode: tuple[int, ...] = (1, 32, 128, 256)
    prefill: int = 16384
    experts: tuple[int, ...] = (1, 2, 8, 32)
    contexts: tuple[int, ...] = (1024, 4096, 32768, 131072)
    torch_positions: int = 1 << 20  # plain torch gathers what it attends to
    # (new tokens, tokens before them) of each sequence
    prompts: tuple[tuple[tuple[int, int], ...], ...] = (
        ((4096, 0),) * 4,
        ((16384, 0),),
        ((4096, 61440),),
    )

    @property
    def width(self) -> int:
        return self.rank + self.rope

    @property
    def scale(self) -> float:
        return float((self.nope + self.rope) ** -0.5)


V3 = Sizes()
TINY = Sizes(
    hidden=256, inter=128, dense_inter=256, heads=16, q_rank=128, rank=128, rope=16, nope=16,
    value=16, vocab=300, routed=16, groups=4, kept_groups=2, top_k=2, block=16, decode=(1, 3),
    prefill=20, experts=(1, 2), contexts=(40,), torch_positions=40,
    prompts=(((20, 0),), ((4, 30),)),
)  # fmt: skip
