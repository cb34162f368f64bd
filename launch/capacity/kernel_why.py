"""Why a step takes another time by our kernels' counts than by the fitted model, in words and data.

Knows both models of one step (`times`, `kernel_step`), which mode of attention each means, what
bounds a kernel and by which factors its seconds are reckoned. Knows nothing of screens.

The fitted model has no modes: its constants are those of published engines, which is nearest to
fast mode. Our decode kernel cuts each row's context at fixed positions in deterministic mode (law
5), by the load of a step in fast mode, and merges what the pieces give; prefill in fast mode
expands keys, in deterministic mode it attends over latents as decode does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from launch.capacity.deployment import Deployment
from launch.capacity.kernel_step import (
    LAUNCHES,
    OF_EXPERTS,
    KernelStep,
    kernel_step,
    reached,
)
from launch.capacity.parts import FAST_MODE, Mode, mode_of, step_parts
from launch.capacity.predict import Workload
from launch.capacity.times import Step
from models.deepseek.kernels.gpu.mla_plan import DETERMINISTIC, Partitions

ONE_PART = Partitions(1 << 20, 1 << 20, 1 << 20)  # longer than any context
_SHOWN = 4  # parts of a step that are told apart, where they differ
_LEAST = 0.005  # of a step, to be told
_CORE, _PROJECTIONS = "attention core", "attention projections"
# Why kernels count more, or less, of a part than the fitted model has.
_MORE = {
    _PROJECTIONS: "rows that products read and write, beside weights",
    "routed experts": "SiLU and quantisation between their products",
    "norms, casts, gaps": "each join, sum and cast, each move of rows to experts and back, by its "
    "own bytes: one fitted number there",
    "MTP drafts": "the same in the layer that drafts",
}
_LESS = {"all-to-alls, not hidden": "longer work hides more of them"}
_OVER_LATENTS = {_CORE: "over latents, not expanded keys", _PROJECTIONS: "no keys are expanded"}


@dataclass(frozen=True)
class Compared:
    """One step by both models. step: by kernels in the mode that is planned; other: in the other
    one; fitted: by the fitted model. one_part: decode with each row in one piece; None in prefill,
    whose time over latents is the least that it can be: each is read once."""

    phase: str
    mode: Mode
    step: KernelStep
    fitted: Step
    other: KernelStep
    one_part: KernelStep | None

    @property
    def deterministic(self) -> KernelStep:
        return self.step if self.mode == "deterministic" else self.other

    @property
    def fast(self) -> KernelStep:
        return self.step if self.mode == "fast" else self.other

    @property
    def mode_told(self) -> str:
        return f"attention of {self.mode} mode"

    @cached_property
    def differences(self) -> dict[str, float]:
        """Seconds that kernels take more (or less), by part of a step, the largest first; together
        those of the whole step."""
        ours, theirs = dict(step_parts(self.step.step)), dict(step_parts(self.fitted))
        found = {name: ours.get(name, 0.0) - theirs.get(name, 0.0) for name in dict(theirs | ours)}
        return dict(sorted(found.items(), key=lambda item: -abs(item[1])))

    @property
    def merging(self) -> float:
        """Seconds of attention's core that partial results cost."""
        if self.one_part is None:
            return 0.0
        return self.step.part("core") - self.one_part.part("core")

    @property
    def why(self) -> list[str]:
        """A line each."""
        return [
            self._difference(),
            self._pieces() if self.phase == "decode" else self._keys(),
            "the fitted model has no modes: its constants are fitted on published throughputs of "
            "other engines, which is nearest to fast mode",
        ]

    def _difference(self) -> str:
        told = [
            f"{name} {1e3 * x:+,.1f}{f' ({reason})' if (reason := self._reason(name, x)) else ''}"
            for name, x in list(self.differences.items())[:_SHOWN]
            if abs(x) > _LEAST * self.fitted.seconds
        ]
        more = self.step.seconds - self.fitted.seconds
        parts = f": {'; '.join(told)}" if told else "; no part differs by half a per cent of it"
        return (
            f"{_ms(abs(more))} ms {'more' if more >= 0 else 'less'} than the "
            f"{_ms(self.fitted.seconds)} of the fitted model{parts}"
        )

    def _reason(self, name: str, more: float) -> str:
        if self.phase == "prefill" and self.mode == "deterministic" and name in _OVER_LATENTS:
            return _OVER_LATENTS[name]
        if name == _CORE and self.merging > 0:
            return f"{_ms(self.merging)} are results of pieces, the rest queries and results"
        return (_MORE if more > 0 else _LESS).get(name, "")

    def _keys(self) -> str:
        fast, whole = f"fast mode ({FAST_MODE})", _ms(self.other.seconds)
        if self.mode == "fast":
            return (
                f"attention of prefill is that of {fast}, which expands keys; in deterministic "
                f"mode, the default of serve, it attends over latents: at least {whole} ms a step"
            )
        return (
            "attention of prefill is that of deterministic mode, the default of serve: it attends "
            "over latents, each counted as read once, so a step takes at least so long; in "
            f"{fast}, which expands keys: {whole} ms a step"
        )

    def _pieces(self) -> str:
        assert self.one_part is not None
        cuts, core, other = DETERMINISTIC, self.step.part("core"), self.other.part("core")
        whole = _ms(self.one_part.part("core"))
        fixed = (
            f"at fixed positions, every {cuts.near_size:,} up to {cuts.near_end:,}, then every "
            f"{cuts.far_size:,}, so that tokens are the same in any company"
        )
        if self.mode == "fast":
            return (
                f"pieces: in fast mode ({FAST_MODE}) a row's context is cut no more than fills the "
                f"GPU: {_CORE} takes {_ms(core)} ms, in one piece {whole}. In deterministic mode, "
                f"the default of serve, it is cut {fixed}: {_ms(other)} ms, the whole step "
                f"{_ms(self.other.seconds)}"
            )
        return (
            f"pieces: a row's context is cut {fixed}, and fp32 results of the pieces are written "
            f"and merged: {_CORE} takes {_ms(core)} ms, in one piece {whole}. "
            f"In fast mode ({FAST_MODE}) our kernel cuts no more than fills the GPU: "
            f"{_ms(other)} ms, the whole step {_ms(self.other.seconds)}"
        )

    @property
    def bounds(self) -> dict[str, str]:
        """What `bound` of a kernel means."""
        f = self.factors
        gap, of_experts = 1e6 * f["gap_s"], 1e6 * f["expert_gap_s"]
        return {
            "memory": "its bytes over HBM take longest",
            "compute": "its FLOPs over the peak of their kind take longest",
            "gaps": f"what passes before its launches ({gap:.1f} us each, {of_experts:.1f} among "
            "experts) is longer than both: too small a kernel to be bound by either",
        }

    @property
    def factors(self) -> dict[str, float]:
        """What seconds of kernels are reckoned by: peaks of the GPU, shares of them, gaps before
        launches, and `slower`, which rows of layers with experts take longer. A kernel takes the
        longer of its bytes and FLOPs over their peak's share, and its gaps, times `slower` and
        `young`."""
        gpu, c = self.step.gpu, self.step.calibration
        return {
            "hbm_bytes_per_s": gpu.hbm,
            "fp8_flops_per_s": gpu.fp8,
            "bf16_flops_per_s": gpu.bf16,
            "memory": c.memory,
            **reached(gpu, c),
            "gap_s": c.launch / LAUNCHES,
            "expert_gap_s": c.expert_launch / OF_EXPERTS,
            "slower": self.step.slower,
            "young": c.young if gpu.young else 1.0,
        }

    @property
    def factors_told(self) -> list[str]:
        """The same as lines below a table."""
        gpu, c, f = self.step.gpu, self.step.calibration, self.factors
        flops_a_byte = gpu.fp8 / gpu.hbm
        lines = [
            "ms: of each launch its gap and the longer of bytes / (HBM x peak share) and FLOPs / "
            f"(peak x peak share). HBM {gpu.hbm / 1e12:g} TB/s, peaks {gpu.fp8 / 1e12:,.0f} "
            f"(fp8_, grouped_gemm) and {gpu.bf16 / 1e12:,.0f} TFLOP/s (the others)",
            f"peak share: HBM {c.memory:g}; attention {f['prefill_core']:.3g} over keys, "
            f"{f['decode_core']:.3g} over latents; products {f['product']:.3g} = "
            f"1 / (1/{c.ceiling:g} + {flops_a_byte:.0f}/{c.intensity:g}), grouped "
            f"{f['grouped']:.3g} = 1 / (1/{c.grouped:g} + {flops_a_byte:.0f}/{c.intensity:g}): a "
            f"GPU of {flops_a_byte:.0f} FP8 FLOPs for a byte of HBM waits for operands "
            "(plan --validate has all constants and their sources)",
        ]
        if self.step.slower != 1:
            lines.append(
                f"x {f['slower']:.4g} in every layer (not dense ones and head): all-to-alls beside "
                f"them take {c.comm_sms} of {gpu.sms} SMs"
            )
        if gpu.young:
            lines.append(f"x {c.young:g} of all: kernels of {gpu.title} were new in 2025")
        return lines

    def as_json(self) -> dict[str, Any]:
        return self.step.as_json() | {
            "mode": self.mode,
            "fitted_step_s": self.fitted.seconds,
            "differences_s": self.differences,
            "fast_step_s": self.fast.seconds,
            "one_part_step_s": None if self.one_part is None else self.one_part.seconds,
            "deterministic_step_s": self.deterministic.seconds,
            "deterministic_is_least": self.phase == "prefill",
            "why": self.why,
            "bounds": self.bounds,
            "factors": self.factors,
        }


def compared(d: Deployment, work: Workload, fitted: Step) -> Compared | None:
    """fitted: the same step by the fitted model. None where there are no kernels (tp)."""
    step, other = kernel_step(d, work), kernel_step(_turned(d), work)
    if step is None or other is None:
        return None
    whole = kernel_step(d, work, partitions=ONE_PART) if d.phase == "decode" else None
    return Compared(d.phase, mode_of(d), step, fitted, other, whole)


def _turned(d: Deployment) -> Deployment:
    """In the other mode."""
    return replace(d, deterministic=not d.deterministic)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}"
