"""Why a step takes another time by our kernels' counts than by the fitted model, in words and data.

Knows both models of one step (`times`, `kernel_step`), which mode of attention each means, what
bounds a kernel. Knows nothing of screens.

The fitted model has no modes: its constants are those of published engines, which is nearest to
fast mode. Our decode kernel cuts each row's context at fixed positions in deterministic mode (law
5), by the load of a step in fast mode, and merges what the pieces give; prefill in fast mode
expands keys, in deterministic mode it attends over latents as decode does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from launch.capacity.deployment import Deployment
from launch.capacity.kernel_step import (
    LAUNCHES,
    OF_EXPERTS,
    KernelStep,
    fast_cuts,
    kernel_step,
)
from launch.capacity.parts import step_parts
from launch.capacity.predict import Workload
from launch.capacity.times import Step
from models.deepseek.kernels.gpu.mla_plan import DETERMINISTIC, Partitions

Mode = Literal["deterministic", "fast"]  # whose attention a step has
ONE_PART = Partitions(1 << 20, 1 << 20, 1 << 20)  # longer than any context
_SHOWN = 4  # parts of a step that are told apart, where they differ
_LEAST = 0.005  # of a step, to be told
_CORE = "attention core"
# Why kernels count more, or less, of a part than the fitted model has.
_MORE = {
    "attention projections": "rows that products read and write, beside weights",
    "routed experts": "SiLU and quantisation between their products",
    "norms, casts, gaps": "each join, sum and cast, each move of rows to experts and back, by its "
    "own bytes: one fitted number there",
    "MTP drafts": "the same in the layer that drafts",
}
_LESS = {"all-to-alls, not hidden": "longer work hides more of them"}


@dataclass(frozen=True)
class Compared:
    """One step by both models. fitted: by the fitted one. one_part: decode with each row in one
    piece; by_load: with pieces of fast mode; deterministic: prefill over latents, seconds at least
    (each latent is read once); each None in the other phase."""

    phase: str
    step: KernelStep
    fitted: Step
    one_part: KernelStep | None
    by_load: KernelStep | None
    deterministic: float | None

    @property
    def mode(self) -> Mode:
        return "deterministic" if self.phase == "decode" else "fast"

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
        lines = [self._difference()]
        if self.phase == "decode":
            lines += self._pieces()
        if self.deterministic is not None:
            lines.append(
                "attention of prefill is that of fast mode (--no-deterministic), which expands "
                "keys; in deterministic mode, the default of serve, it attends over latents: at "
                f"least {_ms(self.deterministic)} ms a step"
            )
        lines.append(
            "the fitted model has no modes: its constants are fitted on published throughputs of "
            "other engines, which is nearest to fast mode"
        )
        return lines

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
        if name == _CORE and self.merging > 0:
            return f"{_ms(self.merging)} are results of pieces, the rest queries and results"
        return (_MORE if more > 0 else _LESS).get(name, "")

    def _pieces(self) -> list[str]:
        if self.one_part is None or self.by_load is None or self.merging <= 0:
            return []
        cuts = DETERMINISTIC
        return [
            f"pieces: a row's context is cut at fixed positions, every {cuts.near_size:,} up to "
            f"{cuts.near_end:,}, then every {cuts.far_size:,}, so that tokens are the same in any "
            f"company, and fp32 results of the pieces are written and merged: {_CORE} takes "
            f"{_ms(self.step.part('core'))} ms, in one piece {_ms(self.one_part.part('core'))}. "
            "In fast mode (--no-deterministic) our kernel cuts no more than fills the GPU: "
            f"{_ms(self.by_load.part('core'))} ms, the whole step {_ms(self.by_load.seconds)}"
        ]

    @property
    def bounds(self) -> dict[str, str]:
        """What `bound` of a kernel means."""
        c = self.step.calibration
        gap, of_experts = 1e6 * c.launch / LAUNCHES, 1e6 * c.expert_launch / OF_EXPERTS
        return {
            "memory": "its bytes over HBM take longest",
            "compute": "its FLOPs over the peak of their kind take longest",
            "gaps": f"what passes before its launches ({gap:.1f} us each, {of_experts:.1f} among "
            "experts) is longer than both: too small a kernel to be bound by either",
        }

    def as_json(self) -> dict[str, Any]:
        return self.step.as_json() | {
            "mode": self.mode,
            "fitted_step_s": self.fitted.seconds,
            "differences_s": self.differences,
            "fast_step_s": None if self.by_load is None else self.by_load.seconds,
            "one_part_step_s": None if self.one_part is None else self.one_part.seconds,
            "deterministic_step_s": self.deterministic,
            "why": self.why,
            "bounds": self.bounds,
        }


def compared(d: Deployment, work: Workload, fitted: Step) -> Compared | None:
    """fitted: the same step by the fitted model. None where there are no kernels (tp)."""
    step = kernel_step(d, work)
    if step is None:
        return None
    if d.phase == "decode":
        whole, by_load = (kernel_step(d, work, partitions=x) for x in (ONE_PART, fast_cuts(d)))
        return Compared(d.phase, step, fitted, whole, by_load, None)
    latents = kernel_step(d, work, latents=True)
    return Compared(d.phase, step, fitted, None, None, None if latents is None else latents.seconds)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}"
