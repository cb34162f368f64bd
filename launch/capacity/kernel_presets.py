"""A step of each published deployment by our kernels' counts, in both modes, beside the fitted one.

Knows: presets, parts that are told together. Each is what `moeserve plan --preset NAME` plans, so
either command shows how the other came about. Knows nothing of screens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from launch.capacity.asked import Typed, read
from launch.capacity.deployment import PRESETS
from launch.capacity.parts import LEAST, is_least, load_told

_PRODUCTS = ("projections", "shared", "dense", "head")


@dataclass(frozen=True)
class PresetStep:
    """Seconds of a step. what: the deployment in words. The parts (core to exposed; together the
    step), launches and tokens/s a node are those of deterministic mode, the default of serve;
    least: it takes at least so long. fast: the step in fast mode; one_part: in deterministic mode
    with each row in one piece, None in prefill; fitted: by the fitted model. products: projections,
    shared expert, dense layers, head; rest: small kernels; exposed: all-to-alls that nothing
    hides."""

    preset: str
    what: str
    deterministic: float
    fast: float
    one_part: float | None
    fitted: float
    core: float
    experts: float
    products: float
    rest: float
    exposed: float
    launches: int
    per_node: float
    least: bool

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def preset_steps(names: Iterable[str] = PRESETS) -> list[PresetStep]:
    return [_of(name) for name in names]


def _of(name: str) -> PresetStep:
    asked = read(Typed(preset=name, predict="kernels"))
    r = asked.plan().reports[0]
    d, both = r.deployment, r.kernels
    assert both is not None  # presets fit, and share no attention
    length = round(asked.work.context if d.phase == "decode" else asked.work.input_tokens)
    step = both.deterministic
    return PresetStep(
        name,
        f"{d.phase} EP{d.gpus}, {d.gpu.name.upper()}, {load_told(d)}, {length:,} positions",
        step.seconds,
        both.fast.seconds,
        None if both.one_part is None else both.one_part.seconds,
        both.fitted.seconds,
        step.part("core"),
        step.part("experts"),
        sum(map(step.part, _PRODUCTS)),
        step.part("rest"),
        step.exposed,
        step.launches,
        r.prediction.per_node,
        is_least(d.phase, "deterministic"),
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}"


# Columns: of the step, and what it is made of. The first names the row.
STEPS: dict[str, Callable[[PresetStep], str]] = {
    "preset": lambda x: x.preset,
    "deterministic": lambda x: LEAST * x.least + _ms(x.deterministic),
    "in one part": lambda x: "" if x.one_part is None else _ms(x.one_part),
    "fast": lambda x: _ms(x.fast),
    "fitted": lambda x: _ms(x.fitted),
    "tok/s a node": lambda x: f"{x.per_node:,.0f}",
}
MADE_OF: dict[str, Callable[[PresetStep], str]] = {
    "preset": lambda x: x.preset,
    "core": lambda x: _ms(x.core),
    "experts": lambda x: _ms(x.experts),
    "products": lambda x: _ms(x.products),
    "rest": lambda x: _ms(x.rest),
    "all-to-alls": lambda x: _ms(x.exposed),
    "launches": lambda x: f"{x.launches:,}",
}


def markdown(steps: list[PresetStep]) -> str:
    """Both tables as one, as BENCHMARKS.md has it."""
    columns = STEPS | MADE_OF
    lines = [[*columns, "what"], ["---", *["---:"] * (len(columns) - 1), "---"]]
    lines += [[*(told(x) for told in columns.values()), x.what] for x in steps]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
