"""The chain hash of a cached block: the same number on every process and machine.

Knows: token ids, a salt, a parent's hash. The ranks report cached blocks by it and the router
looks prompts up by it, so it may not depend on Python's hash seed or on the byte order.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

ROOT_HASH = 0  # parent of a sequence's first block


def block_hash(parent_hash: int, token_ids: Sequence[int], salt: str = "") -> int:
    """63-bit hash of a full block under its parent. salt counts at the root only: a child's hash
    holds it through the parent's."""
    digest = blake2b(digest_size=8)
    digest.update(parent_hash.to_bytes(8, "little"))
    if parent_hash == ROOT_HASH:
        digest.update(salt.encode())
        digest.update(b"\x00")
    digest.update(np.asarray(token_ids, dtype="<i8").tobytes())
    return int.from_bytes(digest.digest(), "little") >> 1 or 1  # never ROOT_HASH


def chain_hashes(token_ids: Sequence[int], block_size: int, salt: str = "") -> list[int]:
    """Hashes of all full blocks of a sequence, first block first."""
    hashes: list[int] = []
    parent = ROOT_HASH
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = block_hash(parent, token_ids[start : start + block_size], salt)
        hashes.append(parent)
    return hashes
