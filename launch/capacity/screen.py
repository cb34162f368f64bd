"""Plans as tables for a terminal. Knows rich; computes nothing.

What a search found: `screen_search`; published points: `screen_points`.
"""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE, SIMPLE_HEAD
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from launch.capacity.kernel_why import Compared
from launch.capacity.node import NEEDED_HOST, NEEDED_SHARED
from launch.capacity.parts import (
    LEAST,
    MODEL_TOLD,
    dollars,
    is_least,
    load_told,
    memory_parts,
    mode_of,
    plan_told,
    scaled,
    step_parts,
)
from launch.capacity.remedies import ERROR, errors
from launch.capacity.report import ASSUMED, Plan, Report
from launch.capacity.times import Step
from launch.capacity.verdict import NOT_PREDICTED
from moeserve.terminal import counted

_GB = 1e9
_WIDE = 120  # columns from which two tables stand side by side


def show_plan(plan: Plan, console: Console, kernels: bool = False) -> None:
    """kernels: what each of ours does in a step, as well."""
    d, work, said = plan.reports[0].deployment, plan.reports[0].work, plan.verdict
    console.print(
        f"[bold]{escape(d.model)}[/] on {d.gpus} x {d.gpu.title} ({counted(d.nodes, 'node')})",
        soft_wrap=True,
    )
    style = "bold red" if not said.fits else "bold yellow" if plan.errors else "bold green"
    console.print(f"[{style}]{escape(said.text)}[/]", soft_wrap=True)
    assumed = "" if d.shape.config.quantization else " (assumed: config.json names no quantisation)"
    console.print(
        f"{size_told(d.shape.total)} parameters, {size_told(d.shape.active)} a token (with the "
        "head, without the table of embeddings), in "
        f"{d.shape.weights_in.upper()}{assumed}"
    )
    cached = f", {work.cached_share:.0%} of it cached" if work.cached_share else ""
    console.print(
        f"requests: prompt of {work.input_tokens:,} tokens{cached}, answer of "
        f"{work.output_tokens:,}"
    )
    if said_by := plan_told(plan):
        console.print(said_by, soft_wrap=True)
    for r in plan.reports:
        show_report(r, console)
        if kernels and r.kernels is not None:
            console.print(_kernels(r.kernels))
    console.print()
    if any(r.predicted is not None for r in plan.reports):
        console.print(_costs(plan))
    for r in plan.reports:
        show_violations(r, console)
    for note in dict.fromkeys(x for r in plan.reports for x in r.notes):
        console.print(f"[dim]{escape(note)}[/]")
    if any(r.predicted is not None for r in plan.reports):
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
    if d.gpus > 1:
        console.print(_placement(r))
    needs = (
        f"a node needs {_told(d.gpus_of_a_node * NEEDED_HOST)} of host memory and "
        f"{_told(d.gpus_of_a_node * NEEDED_SHARED)} in /dev/shm"
    )
    console.print(needs)
    if r.predicted is None:
        console.print(_memory(r))
        if r.memory.kv > 0:
            console.print(_sequences(r))
        console.print(f"[bold red]no step, throughput, wait or price: {NOT_PREDICTED}[/]")
        return
    tables = (_memory(r), _step(r.prediction.step, d.phase), _sequences(r), _results(r))
    if console.width >= _WIDE:
        for pair in (tables[:2], tables[2:]):
            console.print(Columns(pair, padding=(0, 3)))
    else:
        for table in tables:
            console.print(table)


def _placement(r: Report) -> str:
    """Where a token's experts are, and what the other policy for groups would give."""
    d, spread = r.deployment, r.balance
    nodes = r.deployment.pool().nodes
    of = f" of {nodes} nodes" if nodes > 1 else ""
    said = f"a token visits {spread.reach.ranks:.2f} of {d.gpus} GPUs"
    said += f", {spread.reach.nodes:.2f}{of}" if nodes > 1 else ""
    if d.can_group:
        said += f"; {_GROUPS[spread.groups]}"
    for x in r.others:
        said += (
            f" ({_GROUPS[x.balance.groups]}: {x.balance.reach.nodes:.2f}, balance "
            f"{x.balance.mean:.3f}, {x.prediction.per_gpu / r.prediction.per_gpu - 1:+.1%} tok/s)"
        )
    return said


_GROUPS = {"free": "groups of experts lie anywhere", "node": "groups of experts stay on nodes"}


def show_violations(r: Report, console: Console) -> None:
    phase = r.deployment.phase
    if not r.violations:
        console.print(f"[green]{phase}: no rule is violated[/]")
        return
    wrong = len(errors(r.violations))
    said = f"{counted(wrong, 'rule')} {'are' if wrong > 1 else 'is'} violated"
    said = said if wrong else "no rule is violated"
    said += f", {len(r.violations) - wrong} to know of" if wrong < len(r.violations) else ""
    rules = Table(box=SIMPLE)
    rules.add_column("rule")
    rules.add_column("what, and what would be valid", overflow="fold")
    for v in r.violations:
        style = "red" if v.severity == ERROR else "yellow"
        rules.add_row(f"[{style}]{v.rule}[/]", escape(v.text))
    console.print(titled(f"{phase}: {said}", rules, style="bold red" if wrong else "bold yellow"))


def _told(size: float) -> str:
    return f"{size / _GB:.0f} GB"


def table(**options: Any) -> Table:
    return Table(box=SIMPLE_HEAD, **options)


def titled(title: str, below: Table, caption: str = "", style: str = "bold") -> Group:
    """A table's own title and caption would wrap at its width."""
    parts: list[RenderableType] = [Text(title, style=style), below]
    return Group(*parts, *([Text(caption, style="italic")] if caption else []))


def _costs(plan: Plan) -> Group:
    r = plan.reports[0]
    costs = table()
    cost = plan.cost()
    for kind in cost:
        costs.add_column(kind, justify="right")
    costs.add_row(*("-" if x is None else dollars(x) for x in cost.values()))
    return titled(f"a million tokens, ${r.price:g} a GPU-hour", costs)


def _memory(r: Report) -> Group:
    parts = table()
    for name in ("what", "GB", "share"):
        parts.add_column(name, justify="left" if name == "what" else "right")
    weights = set(r.memory.weights)
    for name, size in memory_parts(r):
        if name == "KV cache":
            parts.add_section()
        told = f"weights: {name}" if name in weights else name
        if size < 0:
            parts.add_row(told, f"{-size / _GB:.1f} GB missing", "", style="bold red")
            continue
        style = "bold" if name == "KV cache" else ""
        parts.add_row(told, f"{size / _GB:.2f}", f"{size / r.memory.total:.1%}", style=style)
    of_slots = counted(r.deployment.slots_per_gpu, "slot")
    caption = f"copies and other experts: means over GPUs of {of_slots} a layer"
    return titled("memory of a GPU", parts, caption if r.deployment.redundant else "")


def _sequences(r: Report) -> Group:
    plain, small = r.kv_bytes
    more, less = r.mtp_kv_bytes
    mtp = f"; MTP + {more:,}, FP8 + {less:,}" if more else ""
    kept = table()
    kept.add_column("tokens each", justify="right")
    for name in ("static", "paged", "paged, FP8"):
        kept.add_column(name, justify="right")
    for c in r.concurrency:
        node = c.times(r.caches_of_a_node)
        pairs = ((c.reserved, node.reserved), (c.paged, node.paged), (c.paged_fp8, node.paged_fp8))
        kept.add_row(f"{c.length:,}", *(f"{gpu:,} / {all_:,}" for gpu, all_ in pairs))
    node_told = f"a GPU / a node of {r.deployment.gpus_of_a_node}"
    title = f"sequences in the cache ({plain:,} bytes a token, FP8 {small:,}{mtp})"
    return titled(title, kept, f"{node_told}; static: {r.longest:,} each")


def _step(step: Step, phase: str) -> Group:
    parts = table()
    for name in ("part", "ms", "share"):
        parts.add_column(name, justify="left" if name == "part" else "right")
    for name, seconds in step_parts(step):
        parts.add_row(name, f"{1e3 * seconds:.2f}", f"{seconds / step.seconds:.1%}")
    parts.add_section()
    parts.add_row("step", f"{1e3 * step.seconds:.2f}", "", style="bold")
    if (hidden := step.comm - step.exposed) > 0:
        parts.add_row("all-to-alls, hidden", f"{1e3 * hidden:.2f}", "")
    return titled(f"a step of {phase}, busiest GPU", parts)


def _kernels(both: Compared) -> Group:
    step = both.step
    rows = table(padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for name in ("kernel", "part", "runs", "bytes", "FLOPs", "peak", "ms", "bound"):
        left = name in ("kernel", "part", "bound")
        rows.add_column(name, justify="left" if left else "right", no_wrap=True)
    for k in step.kernels:
        told = (f"{k.launches:,}", f"{scaled(k.bytes)}B", scaled(k.flops) if k.flops else "")
        share = "" if k.of_peak is None else f"{k.of_peak:.0%}"
        rows.add_row(k.kernel, k.part, *told, share, _ms(k.seconds), k.bound)
    rows.add_section()
    for name, seconds in (("all-to-alls seen", step.exposed), ("MTP drafts", step.drafts)):
        if seconds:
            rows.add_row(name, "", "", "", "", "", _ms(seconds), "")
    rows.add_row("step", "", f"{step.launches:,}", "", "", "", _ms(step.seconds), "")
    legend = "; ".join(f"{bound}: {what}" for bound, what in both.bounds.items())
    foot = "\n".join(
        [*both.why, "runs: launches in a step", *both.factors_told, f"bound: {legend}"]
    )
    title = f"a step of {both.phase} by our kernels' own counts, {both.mode_told}"
    return titled(title, rows, foot)


def _ms(seconds: float) -> str:
    """Of two places, or of one that counts; of thousands one, of more none."""
    told = 1e3 * seconds
    if told >= 999.995:
        return f"{told:,.1f}" if told < 9999.95 else f"{told:,.0f}"
    return f"{told:,.2f}" if told >= 0.005 or told == 0 else f"{told:.1g}"


def _results(r: Report) -> Group:
    p, d = r.prediction, r.deployment
    decode = d.phase == "decode"
    said = table(show_header=False)
    said.add_column("what")
    said.add_column("value", justify="right")
    what = "output" if decode else "computed prompt"
    said.add_row("load of a GPU", load_told(d))
    said.add_row(f"{what} tokens/s a node", f"[bold]{p.per_node:,.0f}[/]")
    said.add_row(f"{what} tokens/s a GPU", f"{p.per_gpu:,.0f}")
    said.add_row(f"{what} tokens/s of all GPUs", f"{p.tokens_per_s:,.0f}")
    if p.tpot is not None:
        said.add_row("TPOT", f"[bold]{1e3 * p.tpot:.1f} ms[/] ({1 / p.tpot:.1f} tok/s a user)")
    if p.ttft is not None and p.ttft_alone is not None:
        least = LEAST if p.by == "kernels" and is_least(d.phase, mode_of(d)) else ""
        said.add_row("TTFT, busy pool", f"{least}[bold]{1e3 * p.ttft:,.0f} ms[/]")
        said.add_row("TTFT, idle GPU", f"{least}{1e3 * p.ttft_alone:,.0f} ms")
    if d.drafts and decode:
        gain = f"{p.tokens_a_step:.2f} tokens a step, {p.mtp_gain:.2f} x without"
        said.add_row(f"MTP, {counted(d.drafts, 'draft')} at {d.acceptance:.0%}", gain)
    for by, seconds in r.steps.items():
        mode = f", {mode_of(d)}" if by == "kernels" else ""
        if by != p.by:
            said.add_row(f"a step by {MODEL_TOLD[by]}{mode}", f"{1e3 * seconds:,.1f} ms")
    t = p.traffic
    said.add_row("sent a token a layer, within nodes", f"{t.within / 1e3:,.1f} kB")
    said.add_row("sent a token a layer, across nodes", f"{t.across / 1e3:,.1f} kB")
    return titled("predicted", said)
