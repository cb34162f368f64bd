"""Sizes of the first API's buffers: chunks by number of ranks, and what a size must be.

Knows numbers only.
"""

from __future__ import annotations

from dispatch import deepep
from dispatch.emulation.errors import host_assert

# Chunk sizes by number of ranks: NVLink send and receive, RDMA send and receive.
DISPATCH_CHUNKS = {
    2: (24, 256, 6, 128),
    4: (6, 256, 6, 128),
    8: (6, 256, 6, 128),
    16: (36, 288, 20, 128),
    24: (32, 288, 8, 128),
    32: (32, 288, 8, 128),
    48: (32, 288, 8, 128),
    64: (32, 288, 8, 128),
    96: (20, 480, 12, 128),
    128: (20, 560, 12, 128),
    144: (32, 720, 12, 128),
    160: (28, 720, 12, 128),
}
COMBINE_CHUNKS = {
    2: (10, 256, 6, 128),
    4: (9, 256, 6, 128),
    8: (4, 256, 6, 128),
    16: (4, 288, 12, 128),
    24: (1, 288, 8, 128),
    32: (1, 288, 8, 128),
    48: (1, 288, 8, 128),
    64: (1, 288, 8, 128),
    96: (1, 480, 8, 128),
    128: (1, 560, 8, 128),
    144: (2, 720, 8, 128),
    160: (2, 720, 8, 128),
}


def check_sizes(size: int, node: int, nvl: int, rdma: int, low_latency: bool) -> None:
    """size: ranks; node: of one node; the others as `Buffer` takes them."""
    for name, value in (("num_nvl_bytes", nvl), ("num_rdma_bytes", rdma)):
        host_assert(value >= 0 and value % 128 == 0, f"{name}={value} is a multiple of 128")
        host_assert(value <= deepep.MAX_BUFFER_BYTES, f"{name}={value} is under 32 GiB")
    host_assert(low_latency or rdma < 2**31, f"num_rdma_bytes={rdma} < 2^31 in normal mode")
    host_assert(size < node or size % node == 0, f"R={size} is below {node} or a multiple of it")
    largest = max(deepep.NORMAL_RANKS)
    host_assert(low_latency or size <= largest, f"R={size} <= {largest} in normal mode")
    host_assert(rdma == 0 or size > node or low_latency, "one node needs no RDMA in normal mode")
