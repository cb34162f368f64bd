"""A recording over ranks as processes: its sums are those of one process, nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from ep.recording import ExpertRecording
from moeserve.llm import LLM
from moeserve.request import SamplingParams

# Without the prefix cache every position of every sequence is computed, wherever it runs.
SETTINGS = {"kv_tokens": 1024, "max_model_len": 128, "threads": 1, "prefix_cache": False}
PROMPTS = [[5 + i % 3, 6, 7, 8, 9, 10 + i][: 1 + i % 6] for i in range(12)]
SAMPLING = [SamplingParams(temperature=0.0, max_tokens=4 + i, ignore_eos=True) for i in range(12)]


def record(folder: Path, ep: int, **settings: int) -> ExpertRecording:
    with LLM(folder, ep=ep, **SETTINGS, **settings) as llm:
        llm.generate(PROMPTS[0], SAMPLING[0])
        llm.start_recording(interval_steps=4)
        llm.generate(PROMPTS, SAMPLING)
        return llm.stop_recording()


@pytest.mark.dist
def test_two_ranks_sum_to_what_one_records(random_checkpoint: Path) -> None:
    alone = record(random_checkpoint, 1)
    both = record(random_checkpoint, 2, redundant_experts=3)
    for phase in (None, "prefill", "decode"):
        assert (alone.totals(phase) == both.totals(phase)).all()
    assert (alone.tokens.sum(axis=0) == both.tokens.sum(axis=0)).all()
    assert not alone.missing_picks.any() and not both.missing_picks.any()
    placement = both.placement_of(0)
    assert placement is not None and placement.num_redundant_experts >= 3
    assert both.info.num_ranks == 2 and both.traffic.shape[1:] == (2, 2)
    # A row goes to one rank or to both: between once and twice for each token and layer.
    rows, layers = both.traffic.sum(), both.num_layers - both.info.num_mtp_layers
    assert alone.traffic.sum() == alone.tokens.sum() * layers
    assert alone.traffic.sum() <= rows <= 2 * alone.traffic.sum()
    assert (both.traffic.sum(axis=0) > 0).all()
    assert (both.steps[1:, 0] > both.steps[:-1, 1]).all()
