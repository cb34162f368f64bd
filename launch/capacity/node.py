"""What a node must have beside its GPUs: memory of the host, memory that processes share.

Knows numbers; nothing of models.
"""

from __future__ import annotations

from dataclasses import dataclass

NEEDED_HOST = 16e9  # of a rank: pinned buffers, the process, pages of the file being read
NEEDED_SHARED = 1e9  # /dev/shm of a rank: NCCL within a node, queues between its processes


@dataclass(frozen=True)
class Node:
    """Bytes. None: host_memory as the GPU's profile says, shared_memory not known."""

    host_memory: float | None = None
    shared_memory: float | None = None
