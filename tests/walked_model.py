"""A small model whose kernels are walked with fake tensors on cuda, and batches for it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from fake_cuda import CUDA, FakeCuda, UnlaunchedKernels, fake_cuda

from dispatch.local import LocalDispatcher
from ep.group import EPGroup
from models.deepseek.kernels.gpu.launches import uncovered
from models.deepseek.kernels.gpu.registry import all_cases
from models.deepseek.load import load_model
from models.deepseek.model import DeepSeekModel
from models.deepseek.random_checkpoint import write_random_checkpoint
from models.deepseek.random_families import family_config
from models.interface import ForwardBatch


@contextmanager
def walking() -> Iterator[FakeCuda]:
    """Every launch is to be one that is compiled ahead of time, of tensors on the one device."""
    with warnings.catch_warnings(), fake_cuda() as walked, torch.inference_mode():
        warnings.simplefilter("ignore")  # the address of a fake tensor is asked for
        yield walked
        assert uncovered(walked.launches, all_cases()) == []
        assert {d for launch in walked.launches for d in launch.devices} <= {"cuda:0"}


def both_modes(folder: Path, fp8_cache: bool = False) -> dict[bool, DeepSeekModel]:
    """By deterministic; on the CPU yet: each is to be moved once."""
    write_random_checkpoint(
        folder, family_config("v3", num_hidden_layers=2), tokenizer=False, fp8="fp32"
    )
    group = EPGroup.single()
    return {
        deterministic: load_model(
            folder,
            dtype=torch.bfloat16,
            kernels=UnlaunchedKernels(torch.device("cpu"), fast=not deterministic),
            group=group,
            dispatcher_factory=lambda config: LocalDispatcher(group, config),
            deterministic=deterministic,
            fp8_cache=fp8_cache,
        )
        for deterministic in (True, False)
    }


def batch(counts: list[int], context: int = 200) -> ForwardBatch:
    """Of zeros: a walk goes by shapes. counts: rows of each sequence."""
    rows, num = sum(counts), len(counts)
    one: dict[str, Any] = {"dtype": torch.int64, "device": CUDA}
    small: dict[str, Any] = {"dtype": torch.int32, "device": CUDA}
    return ForwardBatch(
        token_ids=torch.zeros(rows, **one),
        positions=torch.zeros(rows, **one),
        slot_mapping=torch.zeros(rows, **one),
        query_start=torch.zeros(num + 1, **small),
        context_len=torch.zeros(num, **small),
        block_tables=torch.zeros(num, -(-context // 16), **small),
        logits_rows=torch.zeros(num, **one),
        max_query_len=max(counts, default=0),
        max_context_len=context if counts else 0,
    )
