"""A backend for each phase over real gloo ranks: an engine that prefills by one and decodes by
another, and what all ranks agree on and tell.

Run as a script this file is the ranks (gloo_ranks.py).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_ranks import fork_ranks, run_ranks

from dispatch.deepep_normal import NormalDispatcher
from dispatch.phased import PhasedDispatcher
from ep.group import EPGroup
from models.deepseek.random_checkpoint import write_random_checkpoint
from models.deepseek.random_families import family_config
from moeserve.build import build_engine
from moeserve.config import ServeConfig
from moeserve.engine import Engine
from moeserve.errors import ConfigError
from moeserve.request import Request, SamplingParams

PROMPT, OUTPUT = 21, 5


@pytest.mark.dist
def test_prefill_and_decode_go_their_own_ways(tmp_path: Path) -> None:
    reports = run_ranks(__file__, 2, tmp_path, timeout=120)
    for rank, report in enumerate(reports):
        assert report["phased"] and report["tokens"] == [OUTPUT if rank == 0 else 0]
        # 21 prompt tokens in chunks of 8, then a token a step; each step has one MoE layer. The
        # first token comes with the prompt.
        assert report["calls"] == {"torch": 3, "deepep_ll_emulated": OUTPUT - 1}, f"rank {rank}"
        told = report["told"]
        assert told["prefill"]["backend"] == "torch"
        assert told["decode"]["backend"] == "deepep_ll" and told["decode"]["emulated"]
        assert told["buffers_bytes"] > 0 and told["refused"]["local"].startswith("it sends nothing")
        assert report["memory"]["dispatch_buffers"] == told["buffers_bytes"]
        assert report["memory"]["rebalance_staging"] > 0
    assert reports[0]["told"] == reports[1]["told"]
    assert reports[0]["refused"] == reports[1]["refused"]
    (refused,) = reports[0]["refused"]
    assert "prefill=deepep_normal cannot run here: rank 1: only on rank 1" in refused


def load(folder: Path, group: EPGroup, dispatch: str) -> Engine:
    settings: dict[str, dict[str, Any]] = {
        "model": {"checkpoint": folder / "wide"},
        "parallel": {"ep": group.size, "dispatch": dispatch, "emulate": True},
        "engine": {"deterministic": False, "quiet": True},
        "cache": {"kv_tokens": 256},
        "schedule": {"max_model_len": 64, "token_budget": 8, "max_num_sequences": 4},
    }
    return build_engine(ServeConfig.load(None, settings), group)


def rank_main(group: EPGroup, folder: Path) -> dict[str, Any]:
    engine = load(folder, group, "prefill=torch,decode=deepep_ll")
    dispatcher: Any = engine.runner.model.dispatcher  # type: ignore[attr-defined]
    before = {d.name: d.stats.calls for d in (dispatcher.prefill, dispatcher.decode)}
    if group.rank == 0:
        prompt = tuple(range(3, 3 + PROMPT))
        sampling = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
        engine.add_request(Request(request_id="a", prompt_token_ids=prompt, sampling=sampling))
    engine.request_stop()
    tokens = 0
    while not engine.stopped:
        for output in engine.step():
            assert output.error is None
            tokens += len(output.token_ids)
    both = (dispatcher.prefill, dispatcher.decode)
    report = {
        "phased": isinstance(dispatcher, PhasedDispatcher),
        "tokens": [tokens],
        "calls": {d.name: d.stats.calls - before[d.name] for d in both},
        "told": engine.info["dispatch"],
        "memory": engine.info["memory_bytes"],
    }
    engine.close()
    if group.rank == 1:  # what one rank cannot do, none starts
        NormalDispatcher.probe = classmethod(_refuse)  # type: ignore[assignment,method-assign]
    try:
        load(folder, group, "prefill=deepep_normal,decode=deepep_ll")
    except ConfigError as error:
        report["refused"] = error.problems
    return report


def _refuse(cls: Any, group: Any, config: Any) -> Any:
    from dispatch.base import Probe

    return Probe(False, "only on rank 1")


def write(folder: Path) -> None:
    config = family_config(
        "v3", "tiny", hidden_size=2048, num_hidden_layers=2, num_nextn_predict_layers=0
    )
    write_random_checkpoint(folder / "wide", config, dtype=torch.bfloat16, tokenizer=False)


if __name__ == "__main__":
    sys.exit(fork_ranks(rank_main, before=write))
