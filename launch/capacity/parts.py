"""What memory and a step are made of, sums of money: in words, for every way to show them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from launch.capacity.deployment import Deployment
from launch.capacity.predict import MODELS, NO_KERNELS, By
from launch.capacity.report import Plan, Report
from launch.capacity.times import Step

Mode = Literal["deterministic", "fast"]  # whose attention a step by our kernels has
MODEL_TOLD: dict[By, str] = {"fitted": "the fitted model", "kernels": "our kernels' own counts"}
FAST_MODE = "--no-deterministic"  # of `serve`, and of `plan`
LEAST = "at least "
_MODE_TOLD = {
    "deterministic": "deterministic mode (the default of serve)",
    "fast": f"fast mode ({FAST_MODE})",
}


def mode_of(d: Deployment) -> Mode:
    return "deterministic" if d.deterministic else "fast"


def model_told(by: By, mode: Mode, phases: Iterable[str] = ()) -> str:
    """Of a prediction, where it is not the model that is asked when nothing is said. phases: of
    which figures are told."""
    if by == MODELS[0]:
        return ""
    least = "; prefill takes at least so long" * any(is_least(x, mode) for x in phases)
    return f"predicted by {MODEL_TOLD[by]}, {_MODE_TOLD[mode]}{least}"


def model_short(by: By, mode: Mode, phases: Iterable[str]) -> str:
    """The same for pictures, whose lines are short."""
    if by == MODELS[0]:
        return ""
    least = " (prefill: at least)" * any(is_least(x, mode) for x in phases)
    return f"by our kernels, {mode} mode{least}"


def plan_told(plan: Plan) -> str:
    """The same of a whole plan, with a step of each mode; where there are no kernels, that."""
    asked, used = plan.reports[0].by, plan.reports[0].prediction.by
    if asked != used:
        return f"predicted by {MODEL_TOLD[used]}: {NO_KERNELS}"
    mode = mode_of(plan.reports[0].deployment)
    told = model_told(used, mode)
    both = [r.kernels for r in plan.reports if r.kernels is not None] if told else []
    if not both:
        return told
    other: Mode = "fast" if mode == "deterministic" else "deterministic"
    ours = ", ".join(step_told(x.phase, mode, x.step.seconds) for x in both)
    theirs = ", ".join(step_told(x.phase, other, x.other.seconds) for x in both)
    return f"{told}: {ours}; in {_MODE_TOLD[other]}: {theirs}"


def step_told(phase: str, mode: Mode, seconds: float) -> str:
    least = LEAST if is_least(phase, mode) else ""
    return f"a step of {phase} {least}{1e3 * seconds:,.1f} ms"


def is_least(phase: str, mode: Mode) -> bool:
    """Whether kernels' counts are the least that it can be: prefill over latents counts each as
    read once."""
    return (phase, mode) == ("prefill", "deterministic")


def memory_parts(r: Report) -> list[tuple[str, float]]:
    """Bytes; the cache last, below zero where nothing is left."""
    m = r.memory
    parts = list(m.weights.items())
    parts += [
        (f"dispatch ({r.deployment.dispatch})", m.buffers),
        ("graphs", m.graphs),
        ("workspace", m.workspace),
        ("CUDA context, libraries", m.context),
        ("left free", m.reserve),
        ("KV cache", m.kv),
    ]
    return [(name, size) for name, size in parts if size]


def step_parts(step: Step) -> list[tuple[str, float]]:
    """Seconds; together the whole step."""
    parts = [
        ("attention projections", step.projections),
        ("attention core", step.core),
        ("routed experts", step.experts),
        ("shared expert", step.shared),
        ("dense layers", step.dense),
        ("norms, casts, gaps", step.rest),
        ("head", step.head),
        ("all-to-alls, not hidden", step.exposed),
    ]
    drafts = step.seconds - sum(seconds for _, seconds in parts)
    if drafts > 1e-9:
        parts.append(("MTP drafts", drafts))
    return [(name, seconds) for name, seconds in parts if seconds > 0]


def load_told(d: Deployment) -> str:
    """What a GPU carries."""
    if d.phase == "decode":
        return f"{d.sequences:,} sequence{'' if d.sequences == 1 else 's'}"
    return f"{d.tokens:,} token{'' if d.tokens == 1 else 's'} a step"


def dollars(amount: float) -> str:
    return f"${amount:.3f}" if amount >= 0.01 or amount == 0 else f"${amount:.2g}"


def scaled(amount: float) -> str:
    """Three places that count, and a prefix: 67.6 G, 12.3 M, 512 (with a space behind: a unit may
    follow)."""
    for prefix, one in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if amount >= 0.9995 * one:
            return f"{amount / one:#.3g}".rstrip(".") + f" {prefix}"
    return f"{amount:.3g} "
