"""What a measurement depends on beside the chip: versions of all that took part in it.

torch, triton, the driver, the libraries beside our kernels, and the text of our kernels and of the
adapters that the libraries are called by. Imports no library and asks no device: a version is what
its package says. Knows nothing of what was measured.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Mapping
from importlib.metadata import packages_distributions, version
from pathlib import Path

import torch

from models.deepseek.kernels.gpu.language import HAVE_TRITON, triton
from models.deepseek.kernels.gpu.registry import HOME

LIBRARIES = ("deep_gemm", "flash_mla", "flashinfer")
NONE = "none"
# Whose times stand beside those of libraries, and how libraries are called.
TIMED = (
    *("mla_decode", "fp8_gemm", "grouped_gemm"),
    *("gemm_deep_gemm", "mla_flash_mla", "mla_flashinfer"),
)
NO_TIME = ("aot", "cost", "errors", "language", "choice")  # imported by those; no call takes longer
DRIVER = Path("/proc/driver/nvidia/version")
FOLDER = Path(__file__).parents[1]


def versions_here() -> dict[str, str]:
    """By name, `NONE` for what is not installed."""
    packages = packages_distributions()
    return {
        "torch": torch.__version__,
        "triton": triton.__version__ if HAVE_TRITON else NONE,
        "driver": _driver(),
        **{name: _packaged(packages.get(name, ())) for name in LIBRARIES},
        "kernels": kernels_text(),
    }


def differences(then: Mapping[str, str], now: Mapping[str, str]) -> str:
    """In words, each "triton 3.7.1, here 3.8.0"; nothing where all is the same."""
    told = []
    for name in dict.fromkeys((*now, *then)):
        was, here = then.get(name, NONE), now.get(name, NONE)
        if was != here:
            told.append(f"{name} {was:.60}, here {here}")
    return "; ".join(told)


def kernels_text(folder: Path = FOLDER) -> str:
    """12 hex digits of the code that was timed, comments and docstrings left out."""
    seen: dict[str, str] = {}
    waiting = list(TIMED)
    while waiting:
        name = waiting.pop()
        if name in seen or name in NO_TIME:
            continue
        tree = ast.parse((folder / f"{name}.py").read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{HOME}."):
                waiting.append(str(node.module).removeprefix(f"{HOME}."))
            body = getattr(node, "body", None)
            if isinstance(body, list):
                node.body = [x for x in body if not _is_text(x)]  # type: ignore[attr-defined]
        seen[name] = ast.dump(tree)
    whole = "\n".join(f"{name} {seen[name]}" for name in sorted(seen))
    return hashlib.sha256(whole.encode()).hexdigest()[:12]


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _packaged(distributions: list[str] | tuple[()]) -> str:
    return ", ".join(version(name) for name in sorted(set(distributions))) or NONE


def _driver() -> str:
    """Of the kernel module; `NONE` where there is none to be seen."""
    try:
        text = DRIVER.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return NONE
    found = re.search(r"\s(\d+(?:\.\d+)+)\s", text)
    return found[1] if found else "of unknown version"
