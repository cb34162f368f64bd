"""Experts move while MTP drafts: the layer's own experts too, and no token changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moeserve.llm import LLM
from moeserve.request import SamplingParams

BUNDLED = Path(__file__).parents[2] / "checkpoints" / "tiny"


@pytest.mark.dist
def test_experts_move_while_drafts_are_verified() -> None:
    prompts = ["And the king said unto the", "def get_name(self):\n", "Define a house."] * 2
    asked = [
        SamplingParams(temperature=0.0 if i % 2 else 0.8, seed=i, max_tokens=60, ignore_eos=True)
        for i in range(len(prompts))
    ]
    settings: dict[str, Any] = {"quiet": True, "threads": 1, "kv_tokens": 1024}
    with LLM(BUNDLED, **settings) as llm:
        plain = [o.token_ids for o in llm.generate(prompts, asked)]
    moving = {
        "rebalance": True,
        "rebalance_interval_steps": 8,
        "rebalance_threshold": 1.0,
        "rebalance_min_gain": 0.0,
        "rebalance_min_picks": 0,
    }
    with LLM(BUNDLED, ep=2, redundant_experts=4, speculate="mtp:2", **settings, **moving) as llm:
        outputs = llm.generate(prompts, asked)
        stats = llm.stats()
        mtp_row = llm.info()[0]["placement"]["num_layers"] - 1  # type: ignore[index, call-overload]
    assert [o.token_ids for o in outputs] == plain
    assert sum(o.num_accepted for o in outputs) > 50
    first = stats[0]
    assert first.rebalance is not None and first.rebalance.done > 0
    assert first.placement_generation > 0
    for rank in stats:
        layers, experts = rank.expert_shape
        assert layers == mtp_row + 1
        assert sum(rank.expert_load[mtp_row * experts :]) > 0, "no load of the MTP layer"
        assert rank.part_seconds["drafting"] > 0
