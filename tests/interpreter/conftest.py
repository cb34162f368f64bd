"""Tests of Triton kernels in triton's interpreter: a process of their own.

triton reads TRITON_INTERPRET once, when it is imported, and then no kernel of that process can be
compiled. So the folder is left out of ordinary runs (norecursedirs) and `make test` runs it as a
third process; without the variable it refuses, for a skipped proof would look like one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COMMAND = "TRITON_INTERPRET=1 python -m pytest tests/interpreter"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    if not ours:
        return
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise pytest.UsageError(f"tests of kernels in the interpreter: run {COMMAND}")
    for item in ours:
        item.add_marker(pytest.mark.interpreter)
        if sys.platform != "linux":
            item.add_marker(pytest.mark.skip(reason="triton is built for Linux only"))
