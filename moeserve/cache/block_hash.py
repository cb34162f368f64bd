"""The name of a cached block: a 63-bit hash of its tokens and of all blocks before it.

A rank names the blocks of its prefix tree so, and the front end's router hashes prompts in the same
way, so the values must be the same in every process, on every machine and in every run (Python's
own `hash` is none of these). Knows token ids only.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

ROOT = 0  # the parent of a first block


def block_hash(parent: int, token_ids: Sequence[int], salt: str = "") -> int:
    """Chain hash of one full block, in [0, 2**63). parent: the block before it, or ROOT."""
    digest = blake2b(struct.pack("<q", parent), digest_size=8, key=b"moeserve block")
    digest.update(struct.pack(f"<{len(token_ids)}I", *token_ids))
    digest.update(salt.encode())
    return int.from_bytes(digest.digest(), "little") >> 1


def block_hashes(token_ids: Sequence[int], block_size: int, salt: str = "") -> list[int]:
    """Chain hashes of the full blocks of a sequence; a last, partly filled block has none."""
    hashes: list[int] = []
    parent = ROOT
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = block_hash(parent, token_ids[start : start + block_size], salt)
        hashes.append(parent)
    return hashes
