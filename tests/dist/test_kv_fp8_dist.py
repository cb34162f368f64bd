"""Law 5 over real gloo ranks with `--kv-cache-dtype fp8`: one rank alone, whole prompts and no
drafts, against two ranks with redundant experts, chunks, prefix hits and MTP drafts.

Run as a script this file is the ranks (gloo_ranks.py).
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_steps import steps_until_all_stop
from gloo_ranks import ROOT, fork_ranks, run_ranks

from ep.group import EPGroup
from moeserve.build import build_engine
from moeserve.config import ServeConfig
from moeserve.request import Request, SamplingParams

BUNDLED = ROOT / "checkpoints" / "tiny"
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "spread": {"parallel": {"redundant_experts": 3}},
    "chunks": {"schedule": {"chunk_size": 3}, "cache": {"block_size": 4}},
    "drafts": {"speculate": {"method": "mtp:2"}, "parallel": {"dispatch": "allgather"}},
}


@pytest.mark.dist
def test_two_ranks_give_the_tokens_of_one(tmp_path: Path) -> None:
    reports = run_ranks(__file__, 2, tmp_path, timeout=120)
    plain = reports[0].pop("plain")
    assert reports[0].keys() == reports[1].keys() == VARIANTS.keys() and len(plain) == 10
    for name in VARIANTS:
        assert reports[0][name] | reports[1][name] == plain, name


def requests() -> list[Request]:
    rng = random.Random(2)
    base = [rng.randrange(3, 4096) for _ in range(40)]
    made = []
    for i in range(10):
        prompt = [*base[: rng.choice([0, 9, 33])], *(rng.randrange(3, 4096) for _ in range(4))]
        sampling = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=1)
        made.append(Request(request_id=f"{i}", prompt_token_ids=tuple(prompt), sampling=sampling))
    return made


def serve(group: EPGroup, mine: list[Request], given: dict[str, dict[str, Any]]) -> dict[str, Any]:
    settings: dict[str, dict[str, Any]] = {
        "model": {"checkpoint": BUNDLED},
        "parallel": {"ep": group.size} | given.get("parallel", {}),
        "cache": {"kv_tokens": 2048, "kv_cache_dtype": "fp8"} | given.get("cache", {}),
        "schedule": {"max_model_len": 96} | given.get("schedule", {}),
        "speculate": given.get("speculate", {}),
        "engine": {"quiet": True},
    }
    engine = build_engine(ServeConfig.load(None, settings), group)
    assert {layer.dtype for layer in engine.runner.cache.layers} == {torch.uint8}
    outputs: dict[str, list[Any]] = {}
    for came in steps_until_all_stop(engine, mine, True):
        for output in came:
            assert output.error is None
            entries = outputs.setdefault(output.request_id, [])
            entries += [[e.token_id, e.logprob.hex(), e.top] for e in output.logprobs]
    engine.runner.model.close()  # type: ignore[attr-defined]
    return outputs


def rank_main(group: EPGroup, folder: Path) -> dict[str, Any]:
    asked = requests()
    report: dict[str, Any] = {}
    if group.rank == 0:
        single = EPGroup.single()
        report["plain"] = {}
        for request in asked:
            report["plain"] |= serve(single, [request], {"cache": {"prefix_cache": False}})
    for name, given in VARIANTS.items():
        mine = [r for i, r in enumerate(asked) if i % group.size == group.rank]
        report[name] = serve(group, mine, given)
    return report


if __name__ == "__main__":
    sys.exit(fork_ranks(rank_main))
