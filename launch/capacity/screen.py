"""Plans, searches and validations as tables for a terminal. Knows rich; computes nothing."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from launch.capacity.report import Report
from launch.capacity.search import Candidate, Found, Ratio
from launch.capacity.times import Step
from launch.capacity.validate import Validation

_GB = 1e9


def show_report(r: Report, console: Console) -> None:
    d, p = r.deployment, r.prediction
    console.print(
        f"[bold]{d.model}[/] for {d.phase} on {d.gpus} x {d.gpu.title}, {d.nodes} nodes: "
        f"{d.shape.total / 1e9:.0f} B parameters, {d.shape.active / 1e9:.1f} B a token"
    )
    spread = r.balance
    console.print(
        f"experts: {d.slots} slots, {d.slots_per_gpu:.4g} a GPU ({d.redundant} redundant), shared "
        f"expert {d.shared}; busiest GPU {spread.mean:.3f} x mean, worst layer {spread.worst:.3f} "
        f"(in order, no copies: {spread.unplanned:.2f}) on {spread.source}"
    )
    for table in (_memory(r), _sequences(r), _step(p.step, d.phase), _results(r)):
        console.print(table)
    show_violations(r, console)


def show_violations(r: Report, console: Console) -> None:
    if not r.violations:
        console.print("[green]no rule is violated[/]")
        return
    table = Table(title=f"{len(r.violations)} rules are violated", title_style="bold red")
    table.add_column("rule", style="red")
    table.add_column("what, and what would be valid", overflow="fold")
    for v in r.violations:
        table.add_row(v.rule, v.text)
    console.print(table)


def _memory(r: Report) -> Table:
    m = r.memory
    table = Table(title="memory of a GPU", title_justify="left")
    table.add_column("what")
    table.add_column("GB", justify="right")
    table.add_column("share", justify="right")
    rows = [(f"weights: {kind}", size) for kind, size in m.weights.items()]
    rows += [
        (f"dispatch buffers ({r.deployment.dispatch})", m.buffers),
        ("captured graphs", m.graphs),
        ("workspace", m.workspace),
        ("CUDA context, libraries", m.context),
        ("left free", m.reserve),
    ]
    for name, size in rows:
        if size:
            table.add_row(name, f"{size / _GB:.2f}", f"{size / m.total:.1%}")
    table.add_section()
    table.add_row("[bold]KV cache[/]", f"{m.kv / _GB:.2f}", f"{m.kv / m.total:.1%}")
    return table


def _sequences(r: Report) -> Table:
    plain, small = r.kv_bytes
    table = Table(
        title=f"sequences that a GPU's cache holds ({plain} bytes a token, FP8 {small})",
        title_justify="left",
    )
    table.add_column("tokens each", justify="right")
    for name in ("static reservation", "paged", "paged, FP8"):
        table.add_column(name, justify="right")
    for c in r.concurrency:
        table.add_row(f"{c.length:,}", f"{c.reserved:,}", f"{c.paged:,}", f"{c.paged_fp8:,}")
    return table


def _step(step: Step, phase: str) -> Table:
    table = Table(title=f"a step of {phase}, busiest GPU", title_justify="left")
    table.add_column("part")
    table.add_column("ms", justify="right")
    table.add_column("share", justify="right")
    parts = {
        "attention projections": step.projections,
        "attention core": step.core,
        "routed experts": step.experts,
        "shared expert": step.shared,
        "dense layers": step.dense,
        "norms, casts, gaps": step.rest,
        "head": step.head,
        "all-to-alls, not hidden": step.exposed,
    }
    whole = max(step.seconds, sum(parts.values()))
    for name, seconds in parts.items():
        table.add_row(name, f"{1e3 * seconds:.2f}", f"{seconds / whole:.1%}")
    if (drafts := step.seconds - sum(parts.values())) > 1e-9:
        table.add_row("MTP drafts", f"{1e3 * drafts:.2f}", f"{drafts / whole:.1%}")
    table.add_section()
    hidden = step.comm - step.exposed
    table.add_row("[bold]step[/]", f"{1e3 * step.seconds:.2f}", f"hidden: {1e3 * hidden:.2f} ms")
    return table


def _results(r: Report) -> Table:
    p, d = r.prediction, r.deployment
    table = Table(title="predicted", title_justify="left", show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    what = "output" if d.phase == "decode" else "computed prompt"
    table.add_row(f"{what} tokens/s a node", f"{p.per_node:,.0f}")
    table.add_row(f"{what} tokens/s a GPU", f"{p.per_gpu:,.0f}")
    table.add_row(f"{what} tokens/s of the pool", f"{p.tokens_per_s:,.0f}")
    if p.tpot is not None:
        table.add_row("TPOT", f"{1e3 * p.tpot:.1f} ms ({1 / p.tpot:.1f} tok/s a user)")
    if p.ttft is not None:
        table.add_row("TTFT of a prompt alone", f"{1e3 * p.ttft:.0f} ms")
    if d.drafts:
        gain = f"{p.tokens_a_step:.2f} tokens a step, {p.mtp_gain:.2f} x without"
        table.add_row(f"MTP, {d.drafts} drafts at {d.acceptance:.0%}", gain)
    t = p.traffic
    table.add_row("bytes a token a layer, within nodes", f"{t.within:,.0f}")
    table.add_row("bytes a token a layer, across nodes", f"{t.across:,.0f}")
    for kind, dollars in p.cost.items():
        table.add_row(f"a million {kind} tokens at ${r.price:g} a GPU-hour", f"${dollars:.3f}")
    return table


def show_search(found: list[Found], shares: Ratio | None, console: Console) -> None:
    for f in found:
        limit = "TPOT" if f.phase == "decode" else "TTFT"
        table = Table(
            title=f"{f.phase}: {len(f.pareto)} layouts that no other beats "
            f"({f.tried} tried, {len(f.allowed)} allowed)",
            title_justify="left",
        )
        for name in (
            "GPUs",
            "slots a GPU",
            "load a GPU",
            "drafts",
            "overlap",
            limit,
            "tok/s a GPU",
        ):
            table.add_column(name, justify="right")
        for x in f.pareto:
            style = "bold green" if f.best is not None and x == f.best else ""
            table.add_row(*_cells(x), style=style)
        console.print(table)
        if f.best is None:
            console.print(f"[red]no layout of {f.phase} keeps the limits[/]")
        elif f.best not in f.pareto:
            console.print(f"best within the limits: {' | '.join(_cells(f.best))}")
    if shares is not None:
        console.print(
            f"[bold]{shares.prefill} prefill : {shares.decode} decode[/] instances keep up with "
            f"each other: {shares.gpus} GPUs, {shares.requests_per_s:.1f} requests/s"
        )


def _cells(x: Candidate) -> list[str]:
    d = x.deployment
    load = f"{d.sequences} seq" if d.phase == "decode" else f"{d.tokens} tok"
    return [
        str(d.gpus),
        f"{d.slots_per_gpu:.4g}",
        load,
        str(d.drafts),
        "on" if d.overlap else "off",
        f"{1e3 * x.latency:.1f} ms",
        f"{x.prediction.per_gpu:,.0f}",
    ]


def show_validation(v: Validation, console: Console) -> None:
    table = Table(title="published measurements and what is predicted", title_justify="left")
    for name, justify in (("#", "left"), ("what", "left"), ("unit", "left")):
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for name in ("measured", "predicted", "error"):
        table.add_column(name, justify="right")
    table.add_column("")
    for p in v.points:
        if p.error is None or p.predicted is None:
            table.add_row(p.id, p.what, p.unit, f"{p.measured:,.0f}", "-", "-", p.reason)
            continue
        style = "red" if abs(p.error) > 0.25 else "yellow" if abs(p.error) > 0.1 else ""
        told = "fitted" if p.fitted else "held out"
        error = f"{p.error:+.1%}"
        cells = (p.id, p.what, p.unit, f"{p.measured:,.0f}", f"{p.predicted:,.0f}", error, told)
        table.add_row(*cells, style=style)
    console.print(table)
    console.print(
        f"median error {v.median_error():.1%}; of throughputs "
        f"{v.median_error(unit='tok/s/node'):.1%}; of points held out {v.median_error(fitted=False):.1%} ({v.held_out_share:.0%} of all); "
        f"worst fitted {v.worst_error(fitted=True):.1%}"
    )
