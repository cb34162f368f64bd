"""How many KV blocks a rank gets."""

from __future__ import annotations

from typing import Any

import pytest

from moeserve.memory import CacheTooSmall, plan_cache


def plan(**fields: Any) -> Any:
    base = {
        "bytes_per_token": 100,
        "block_size": 16,
        "model_max_len": 1000,
        "max_model_len": None,
        "max_num_sequences": 4,
    }
    return plan_cache(**(base | fields))


def test_tokens_memory_or_the_smaller_of_both() -> None:
    assert plan(kv_tokens=1610).num_blocks == 100
    assert plan(kv_memory=160_000).num_blocks == 100
    both = plan(kv_tokens=3200, kv_memory=160_000)
    assert both.num_blocks == 100 and "kv_memory=160000" in both.reason
    assert (both.num_tokens, both.num_bytes) == (1600, 160_000)


def test_auto_takes_half_of_what_is_there_shared_by_the_ranks_here() -> None:
    assert plan(available_bytes=1_280_000, ranks_here=2, max_num_sequences=400).num_blocks == 200
    most = plan(available_bytes=10**12)
    assert most.num_blocks == 4 * 63  # four sequences of 1000 positions can use no more
    assert "all that 4 sequences" in most.reason


def test_the_longest_sequence_shrinks_only_when_nobody_asked_for_it() -> None:
    small = plan(kv_tokens=320)
    assert small.max_model_len == 320 and "do not fit" in small.reason
    with pytest.raises(CacheTooSmall, match=r"kv_tokens=320.*320 tokens.*max_model_len=500"):
        plan(kv_tokens=320, max_model_len=500)
    with pytest.raises(CacheTooSmall, match=r"kv_memory=1; .*gives 0 blocks.*at least 1 .16 tok"):
        plan(kv_memory=1)
    with pytest.raises(CacheTooSmall, match="auto"):
        plan(available_bytes=0)


def test_a_partly_used_last_block_counts_whole() -> None:
    assert plan(kv_tokens=48, max_model_len=33).num_blocks == 3
    with pytest.raises(CacheTooSmall):
        plan(kv_tokens=47, max_model_len=33)


def test_description_names_all_numbers() -> None:
    text = plan(kv_tokens=1600, max_model_len=500).describe()
    for part in ("100 blocks of 16", "1600 tokens", "100 bytes a token", "max_model_len=500"):
        assert part in text
