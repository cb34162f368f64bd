"""What an engine tells of itself at any time: on what it computes, and how."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ep.group import EPGroup
from moeserve.build import build_engine
from moeserve.config import ServeConfig

TINY = Path(__file__).parents[1] / "checkpoints" / "tiny"


@pytest.mark.parametrize("ahead", ["on", "off"])
def test_an_engine_tells_where_and_how_it_computes(ahead: str) -> None:
    config = ServeConfig.load(
        None,
        {
            "model": {"checkpoint": TINY, "mtp": False},
            "cache": {"kv_tokens": 256, "kv_cache_dtype": "fp8"},
            "schedule": {"max_num_sequences": 2, "token_budget": 16, "max_model_len": 64},
            "engine": {"ahead": ahead, "device": "cpu", "quiet": True},
        },
    )
    engine = build_engine(config, EPGroup.single())
    info = engine.info
    assert (info["device"], info["kv_cache_dtype"]) == ("cpu", "fp8")
    assert info["ahead"] is (ahead == "on") and engine.stats().graphs is None
    report = {"rows": [1], "replays": 3}
    assert info["graphs"] is None
    captured: Any = SimpleNamespace(report=lambda: dict(report))
    engine.runner.graphs = captured
    assert engine.info["graphs"] == engine.stats().graphs == report
    report["replays"] = 4
    assert engine.info["graphs"] == engine.stats().graphs == report
