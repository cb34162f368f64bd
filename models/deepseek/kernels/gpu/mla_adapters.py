"""Which implementation decodes a step's attention: chosen by probe, all behind one call.

A backend is asked whether it fits a problem (a reason in words when it does not), then once a step
for a `StepDecoder`, which all layers call. Ours takes every problem that has a shape here: it is
the fallback, and what the others are checked against (`check_against_ours`). Nothing is imported
but by the backend that is asked.

Shape letters: T rows, H heads, c latent width, r rope width, S sequences, B blocks a table row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from models.deepseek.kernels.gpu.language import HAVE_TRITON, HOW_TO_GET_IT
from models.deepseek.kernels.gpu.mla_decode import mla_decode
from models.deepseek.kernels.gpu.mla_plan import DecodePlan


@dataclass(frozen=True)
class MlaProblem:
    """What does not change from step to step. arch: 90 for sm_90, 0 without a GPU. fp8: the cache
    is as mla_rows.py says. deterministic: bits may not depend on the batch (law 5). graphs: steps
    are captured. trees: rows may have ancestors."""

    heads: int
    rank: int
    rope: int
    block_size: int
    arch: int
    fp8: bool = False
    deterministic: bool = False
    graphs: bool = False
    trees: bool = False


@dataclass(frozen=True)
class MlaStep:
    """One step: its plan, block tables [S, B] int32, the scale of scores. lengths: positions + 1 of
    each row, on the host, -1 + 1 = 0 for padding (None where the host does not know them)."""

    plan: DecodePlan
    tables: Tensor
    scale: float
    lengths: Sequence[int] | None = None


# q [T, H, c + r] bf16, layer -> out [T, H, c] bf16, lse [T, H] fp32, natural; padding rows: any
StepDecoder = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class MlaBackend(Protocol):
    name: str

    def refusal(self, problem: MlaProblem) -> str | None:
        """Why it cannot, in one line; None: it can. Never raises, needs no GPU."""
        ...

    def step(self, problem: MlaProblem, step: MlaStep) -> StepDecoder:
        """ShapeRefused, in words, for a step that it cannot take."""
        ...


class TritonMla:
    """Ours."""

    name = "triton"

    def refusal(self, problem: MlaProblem) -> str | None:
        return None if HAVE_TRITON else HOW_TO_GET_IT

    def step(self, problem: MlaProblem, step: MlaStep) -> StepDecoder:
        def decode(q: Tensor, layer: Tensor) -> tuple[Tensor, Tensor]:
            return mla_decode(q, layer, step.plan, step.tables, step.scale, rope=problem.rope)

        return decode


def check_against_ours(
    backend: MlaBackend, problem: MlaProblem, step: MlaStep, q: Tensor, layer: Tensor
) -> float:
    """Largest difference of out to ours over the largest value, rows of padding left out. bf16
    kernels that are right stay within 2**-6 of each other."""
    mine, _ = TritonMla().step(problem, step)(q, layer)
    theirs, _ = backend.step(problem, step)(q, layer)
    real = step.plan.positions >= 0
    mine, theirs = mine[real].float(), theirs[real].float()
    if not mine.numel():
        return 0.0
    return float((mine - theirs).abs().max() / mine.abs().max().clamp(min=1e-6))


# -- what the adapters share ----------------------------------------------------------------------


def common_refusal(problem: MlaProblem, library: str) -> str | None:
    """Reasons that hold for every library we know: they read a position through a block table, 512
    and 64 channels wide, and split by the batch."""
    if (problem.rank, problem.rope) != (512, 64):
        return f"{library} knows latents of 512 + 64, these are {problem.rank} + {problem.rope}"
    if problem.fp8:
        return f"{library} has one scale for a whole FP8 cache, ours one for each 128 channels"
    if problem.deterministic:
        return f"{library} splits by the batch: bits would depend on company (deterministic mode)"
    if problem.trees:
        return f"{library} finds positions by block tables only: no trees of drafts"
    return None


def lacking(function: Any, wanted: Sequence[str], name: str) -> str | None:
    """Parameters that we pass and a function of this version does not have. function None: the
    library has none of that name."""
    if function is None:
        return f"this version has no {name}"
    try:
        has = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        return f"{name} has no signature: {error}"
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in has.values()):
        return None
    missing = [word for word in wanted if word not in has]
    return f"{name} of this version has no {', '.join(missing)}" if missing else None


def row_tables(step: MlaStep) -> tuple[Tensor, Tensor]:
    """Each row as a sequence of its own: lengths [T] int32 (padding counts as one position, of the
    first sequence), tables [T, B] int32 whose padding points to block 0."""
    lengths = (step.plan.positions + 1).clamp(min=1).to(torch.int32)
    return lengths, step.tables[step.plan.sequences.long()].clamp(min=0)
