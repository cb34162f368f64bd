"""Plans, searches and validations as tables for a terminal. Knows rich; computes nothing."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE, SIMPLE_HEAD
from rich.columns import Columns
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from launch.capacity.asked import Asked
from launch.capacity.node import NEEDED_HOST, NEEDED_SHARED
from launch.capacity.parts import dollars, memory_parts, step_parts
from launch.capacity.remedies import ERROR, errors
from launch.capacity.report import ASSUMED, Plan, Report
from launch.capacity.search import Candidate, Found, Ratio
from launch.capacity.times import Step
from launch.capacity.validate import FITTED, Validation

_GB = 1e9
_WIDE = 120  # columns from which two tables stand side by side


def show_plan(plan: Plan, console: Console) -> None:
    d, work = plan.reports[0].deployment, plan.reports[0].work
    console.print(
        f"[bold]{escape(d.model)}[/]: {size_told(d.shape.total)} parameters, "
        f"{size_told(d.shape.active)} a token, in {d.shape.weights_in.upper()}, on {d.gpus} x "
        f"{d.gpu.title} ({d.nodes} node{'s' * (d.nodes > 1)})"
    )
    cached = f", {work.cached_share:.0%} of it cached" if work.cached_share else ""
    console.print(
        f"requests: prompt of {work.input_tokens:,} tokens{cached}, answer of "
        f"{work.output_tokens:,}"
    )
    for r in plan.reports:
        show_report(r, console)
    console.print()
    console.print(_costs(plan))
    for r in plan.reports:
        show_violations(r, console)
    for note in dict.fromkeys(x for r in plan.reports for x in r.notes):
        console.print(f"[dim]{note}[/]")
    console.print(f"[dim]{ASSUMED}[/]")


def size_told(number: float) -> str:
    return f"{number / 1e9:.4g} B" if number >= 1e9 else f"{number / 1e6:.3g} M"


def show_report(r: Report, console: Console) -> None:
    d, spread = r.deployment, r.balance
    console.rule(f"[bold]{d.phase}", align="left")
    empty = d.physical - d.slots
    console.print(
        f"experts: {d.slots} slots, {d.slots_per_gpu} a GPU ({d.redundant} redundant"
        f"{f', {empty} empty' * bool(empty)}), shared expert {d.shared}, dispatch {d.dispatch}"
    )
    console.print(
        f"balance: busiest GPU {spread.mean:.3f} x mean, worst layer {spread.worst:.3f} (in order, "
        f"without copies: {spread.unplanned:.2f}); loads: {escape(spread.source)}"
    )
    needs = (
        f"a node needs {_told(d.gpus_of_a_node * NEEDED_HOST)} of host memory and "
        f"{_told(d.gpus_of_a_node * NEEDED_SHARED)} in /dev/shm"
    )
    console.print(needs)
    tables = (_memory(r), _step(r.prediction.step, d.phase), _sequences(r), _results(r))
    if console.width >= _WIDE:
        for pair in (tables[:2], tables[2:]):
            console.print(Columns(pair, padding=(0, 3)))
    else:
        for table in tables:
            console.print(table)


def show_violations(r: Report, console: Console) -> None:
    phase = r.deployment.phase
    if not r.violations:
        console.print(f"[green]{phase}: no rule is violated[/]")
        return
    wrong = len(errors(r.violations))
    said = f"{wrong} rule{'s are' if wrong != 1 else ' is'} violated"
    said += f", {len(r.violations) - wrong} to know of" if wrong < len(r.violations) else ""
    table = Table(
        title=f"{phase}: {said}",
        title_style="bold red" if wrong else "bold yellow",
        title_justify="left",
        box=SIMPLE,
    )
    table.add_column("rule")
    table.add_column("what, and what would be valid", overflow="fold")
    for v in r.violations:
        style = "red" if v.severity == ERROR else "yellow"
        table.add_row(f"[{style}]{v.rule}[/]", escape(v.text))
    console.print(table)


def _told(size: float) -> str:
    return f"{size / _GB:.0f} GB"


def _table(title: str, **options: Any) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, **options)


def _costs(plan: Plan) -> Table:
    r = plan.reports[0]
    table = _table(f"a million tokens, ${r.price:g} a GPU-hour")
    cost = plan.cost()
    for kind in cost:
        table.add_column(kind, justify="right")
    table.add_row(*("-" if x is None else dollars(x) for x in cost.values()))
    return table


def _memory(r: Report) -> Table:
    table = _table("memory of a GPU")
    for name in ("what", "GB", "share"):
        table.add_column(name, justify="left" if name == "what" else "right")
    weights = set(r.memory.weights)
    for name, size in memory_parts(r):
        if name == "KV cache":
            table.add_section()
        told = f"weights: {name}" if name in weights else name
        style = "bold" if name == "KV cache" else ""
        table.add_row(told, f"{size / _GB:.2f}", f"{size / r.memory.total:.1%}", style=style)
    return table


def _sequences(r: Report) -> Table:
    plain, small = r.kv_bytes
    more, less = r.mtp_kv_bytes
    mtp = f"; MTP + {more:,}, FP8 + {less:,}" if more else ""
    table = _table(f"sequences in the cache ({plain:,} bytes a token, FP8 {small:,}{mtp})")
    table.add_column("tokens each", justify="right")
    for name in ("static", "paged", "paged, FP8"):
        table.add_column(name, justify="right")
    for c in r.concurrency:
        node = c.times(r.caches_of_a_node)
        pairs = ((c.reserved, node.reserved), (c.paged, node.paged), (c.paged_fp8, node.paged_fp8))
        table.add_row(f"{c.length:,}", *(f"{gpu:,} / {all_:,}" for gpu, all_ in pairs))
    node_told = f"a GPU / a node of {r.deployment.gpus_of_a_node}"
    table.caption = f"{node_told}; static: {r.longest:,} each"
    table.caption_justify = "left"
    return table


def _step(step: Step, phase: str) -> Table:
    table = _table(f"a step of {phase}, busiest GPU")
    for name in ("part", "ms", "share"):
        table.add_column(name, justify="left" if name == "part" else "right")
    for name, seconds in step_parts(step):
        table.add_row(name, f"{1e3 * seconds:.2f}", f"{seconds / step.seconds:.1%}")
    table.add_section()
    table.add_row("step", f"{1e3 * step.seconds:.2f}", "", style="bold")
    if (hidden := step.comm - step.exposed) > 0:
        table.add_row("all-to-alls, hidden", f"{1e3 * hidden:.2f}", "")
    return table


def _results(r: Report) -> Table:
    p, d = r.prediction, r.deployment
    decode = d.phase == "decode"
    table = _table("predicted", show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    what = "output" if decode else "computed prompt"
    load = f"{d.sequences:,} sequences" if decode else f"{d.tokens:,} tokens a step"
    table.add_row("load of a GPU", load)
    table.add_row(f"{what} tokens/s a node", f"[bold]{p.per_node:,.0f}[/]")
    table.add_row(f"{what} tokens/s a GPU", f"{p.per_gpu:,.0f}")
    table.add_row(f"{what} tokens/s of all GPUs", f"{p.tokens_per_s:,.0f}")
    if p.tpot is not None:
        table.add_row("TPOT", f"[bold]{1e3 * p.tpot:.1f} ms[/] ({1 / p.tpot:.1f} tok/s a user)")
    if p.ttft is not None and p.ttft_alone is not None:
        table.add_row("TTFT, busy pool", f"[bold]{1e3 * p.ttft:,.0f} ms[/]")
        table.add_row("TTFT, idle GPU", f"{1e3 * p.ttft_alone:,.0f} ms")
    if d.drafts and decode:
        gain = f"{p.tokens_a_step:.2f} tokens a step, {p.mtp_gain:.2f} x without"
        table.add_row(f"MTP, {d.drafts} drafts at {d.acceptance:.0%}", gain)
    t = p.traffic
    table.add_row("sent a token a layer, within nodes", f"{t.within / 1e3:,.1f} kB")
    table.add_row("sent a token a layer, across nodes", f"{t.across / 1e3:,.1f} kB")
    return table


def show_search(found: list[Found], shares: Ratio | None, asked: Asked, console: Console) -> None:
    d = asked.bases[0]
    console.print(
        f"[bold]{escape(d.model)}[/] on {d.gpu.title}, up to {asked.most_gpus} GPUs a pool; prompt "
        f"of {asked.work.input_tokens:,} tokens, answer of {asked.work.output_tokens:,}; attention "
        "is data-parallel (tp 1)"
    )
    for f in found:
        console.print(_found(f))
        if f.best is None:
            console.print(f"[red]{f.phase}: no layout keeps the limits[/]")
    if shares is not None:
        console.print(
            f"[bold]{shares.prefill} prefill : {shares.decode} decode[/] instances keep up with "
            f"each other: {shares.gpus} GPUs, {shares.requests_per_s:.1f} requests/s"
        )
    costs = {kind: x for f in found if f.best for kind, x in f.best.prediction.cost.items()}
    if costs:
        price = d.gpu.price if asked.price is None else asked.price
        told = ", ".join(f"{kind} {dollars(x)}" for kind, x in costs.items())
        console.print(f"a million tokens at ${price:g} a GPU-hour: {told}")


def _found(f: Found) -> Table:
    """Layouts that no other beats, and the best: one of them, or the last."""
    table = _table(
        f"{f.phase}: {len(f.pareto)} layouts that no other beats ({f.tried:,} tried, "
        f"{len(f.allowed):,} allowed)",
        pad_edge=False,
        padding=(0, 0),
    )
    for name in front_names(f):
        table.add_column(name, justify="right", no_wrap=True)
    for row in front_rows(f):
        table.add_row(*row, style="bold green" if row[-1] else "")
    table.caption = f"slots and load: of a GPU; pools of whole nodes in steps of {f.gpus_step} GPUs"
    table.caption_justify = "left"
    return table


def front_names(f: Found) -> list[str]:
    """Columns of `front_rows`, the last one without a name."""
    limit = "TPOT ms" if f.phase == "decode" else "TTFT ms"
    load = "seqs" if f.phase == "decode" else "tokens"
    return ["GPUs", "slots", "hosted", "balance", load, "drafts", "overlap", limit, "tok/s/GPU", ""]


def front_rows(f: Found) -> list[list[str]]:
    """Cells of layouts that no other beats, and of the best; the last cell marks that."""
    shown = [*f.pareto] + ([f.best] if f.best is not None and f.best not in f.pareto else [])
    return [[*_cells(x), "best" if x == f.best else ""] for x in shown]


def _cells(x: Candidate) -> list[str]:
    """hosted: whether slots hold the shared expert."""
    d = x.deployment
    return [
        str(d.gpus),
        str(d.slots_per_gpu),
        "yes" if d.hosted else "no",
        f"{d.balance:.3f}",
        f"{d.step_tokens if d.phase == 'prefill' else d.sequences:,}",
        str(d.drafts),
        "on" if d.overlap else "off",
        f"{1e3 * x.latency:,.1f}",
        f"{x.prediction.per_gpu:,.0f}",
    ]


def show_validation(v: Validation, console: Console) -> None:
    table = _table("published measurements and what is predicted")
    for name in ("#", "what", "unit"):
        table.add_column(name, overflow="fold")
    for name in ("measured", "predicted", "error"):
        table.add_column(name, justify="right")
    table.add_column("")
    for p in v.points:
        if p.error is None or p.predicted is None:
            measured = f"{p.measured:,.4g}" if p.measured < 1000 else f"{p.measured:,.0f}"
            table.add_row(p.id, p.what, p.unit, measured, "-", "-", p.reason)
            continue
        style = "red" if abs(p.error) > 0.25 else "yellow" if abs(p.error) > 0.1 else ""
        told = "fitted" if p.fitted else "held out"
        error = f"{p.error:+.1%}"
        cells = (p.id, p.what, p.unit, f"{p.measured:,.0f}", f"{p.predicted:,.0f}", error, told)
        table.add_row(*cells, style=style)
    console.print(table)
    console.print(
        f"median error {v.median_error():.1%}: of throughputs "
        f"{v.median_error(unit='tok/s/node'):.1%}, of points held out "
        f"{v.median_error(fitted=False):.1%} ({v.held_out_share:.0%} of all); worst fitted "
        f"{v.worst_error(fitted=True):.1%}, worst held out {v.worst_error(fitted=False):.1%}"
    )
    console.print(f"fitted on the points marked so: {', '.join(FITTED)}")
