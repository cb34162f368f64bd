"""MLA decode by FlashInfer's paged MLA wrapper: bf16, sm_80 and later.

The only file that imports `flashinfer`. Its plan is made on the host once a step, from lengths that
the host knows or else asks the device for, so it has no place in captured graphs. Versions from 0.7
take canonical metadata and packed inputs, earlier ones flat metadata and split inputs, with
logarithms to base 2: which one is here is told from signatures. Every query row goes as a sequence
of its own, see mla_flash_mla.py.
"""

from __future__ import annotations

import importlib
import inspect
import math
from typing import Any

import torch
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

WORKSPACE = 128 << 20  # bytes: what its documentation names as the usual start
PLAN = (
    "num_heads",
    "head_dim_ckv",
    "head_dim_kpe",
    "page_size",
    "causal",
    "sm_scale",
    "q_data_type",
    "kv_data_type",
)
FLAT = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
NEW_PLAN = ("metadata", "query_layout", "kv_cache_layout", "lse_mode")
NEW_RUN = ("query", "kv_cache", "return_lse", "return_lse_base_on_e")
OLD_RUN = ("q_nope", "q_pe", "ckv_cache", "kpe_cache", "return_lse")


class FlashInferMla:
    """module: in place of the installed `flashinfer.mla`, for tests. One workspace for all steps,
    made at the first."""

    name = "flashinfer"

    def __init__(self, module: Any = None) -> None:
        self._module = module
        self._workspace: Tensor | None = None

    @in_words
    def refusal(self, problem: MlaProblem) -> str | None:
        why = common_refusal(problem, "FlashInfer")
        if why is not None:
            return why
        if problem.arch < 80:
            return f"FlashInfer wants sm_80 or later, this is sm_{problem.arch}"
        if problem.graphs:
            return "FlashInfer plans on the host each step: not inside of captured graphs"
        module, why = self._load()
        if why is not None:
            return why
        name = "BatchMLAPagedAttentionWrapper"
        wrapper = getattr(module, name, None)
        if wrapper is None:
            return f"this version has no {name}"
        runner, planner = getattr(wrapper, "run", None), getattr(wrapper, "plan", None)
        why = lacking(runner, (), f"{name}.run")
        if why is not None:
            return why
        plan, run = (NEW_PLAN, NEW_RUN) if self._is_new(module) else (FLAT, OLD_RUN)
        return lacking(planner, PLAN + plan, f"{name}.plan") or lacking(runner, run, f"{name}.run")

    def step(self, problem: MlaProblem, step: MlaStep) -> StepDecoder:
        why = self.refusal(problem)
        if why is not None:
            raise ShapeRefused(why)
        rows = step.plan.num_rows
        if step.plan.ancestors is not None:
            raise ShapeRefused("FlashInfer finds positions by block tables only: no trees")
        if step.lengths is None:  # rows behind drafts that only the device has judged
            raise ShapeRefused("FlashInfer plans on the host, which does not know these lengths")
        if len(step.lengths) != rows:
            raise ShapeRefused(f"{len(step.lengths)} lengths: FlashInfer wants all {rows} rows'")
        if not rows:
            return lambda q, layer: (q[..., : problem.rank], q.new_empty(q.shape[:2]).float())
        module, _ = self._load()
        wrapper = module.BatchMLAPagedAttentionWrapper(self._room(step.tables.device))
        metadata = flat_metadata(step, problem.block_size)
        settings = {
            "num_heads": problem.heads,
            "head_dim_ckv": problem.rank,
            "head_dim_kpe": problem.rope,
            "page_size": problem.block_size,
            "causal": True,
            "sm_scale": step.scale,
            "q_data_type": torch.bfloat16,
            "kv_data_type": torch.bfloat16,
        }
        if self._is_new(module):
            wrapper.plan(
                metadata=module.MLAPlanMetadata.csr(**metadata), query_layout="packed",
                kv_cache_layout="packed", lse_mode="basee", **settings,
            )  # fmt: skip

            def decode(q: Tensor, layer: Tensor) -> tuple[Tensor, Tensor]:
                out, lse = wrapper.run(
                    query=q, kv_cache=layer, return_lse=True, return_lse_base_on_e=True
                )
                return out, lse

            return decode
        wrapper.plan(**metadata, **settings)

        def decode_split(q: Tensor, layer: Tensor) -> tuple[Tensor, Tensor]:
            rank = problem.rank
            out, lse = wrapper.run(
                q_nope=q[..., :rank], q_pe=q[..., rank:], ckv_cache=layer[..., :rank],
                kpe_cache=layer[..., rank:], return_lse=True,
            )  # fmt: skip
            return out, lse * math.log(2)

        return decode_split

    def _load(self) -> tuple[Any, str | None]:
        return load_library(
            "flashinfer", lambda: importlib.import_module("flashinfer.mla"), self._module
        )

    @staticmethod
    def _is_new(module: Any) -> bool:
        run = inspect.signature(module.BatchMLAPagedAttentionWrapper.run).parameters
        return "kv_cache" in run and hasattr(module, "MLAPlanMetadata")

    def _room(self, device: torch.device) -> Tensor:
        if self._workspace is None or self._workspace.device != device:
            self._workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
        return self._workspace


def flat_metadata(step: MlaStep, block_size: int) -> dict[str, Tensor]:
    """Of a step whose lengths are known: qo_indptr, kv_indptr [T + 1], kv_indices (blocks of each
    row, one after the other), kv_len_arr [T], all int32. Lengths lie on the host, where FlashInfer
    plans; blocks are found on the device, to which nothing is sent."""
    assert step.lengths is not None
    lengths = torch.tensor([max(1, n) for n in step.lengths])  # padding: one of the first sequence
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    starts[1:] = ((lengths + block_size - 1) // block_size).cumsum(0)
    on_device, tables = row_tables(step)
    blocks = (on_device.long() + block_size - 1) // block_size
    ends = blocks.cumsum(0)
    at = torch.arange(int(starts[-1]), device=tables.device)
    row = torch.searchsorted(ends, at, right=True)
    column = at - (ends - blocks)[row]
    return {
        "qo_indptr": torch.arange(len(lengths) + 1, dtype=torch.int32),
        "kv_indptr": starts,
        "kv_indices": tables[row, column].to(torch.int32),
        "kv_len_arr": lengths.to(torch.int32),
    }
