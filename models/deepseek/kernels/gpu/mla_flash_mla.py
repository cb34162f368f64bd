"""MLA decode by FlashMLA: dense bf16 on sm_90.

The only file that imports `flash_mla`. In builds from October 2026 on, dense decode and sm_90 live
on the "legacy" side: `use_legacy=True`, and the wheel must have been built with it. Every query row
goes as a sequence of its own with its own length, so drafts of any number are causal among
themselves without padding. Its schedule is made on the device by the first layer's call of a step
and used by the others: it may be reused only while lengths are the same.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from torch import Tensor

from models.deepseek.kernels.gpu.choice import in_words, load_library
from models.deepseek.kernels.gpu.errors import ShapeRefused
from models.deepseek.kernels.gpu.mla_adapters import (
    MlaProblem,
    MlaStep,
    StepDecoder,
    common_refusal,
    lacking,
    row_tables,
)

BLOCK_SIZE = 64
PARAMETERS = (
    "q",
    "k_cache",
    "block_table",
    "cache_seqlens",
    "head_dim_v",
    "tile_scheduler_metadata",
    "num_splits",
    "softmax_scale",
    "causal",
    "is_fp8_kvcache",
)


class FlashMla:
    """module: in place of the installed `flash_mla`, for tests."""

    name = "flash_mla"

    def __init__(self, module: Any = None) -> None:
        self._module = module

    @in_words
    def refusal(self, problem: MlaProblem) -> str | None:
        why = common_refusal(problem, "FlashMLA")
        if why is not None:
            return why
        if problem.arch != 90:
            return f"FlashMLA's dense decode is for sm_90, this is sm_{problem.arch}"
        if problem.block_size != BLOCK_SIZE:
            return f"FlashMLA knows blocks of {BLOCK_SIZE}, these are of {problem.block_size}"
        module, why = self._load()
        if why is not None:
            return why
        decode = getattr(module, "flash_mla_with_kvcache", None)
        why = lacking(decode, PARAMETERS, "flash_mla_with_kvcache")
        why = why or lacking(getattr(module, "get_mla_metadata", None), (), "get_mla_metadata")
        if why is None and self._is_split(module) and not self._has_legacy(module):
            why = "this flash_mla was built without its legacy side, which has dense decode"
        return why

    def step(self, problem: MlaProblem, step: MlaStep) -> StepDecoder:
        why = self.refusal(problem)
        if why is not None:
            raise ShapeRefused(why)
        if step.plan.ancestors is not None:
            raise ShapeRefused("FlashMLA finds positions by block tables only: no trees of drafts")
        module, _ = self._load()
        lengths, tables = row_tables(step)
        schedule, splits = module.get_mla_metadata()
        if splits is not None:
            raise ShapeRefused("this flash_mla plans on the host: a version of 2026 is needed")
        legacy = {"use_legacy": True} if self._is_split(module) else {}

        def decode(q: Tensor, layer: Tensor) -> tuple[Tensor, Tensor]:
            if not q.shape[0]:
                return q[..., : problem.rank], q.new_empty(q.shape[:2]).float()
            out, lse = module.flash_mla_with_kvcache(
                q=q.unsqueeze(1),  # [T, 1, H, 576]
                k_cache=layer.unsqueeze(2),  # [blocks, 64, 1, 576]
                block_table=tables,
                cache_seqlens=lengths,
                head_dim_v=problem.rank,
                tile_scheduler_metadata=schedule,
                num_splits=None,
                softmax_scale=step.scale,
                causal=True,
                is_fp8_kvcache=False,
                **legacy,
            )
            return out.squeeze(1), lse.squeeze(2)  # lse [T, H, 1], natural

        return decode

    def _load(self) -> tuple[Any, str | None]:
        return load_library("flash_mla", lambda: importlib.import_module("flash_mla"), self._module)

    @staticmethod
    def _is_split(module: Any) -> bool:
        return "use_legacy" in inspect.signature(module.flash_mla_with_kvcache).parameters

    @staticmethod
    def _has_legacy(module: Any) -> bool:
        has = getattr(getattr(module, "_loader", None), "has_legacy", None)
        return has is None or bool(has())
