"""Waiting times of a race among tokens, inside of kernels: who is drawn, without a sum over all.

The numbers are those of the engine's own draw on CPUs: 32 bits for each runner, a function of
(seed, output position, race, runner's number) alone, made an exponential waiting time, which is
divided by the runner's probability; the first to arrive is drawn. Here the logarithm of
1 - (bits + 1/2) / 2^32 is taken, which is exact in fp64; where there are rounding errors left, they
are those of two libraries' logarithms.

Knows no probabilities, no kernel. Shape letters: n rows, m runners.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from models.deepseek.kernels.gpu.language import tl, triton

# Which race, as the engine counts: each has numbers of its own.
ALONE, BLOCKS, WITHIN = 0, 1, 2
RACE_BLOCK = 128  # ids of a block, the runners of the race BLOCKS
_STREAM = 4 << 28  # races among all uses of random numbers


@triton.jit
def _mix(x):
    """64 bits spread over all 64 (splitmix64 has it as its last step)."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def race_state(seed, position, race: tl.constexpr):
    """seed, position: 64 bits in int64 -> uint64 that all runners of this race share."""
    seed = seed.to(tl.uint64, bitcast=True)
    stream: tl.constexpr = (race | (4 << 28)) << 32
    counter = position.to(tl.uint64, bitcast=True) + stream
    return _mix(_mix(seed + 0x9E3779B97F4A7C15) ^ (counter * 0xD1342543DE82EF95))


@triton.jit
def waiting_time(state, number):
    """state of a race, number [m] int32 of runners -> [m] fp64, exponential of mean 1."""
    x = number.to(tl.uint32) * 0x9E3779B1 + state.to(tl.uint32)
    x = x ^ (x >> 16)
    x = x * 0x85EBCA6B
    x = x ^ (state >> 32).to(tl.uint32)
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35
    x = x ^ (x >> 16)
    rest = (4294967296.0 - (x.to(tl.float64) + 0.5)) * 2.3283064365386963e-10  # 2^-32
    return -tl.log(rest)


@triton.jit
def arrival(state, number, p):
    """[m] fp64: waiting time over probability; who has none never arrives."""
    time = waiting_time(state, number)
    chance = p.to(tl.float64)
    return tl.where(p > 0, time / tl.where(p > 0, chance, 1.0), float("inf"))


def waiting_times_twin(
    seed: int, position: int, race: int, numbers: list[int]
) -> NDArray[np.float64]:
    """[m] fp64, in whole numbers of any size."""
    mask = (1 << 64) - 1

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    counter = (position + ((_STREAM | race) << 32)) & mask
    state = mix(mix((seed + 0x9E3779B97F4A7C15) & mask) ^ (counter * 0xD1342543DE82EF95 & mask))
    times = []
    for number in numbers:
        x = (number * 0x9E3779B1 + state) & 0xFFFFFFFF
        x = (x ^ (x >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
        x ^= state >> 32
        x = (x ^ (x >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
        x ^= x >> 16
        times.append(-np.log1p(-(x + 0.5) * 2.0**-32))
    return np.array(times, np.float64)
