"""The emulation as of machines with fewer GPUs: several nodes with few ranks, for tests.

Knows nothing else: nodes of the library have 8 ranks.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from dispatch.emulation.buffer import Buffer
from dispatch.emulation.events import Config


def nodes_of(ranks: int) -> Any:
    """In place of the module: `Buffer` among nodes of so many ranks."""

    class SmallConfig(Config):
        nvl_peers = ranks

    class SmallNodesBuffer(Buffer):
        ranks_per_node = ranks

        @staticmethod
        def get_dispatch_config(num_ranks: int) -> Config:
            return SmallConfig(**vars(Buffer.get_dispatch_config(num_ranks)))

        @staticmethod
        def get_combine_config(num_ranks: int) -> Config:
            return SmallConfig(**vars(Buffer.get_combine_config(num_ranks)))

    return SimpleNamespace(
        Buffer=SmallNodesBuffer,
        Config=SmallConfig,
        topk_idx_t=torch.int64,
        __version__=f"of nodes of {ranks}, emulated",
    )
