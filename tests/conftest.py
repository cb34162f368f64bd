"""Fixtures that several packages' tests share. Helpers of one package stay in its test files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ASKED_FOR = {"namespaces": "MOESERVE_TEST_NAMESPACES"}  # marker: what `make test-<marker>` sets


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of minutes are deselected, and counted as such, unless they are asked for."""
    left_out = [
        item
        for item in items
        if any(m in item.keywords and name not in os.environ for m, name in ASKED_FOR.items())
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """As ranks have: a team of threads costs more than such small tensors."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def random_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random fp32 V3-shaped checkpoint with tokenizer, the same bytes every time."""
    import torch

    from models.deepseek.random_checkpoint import write_random_checkpoint
    from models.deepseek.random_families import family_config

    folder = tmp_path_factory.mktemp("random") / "random-v3"
    return write_random_checkpoint(folder, family_config("v3", "tiny"), dtype=torch.float32)
