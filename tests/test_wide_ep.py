"""320 ranks, as in the V3 report: routed experts, the shared expert and copies, one a rank; the
tokens of one rank alone.

Ranks are threads with tiny models of their own, loaded as any rank loads. The dispatcher is the one
for real jobs; only the collectives under it are among threads (dispatch/thread_group.py).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import models.deepseek.checkpoint
from dispatch.local import LocalDispatcher
from dispatch.thread_group import ThreadBoard, ThreadedCollective
from ep.group import EPGroup
from ep.placement import ExpertPlacement
from ep.presets import PRESETS
from models.deepseek.config import DeepSeekConfig
from models.deepseek.kernels.errors import KernelsUnavailable
from models.deepseek.kernels.select import create_kernels
from models.deepseek.layout import expected_tensors
from models.deepseek.load import load_model
from models.deepseek.model import DeepSeekModel
from models.deepseek.random_checkpoint import write_random_checkpoint
from models.deepseek.random_families import family_config
from models.deepseek.safetensors_index import SafetensorsIndex
from models.offline import OfflineRunner
from moeserve.config import ServeConfig
from moeserve.placing import first_placement

PRESET = PRESETS["decode-ep320"]
# Sequences live on a few ranks, routed and hosting ones; all others run empty batches.
HOMES = {0: [11, 5, 90, 33, 2], 63: [7], 255: [3, 44, 44, 80, 9, 120, 1], 256: [1, 2], 319: [99]}
NUM_TOKENS = 3


def load(folder: Path, group: EPGroup, placement: ExpertPlacement, kernels: Any) -> DeepSeekModel:
    kind = LocalDispatcher if group.size == 1 else ThreadedCollective
    return load_model(
        folder,
        dtype=torch.bfloat16,
        kernels=kernels,
        group=group,
        dispatcher_factory=lambda config: kind(group, config, combine_pairs=kernels.combine_pairs),
        placement=placement,
        max_tokens_per_rank=32,
        max_positions=64,
        num_threads=1,
    )


def generate(model: DeepSeekModel, prompts: dict[int, list[int]]) -> dict[int, list[int]]:
    """Greedy tokens of all prompts together; collective, with or without prompts."""
    runner = OfflineRunner(model, num_blocks=8, block_size=8)
    said: dict[int, list[int]] = {s: [] for s in prompts}
    chunks = prompts
    for _ in range(NUM_TOKENS):
        model.dispatcher.set_step_bound(8)
        for s, logits in runner.step(chunks).logits.items():
            said[s].append(int(logits[-1].argmax()))
        chunks = {s: tokens[-1:] for s, tokens in said.items()}
    return said


@pytest.fixture
def one_thread_a_rank() -> Iterator[None]:
    """Else torch keeps a team of compute threads for each of 320 callers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread_a_rank")
def test_the_320_gpu_layout_says_what_one_rank_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        kernels = create_kernels("native").kernels
    except KernelsUnavailable:
        kernels = create_kernels("torch").kernels
    config = family_config(
        "v3", num_hidden_layers=2, hidden_size=64, intermediate_size=64, moe_intermediate_size=16,
        n_routed_experts=256, num_experts_per_tok=8, n_group=8, topk_group=4, vocab_size=128,
        num_attention_heads=2, num_key_value_heads=2, q_lora_rank=32, kv_lora_rank=32,
        qk_nope_head_dim=16, v_head_dim=16, num_nextn_predict_layers=0, first_k_dense_replace=0,
    )  # fmt: skip
    write_random_checkpoint(tmp_path, config, tokenizer=False)
    model = DeepSeekConfig.from_hf(tmp_path)
    single = EPGroup.single()
    plain = load(tmp_path, single, ExpertPlacement.trivial(2, 256, 1), kernels)
    expected = {rank: generate(plain, {0: prompt})[0] for rank, prompt in HOMES.items()}
    assert len({tuple(tokens) for tokens in expected.values()}) > 1
    settings = ServeConfig.load(None, {"parallel": {"layout": PRESET.name}})
    placement = first_placement(settings, model, single, True, [])
    assert placement is not None
    assert placement.num_local_experts == PRESET.slots_per_gpu == 1
    assert placement.replica_count[0, 256] > 1 and placement.num_empty_slots == 0
    assert PRESET.num_gpus - 256 == 64 == PRESET.num_redundant + 1

    # Headers and names are the same for all ranks: read once.
    index, names = SafetensorsIndex.open(tmp_path), expected_tensors(model)
    monkeypatch.setattr(
        SafetensorsIndex,
        "open",
        lambda folder: replace(index, bytes_read=0, _maps={}, _lock=threading.Lock()),
    )
    monkeypatch.setattr(models.deepseek.checkpoint, "expected_tensors", lambda config: names)
    said: dict[int, list[int]] = {}
    board = ThreadBoard(PRESET.num_gpus)

    def rank_main(rank: int) -> None:
        mine = load(tmp_path, board.group(rank, PRESET.gpus_per_node), placement, kernels)
        assert all(experts.num_slots == 1 for experts in mine.expert_weights())
        prompts = {0: HOMES[rank]} if rank in HOMES else {}
        for tokens in generate(mine, prompts).values():
            said[rank] = tokens

    board.run(rank_main)
    assert said == expected
