"""Published points beside what is predicted, as tables for a terminal. Knows rich; computes
nothing."""

from __future__ import annotations

from rich.console import Console, Group
from rich.padding import Padding
from rich.text import Text

from launch.capacity.kernel_presets import MADE_OF, STEPS, PresetStep
from launch.capacity.parts import MODEL_TOLD, model_told
from launch.capacity.screen import table, titled
from launch.capacity.validate import Point, Validation


def show_validation(v: Validation, console: Console, steps: list[PresetStep] | None = None) -> None:
    """Nothing is cut or folded into letters at 80 columns: what says much goes below the tables.
    steps: of presets, as well."""
    for unit, name in (("tok/s/node", "tokens/s a node"), ("us", "microseconds")):
        points = [p for p in v.points if p.unit == unit and p.error is not None]
        by = model_told(v.by, "fast")
        console.print(_points(points, f"{name} ({by})" if by else name))
    console.print("[bold]published, but not predicted[/]")
    for p in v.points:
        if p.error is None:
            console.print(_told(p))
    console.print()
    console.print(_constants(v))
    console.print(
        f"median error {v.median_error():.1%}: of throughputs "
        f"{v.median_error(unit='tok/s/node'):.1%}, of points held out "
        f"{v.median_error(fitted=False):.1%} ({v.held_out_share:.0%} of all); worst fitted "
        f"{v.worst_error(fitted=True):.1%}, worst held out {v.worst_error(fitted=False):.1%}"
    )
    console.print(v.told())
    for model, errors in v.models().items():
        known = len(v.throughputs[model])
        console.print(
            f"{known} throughputs by {MODEL_TOLD[model]}: median error "
            f"{errors['median_error']:.1%}, held out {errors['median_error_held_out']:.1%}, worst "
            f"{errors['worst_error']:.1%}"
        )
    console.print("both with the constants above, which only the fitted model was drawn to")
    if steps is not None:
        console.print()
        console.print(_presets(steps))


def _presets(steps: list[PresetStep]) -> Group:
    tables = []
    for title, columns, caption in (
        (
            "a step of each preset by our kernels' own counts, ms",
            STEPS,
            "deterministic: the default of serve; in one part: with rows not cut in pieces; fast: "
            "--no-deterministic; fitted: the fitted model; tok/s: deterministic",
        ),
        (
            "what it is made of in deterministic mode, ms",
            MADE_OF,
            "products: projections, shared expert, dense layers, head; rest: small kernels; "
            "all-to-alls: what nothing hides",
        ),
    ):
        rows = table(padding=(0, 1, 0, 0), pad_edge=False)
        for name in columns:
            rows.add_column(name, justify="left" if name == "preset" else "right", no_wrap=True)
        for x in steps:
            rows.add_row(*(told(x) for told in columns.values()))
        tables.append(titled(title, rows, caption))
    named = [f"{x.preset}: {x.what}" for x in steps]
    return Group(*tables, Text("\n".join([*named, "each: plan --preset NAME --kernels"])))


def _points(points: list[Point], unit: str) -> Group:
    rows = table(padding=(0, 1, 0, 0), pad_edge=False)
    rows.add_column("#", no_wrap=True)
    rows.add_column("what", ratio=1)
    for name in ("measured", "predicted", "error"):
        rows.add_column(name, justify="right", no_wrap=True)
    rows.add_column("", no_wrap=True)
    for p in points:
        error = p.error or 0.0
        style = "red" if abs(error) > 0.25 else "yellow" if abs(error) > 0.1 else ""
        numbers = (f"{p.measured:,.0f}", f"{p.predicted:,.0f}", f"{error:+.1%}")
        rows.add_row(p.id, p.what, *numbers, "fitted" if p.fitted else "held out", style=style)
    return titled(f"published measurements and what is predicted: {unit}", rows)


def _told(p: Point) -> Padding:
    measured = f"{p.measured:,.4g}" if p.measured < 1000 else f"{p.measured:,.0f}"
    said = f"{p.id}: {p.what}, {measured} {p.unit}: {p.reason}"
    return Padding(Text(said), (0, 0, 0, 2))


def _constants(v: Validation) -> Group:
    rows = table(padding=(0, 1, 0, 0), pad_edge=False)
    rows.add_column("constant", no_wrap=True)
    rows.add_column("value", justify="right", no_wrap=True)
    rows.add_column("is", ratio=1)
    rows.add_column("fitted on, or from", ratio=1)
    for c in v.constants:
        source = ", ".join(c.points) if c.start is not None else c.source
        rows.add_row(c.name, f"{c.value:.3g}", c.means, source)
    caption = (
        "fitted together, by least squares of logarithms from stated priors, on the points marked "
        "so; here: those that each constant moves. Peaks of GPUs: hardware.toml"
    )
    return titled("constants", rows, caption)
