"""The adapters on the emulated library over real gloo processes.

Run as a script this file is the ranks (gloo_ranks.py).
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_ranks import fork_ranks, run_ranks

from dispatch.base import CombineForm, DispatchConfig, Layout, WireFormat
from dispatch.deepep_ll import EmulatedLowLatencyDispatcher
from dispatch.fp8 import dequantise
from dispatch.selfcheck import CheckCase, expected, expert_output, make_case, random_placement
from ep.group import EPGroup

STEPS = 40


@pytest.mark.dist
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_steps_back_to_back(num_ranks: int, tmp_path: Path) -> None:
    reports = run_ranks(__file__, num_ranks, tmp_path, timeout=120)
    for rank, report in enumerate(reports):
        assert report["wrong"] == [], f"rank {rank}"
        assert report["steps"] == STEPS
        assert report["fp8_error"] < 0.05
        assert report["in_flight"] is True


@pytest.mark.dist
def test_an_engine_generates_over_it(tmp_path: Path) -> None:
    """Whole layers, a mode for each phase over one buffer: padding is never read (it is NaN), and
    two ranks begin as one does (outside of deterministic mode a machine's kernels may drift apart
    later)."""
    from models.deepseek.random_checkpoint import write_random_checkpoint
    from models.deepseek.random_families import family_config
    from moeserve.llm import LLM, SamplingParams

    config = family_config(
        "v3", "tiny", hidden_size=2048, num_hidden_layers=2, num_nextn_predict_layers=0
    )
    folder = write_random_checkpoint(tmp_path / "wide", config, dtype=torch.bfloat16)
    tokens = []
    both = "prefill=deepep_normal,decode=deepep_ll"
    for ep, dispatch in ((1, "deepep_ll"), (2, both)):
        with LLM(
            folder,
            ep=ep,
            kv_tokens=1024,
            max_model_len=128,
            threads=1,
            dispatch=dispatch,
            emulate=True,
            wire="fp8",
            dtype="bfloat16",
            deterministic=False,
            token_budget=32,
        ) as llm:
            prompts = [list(range(5, 45)), [7, 8, 9]]
            outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6))
            tokens.append([out.token_ids for out in outputs])
    assert [len(t) for t in tokens[0]] == [6, 6]
    assert [t[0] for t in tokens[0]] == [t[0] for t in tokens[1]]


def case_of(size: int, seed: int) -> tuple[DispatchConfig, CheckCase]:
    placement = random_placement(8, size, seed % 3, seed, generation=seed)
    config = DispatchConfig(
        2048, 4, placement.num_physical_experts, 8, torch.bfloat16, deterministic=False
    )
    tokens = [(3 * rank + 5 * seed) % 9 for rank in range(size)]
    to_rank = seed % size if seed % 4 == 3 else None
    return config, make_case(config, placement, tokens, seed, masked=0.2, to_rank=to_rank)


def layer(d: EmulatedLowLatencyDispatcher, case: CheckCase, rank: int) -> torch.Tensor:
    handle = d.dispatch_start(case.xs[rank], case.slots[rank], case.weights[rank])
    return finish(d, handle, case, rank)


def finish(
    d: EmulatedLowLatencyDispatcher, handle: Any, case: CheckCase, rank: int
) -> torch.Tensor:
    received = d.dispatch_finish(handle)
    assert received.layout is Layout.MASKED
    held, local = case.placement.physical_to_logical[0], case.placement.num_local_experts
    y = torch.full(received.x.shape, torch.nan, dtype=torch.bfloat16)
    for slot, n in enumerate(received.counts.tolist()):
        expert, x = torch.full((n,), int(held[rank * local + slot])), received.x[slot, :n]
        if received.scales is not None:
            x = dequantise(x, received.scales[slot, :n], received.scale_format, torch.bfloat16)
        y[slot, :n] = expert_output(x, expert)
    d.combine_start(handle, y)
    return d.combine_finish(handle)


def rank_main(group: EPGroup, folder: Path) -> dict[str, Any]:
    size, rank = group.size, group.rank
    wrong, steps = [], 0
    for seed in range(4):
        config, case = case_of(size, seed)
        want = expected(case, CombineForm.PAIRS)[1][rank].to(torch.bfloat16).float()
        d = EmulatedLowLatencyDispatcher(group, config)
        for step in range(STEPS // 4):
            steps += 1
            if not torch.equal(layer(d, case, rank), want):
                wrong.append(f"seed {seed} step {step}")
        d.close()
    config, case = case_of(size, 1)
    want = expected(case, CombineForm.PAIRS)[1][rank]
    d = EmulatedLowLatencyDispatcher(group, replace(config, wire=WireFormat.FP8))
    error = float((layer(d, case, rank) - want).norm() / want.norm().clamp_min(1))
    handles = [
        d.dispatch_start(case.xs[rank], case.slots[rank], case.weights[rank]) for _ in range(2)
    ]
    outs = [finish(d, handle, case, rank) for handle in handles]
    d.close()
    return {
        "wrong": wrong,
        "steps": steps,
        "fp8_error": error,
        "in_flight": bool(torch.equal(outs[0], outs[1])),
    }


if __name__ == "__main__":
    sys.exit(fork_ranks(rank_main))
