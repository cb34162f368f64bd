"""Which modules hold kernels: their compile cases in one list, in a fixed order.

A new module is one line here. Imported modules are found by name, so that listing costs nothing.
"""

from __future__ import annotations

from importlib import import_module

from models.deepseek.kernels.gpu.aot import CompileCase

HOME = "models.deepseek.kernels.gpu"
# Each has compile_cases() -> list[CompileCase].
MODULES: tuple[str, ...] = (
    "norm",
    "quant",
    "norm_quant",
    "fp8_gemm",
    "grouped_gemm",
    "row_owners",
    "router",
    "gate",
    "sort_pairs",
    "permute",
    "sampling",
    "row_peaks",
    "dense",
    "rope",
    "scatter_rows",
    "mla_cache",
    "mla_decode",
    "mla_merge",
    "mla_gather",
    "mla_prefill",
)


def all_cases(only: str = "") -> list[CompileCase]:
    """Every kernel in every configuration; `only`: those whose "name config" contains it."""
    cases = [case for name in MODULES for case in import_module(f"{HOME}.{name}").compile_cases()]
    names = [(case.name, case.config) for case in cases]
    assert len(set(names)) == len(names), sorted({n for n in names if names.count(n) > 1})
    return [case for case in cases if only in f"{case.name} {case.config}"]
