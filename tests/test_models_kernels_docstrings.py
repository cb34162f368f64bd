"""Each GPU kernel says what it takes, what it moves and what it computes."""

from __future__ import annotations

import inspect
import re
from importlib import import_module

import pytest

from models.deepseek.kernels.gpu.registry import HOME, MODULES, all_cases

pytest.importorskip("triton", reason="triton is built for Linux only")
WANTED = {
    "shapes, as letters in brackets": r"\[[A-Za-z1-9][^\]]*\]",
    "dtypes": r"\b(bf16|fp32|fp64|int32|int64|e4m3|bytes \(e4m3\))\b",
    "bytes, as a formula": r"[Bb]ytes[^.]*[A-Z\d]",
    "FLOPs, or that there are none": r"F(LOPs|lops)",
}
KERNELS = {f"{case.kernel.fn.__name__}": case.kernel.fn for case in all_cases()}


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_a_kernel_says_shapes_dtypes_bytes_and_flops(name: str) -> None:
    said = inspect.getdoc(KERNELS[name]) or ""
    missing = [what for what, pattern in WANTED.items() if not re.search(pattern, said)]
    assert missing == [], f"{name}: its docstring lacks {missing}"


@pytest.mark.parametrize("name", MODULES)
def test_a_module_of_kernels_says_what_its_letters_mean(name: str) -> None:
    assert "Shape letters: " in (import_module(f"{HOME}.{name}").__doc__ or "")


@pytest.mark.parametrize("name", MODULES)
def test_every_function_on_the_device_has_a_docstring(name: str) -> None:
    module = import_module(f"{HOME}.{name}")
    bare = [
        key
        for key, value in vars(module).items()
        if hasattr(value, "fn")
        and hasattr(value, "src")
        and value.fn.__module__ == module.__name__
        and not inspect.getdoc(value.fn)
    ]
    assert bare == []
