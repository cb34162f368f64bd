"""A recording of the real model, by the offline API: against the reference model's own picks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ep.load import DECODE, PREFILL
from models.deepseek.reference import ReferenceModel
from moeserve.errors import InvalidRequest
from moeserve.llm import LLM
from moeserve.load_desk import RecordingConflict
from moeserve.request import SamplingParams

SETTINGS = {
    "kv_tokens": 1024,
    "max_model_len": 128,
    "block_size": 4,
    "prefix_cache": False,
    "dtype": "float32",
}
PROMPTS = [[5 + i % 3, 6, 7, 8, 9, 10 + i][: 1 + i % 6] for i in range(7)]
SAMPLING = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def reference_counts(
    folder: Path, runs: list[tuple[list[int], int]], layers: int, experts: int
) -> np.ndarray:
    """[2, L, E] picks of sequences (tokens that were computed, how many of them the prompt's)."""
    counts = np.zeros((2, layers, experts), np.int64)
    model = ReferenceModel(folder)
    for tokens, num_prompt in runs:
        for layer, rows in enumerate(model.forward(tokens).routing):
            for position, chosen in enumerate(rows):
                for expert in chosen:
                    counts[PREFILL if position < num_prompt else DECODE, layer, expert] += 1
    return counts


def test_a_recording_is_what_the_reference_routes(random_checkpoint: Path) -> None:
    with LLM(random_checkpoint, token_budget=9, **SETTINGS) as llm:
        llm.generate(PROMPTS[3], SAMPLING)  # not recorded
        llm.start_recording(interval_steps=3)
        with pytest.raises(RecordingConflict):
            llm.start_recording()
        outputs = llm.generate(PROMPTS, SAMPLING)
        recording = llm.stop_recording()
        llm.generate(PROMPTS[2], SAMPLING)  # nor this
        assert (llm.stop_recording().counts == recording.counts).all()
        info = llm.info()[0]
    # The last token is chosen but never computed.
    runs = [([*p, *o.token_ids[:-1]], len(p)) for p, o in zip(PROMPTS, outputs, strict=True)]
    main = recording.num_layers - recording.info.num_mtp_layers
    wanted = reference_counts(random_checkpoint, runs, recording.num_layers, recording.num_experts)
    assert (recording.counts.sum(axis=0) == wanted).all()
    assert not recording.missing_picks.any()
    tokens = sum(len(t) for t, _ in runs)
    assert recording.tokens.sum() == tokens
    assert recording.traffic.sum() == tokens * main, "one rank: every row stays, once a layer"
    about = recording.info
    assert about.fingerprint == info["fingerprint"] and about.checkpoint == "random-v3"
    assert about.layers[0] == info["first_moe_layer"] and about.dtype == "float32"
    assert recording.generations == [0] * recording.num_intervals


def test_what_cannot_be_recorded(random_checkpoint: Path) -> None:
    with LLM(random_checkpoint, **SETTINGS) as llm:
        with pytest.raises(RecordingConflict, match="no recording"):
            llm.stop_recording()
        with pytest.raises(InvalidRequest, match="interval_steps=0"):
            llm.start_recording(interval_steps=0)
        llm.start_recording(max_steps=2)
        llm.generate(PROMPTS[:1], SAMPLING)
        assert llm.stop_recording().num_steps.tolist() == [2]
        llm.start_recording()
        assert llm.stop_recording().num_intervals == 0
