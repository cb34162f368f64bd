"""What memory and a step are made of, sums of money: in words, for every way to show them."""

from __future__ import annotations

from launch.capacity.deployment import Deployment
from launch.capacity.predict import MODELS, By
from launch.capacity.report import Report
from launch.capacity.times import Step

MODEL_TOLD: dict[By, str] = {"fitted": "the fitted model", "kernels": "our kernels' own counts"}


def model_told(by: By) -> str:
    """Of a prediction, where it is not the model that is asked when nothing is said."""
    return "" if by == MODELS[0] else f"predicted by {MODEL_TOLD[by]}"


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
