"""What a search found, as tables for a terminal. Knows rich; computes nothing."""

from __future__ import annotations

from rich.console import Console, Group
from rich.markup import escape

from launch.capacity.asked import Asked
from launch.capacity.candidates import Candidate
from launch.capacity.parts import dollars, mode_of, model_told
from launch.capacity.report import named_otherwise, unquantised
from launch.capacity.screen import table, titled
from launch.capacity.search import Found, Ratio
from moeserve.terminal import counted


def show_search(found: list[Found], shares: Ratio | None, asked: Asked, console: Console) -> None:
    d = asked.bases[0]
    work, pool = asked.work, counted(asked.most_gpus, "GPU")
    console.print(
        f"[bold]{escape(d.model)}[/] on {d.gpu.title}, up to {pool} a pool; prompt of "
        f"{work.input_tokens:,} tokens, answer of {work.output_tokens:,}; attention is "
        "data-parallel (tp 1)",
        soft_wrap=True,
    )
    if said_by := model_told(asked.by, mode_of(d), (f.phase for f in found)):
        console.print(said_by)
    for note in unquantised(d) + [v.text for v in named_otherwise(d)]:
        console.print(f"[yellow]{escape(note)}[/]")
    for f in found:
        console.print(_found(f))
        if f.best is None:
            console.print(f"[red]{f.phase}: no layout keeps the limits[/]")
    if shares is not None:
        console.print(
            f"[bold]{shares.prefill} prefill : {shares.decode} decode[/] instances keep up with "
            f"each other: {counted(shares.gpus, 'GPU')}, {shares.requests_per_s:.1f} requests/s"
        )
    costs = {kind: x for f in found if f.best for kind, x in f.best.prediction.cost.items()}
    if costs:
        price = d.gpu.price if asked.price is None else asked.price
        told = ", ".join(f"{kind} {dollars(x)}" for kind, x in costs.items())
        console.print(f"a million tokens at ${price:g} a GPU-hour: {told}")


_STYLES = {"best": "bold green", "over": "dim"}


def _found(f: Found) -> Group:
    """Layouts that no other beats, and the best: one of them, or the last."""
    front = table(pad_edge=False, padding=(0, 0))
    for name in front_names(f):
        front.add_column(name, justify="right", no_wrap=True)
    for row in front_rows(f):
        front.add_row(*row, style=_STYLES.get(row[-1], ""))
    caption = f"slots and load: of a GPU; pools of whole nodes in steps of {f.gpus_step} GPUs"
    if f.limit is not None and any(row[-1] == "over" for row in front_rows(f)):
        name = "TPOT" if f.phase == "decode" else "TTFT"
        caption += f"\nover: beyond the limit, {name} {1e3 * f.limit:g} ms"
    title = (
        f"{f.phase}: {counted(len(f.pareto), 'layout')} that no other beats ({f.tried:,} tried, "
        f"{f.num_allowed:,} allowed)"
    )
    return titled(title, front, caption)


def front_names(f: Found) -> list[str]:
    """Columns of `front_rows`, the last one without a name."""
    limit = "TPOT ms" if f.phase == "decode" else "TTFT ms"
    load = "seqs" if f.phase == "decode" else "tokens"
    return ["GPUs", "slots", "hosted", "balance", load, "drafts", "overlap", limit, "tok/s/GPU", ""]


def front_rows(f: Found) -> list[list[str]]:
    """Cells of layouts that no other beats, and of the best; the last cell marks that, and those
    that are over the limit."""
    shown = [*f.pareto] + ([f.best] if f.best is not None and f.best not in f.pareto else [])

    def mark(x: Candidate) -> str:
        return "best" if x == f.best else "" if x.keeps(f.limit) else "over"

    return [[*_cells(x), mark(x)] for x in shown]


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
