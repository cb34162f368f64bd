"""Fixtures that several packages' tests share. Helpers of one package stay in its test files."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def random_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random fp32 V3-shaped checkpoint with tokenizer, the same bytes every time."""
    import torch

    from models.deepseek.random_checkpoint import write_random_checkpoint
    from models.deepseek.random_families import family_config

    folder = tmp_path_factory.mktemp("random") / "random-v3"
    return write_random_checkpoint(folder, family_config("v3", "tiny"), dtype=torch.float32)
