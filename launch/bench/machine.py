"""What a figure was measured on: processor, cores, libraries, commit. Knows the operating system;
nothing of what is measured."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

from launch.env import usable_cores
from launch.version import HOME, commit_of


def describe_machine() -> dict[str, Any]:
    """As JSON. `load`: processes that wanted a core in the last minute, ours among them."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),  # a client need not load it
        **_commit(),
        "load": load,
    }


def _commit() -> dict[str, Any]:
    """Of our own code; "" outside a checkout. changed: files differ from it."""
    said = commit_of(HOME)
    found = re.search(r"commit ([0-9a-f]{7,})", said)
    return {"commit": found[1] if found else "", "changed": "with changes" in said}


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    return next(
        (x.partition(":")[2].strip() for x in lines if x.startswith("model name")), "unknown"
    )
