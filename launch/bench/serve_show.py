"""How a report of `bench serve` looks on a terminal. Knows rich and the report's shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

RATES = {
    "requests_per_second": "answers/s",
    "input_tokens_per_second": "input tokens/s",
    "computed_input_tokens_per_second": "  computed",
    "cached_input_tokens_per_second": "  from cache",
    "output_tokens_per_second": "output tokens/s",
}
LATENCY_NAMES = {
    "ttft": "TTFT, to the first token",
    "tpot": "TPOT, a token after it",
    "itl": "ITL, between events",
    "e2e": "end to end",
}
PARTS = ("attention", "gate", "dispatch", "experts", "combine", "other", "sampling", "host")


def show(report: dict[str, Any], console: Console) -> None:
    """Tables, then what to know of them."""
    console.print(_head(report), highlight=False)
    console.print(_throughput(report))
    console.print(_latencies(report))
    if report["steps"]:
        console.print(_steps(report["steps"]))
    for line in facts(report):
        console.print(line, highlight=False, markup=False)
    for line in report["caveats"]:
        console.print(f"- {line}", highlight=False, markup=False, style="dim")
    for problem in report["problems"]:
        console.print(f"PROBLEM: {problem}", highlight=False, markup=False, style="bold red")


def _head(report: dict[str, Any]) -> str:
    settings, calls = report["settings"], report["calls"]
    lengths = (
        f"{settings['input_tokens']} in, {settings['output_tokens']} out"
        if settings["input_tokens"] is not None
        else "recorded lengths"
    )
    told = f"{calls['good']} of {calls['sent']} calls good in {report['seconds']:.1f} s"
    cut = calls["cut_short_here"]
    return (
        f"{report['model']} at {report['url']}: {settings['when']}, {lengths}; {told}"
        + (f", {calls['failed']} FAILED" if calls["failed"] else "")
        + (f", {cut} cut short here" if cut else "")
    )


def _throughput(report: dict[str, Any]) -> Any:
    from rich.table import Table

    ranks = report["gpus_are"]
    table = Table(title="Throughput", title_justify="left")
    table.add_column("")
    table.add_column("all", justify="right")
    table.add_column(f"a node (of {report['nodes']})", justify="right")
    table.add_column(f"a {ranks.removesuffix('s')} (of {report['gpus']})", justify="right")
    for name, words in RATES.items():
        rows = [report["throughput"][x][name] for x in ("all", "per_node", "per_gpu")]
        table.add_row(words, *map(number, rows))
    return table


def _latencies(report: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table(title="Latency, ms", title_justify="left")
    table.add_column("")
    for name in ("mean", "p50", "p90", "p99"):
        table.add_column(name, justify="right")
    for name, words in LATENCY_NAMES.items():
        held = report["latency_ms"][name] or {}
        table.add_row(words, *(number(held.get(x)) for x in ("mean", "p50", "p90", "p99")))
    return table


def _steps(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    title = "A step of each rank, ms: all of it, and its parts"
    table = Table(title=title, title_justify="left")
    for name in ("rank", "steps", "step"):
        table.add_column(name, justify="right")
    known = parts_of(rows)
    for part in known:
        table.add_column(part, justify="right")
    for row in rows:
        parts = (number(row["parts_ms"].get(part)) for part in known)
        table.add_row(str(row["rank"]), str(row["steps"]), number(row["step_ms"]), *parts)
    return table


def parts_of(rows: list[dict[str, Any]]) -> list[str]:
    """In the order in which a step does them, what is unknown behind."""
    found = {part for row in rows for part in row["parts_ms"]}
    return [x for x in PARTS if x in found] + sorted(found - {*PARTS})


def facts(report: dict[str, Any]) -> list[str]:
    """What has no table, a line each."""
    lines = []
    tokens = report["tokens"]
    hit = report["cache_hit_share"]
    if hit is not None:
        held = f"{tokens['cached_input']} of {tokens['input_with_cached_told']} input tokens"
        lines.append(f"prefix cache: {hit:.1%} ({held})")
    limits = report["limits"]
    if any(x is not None for x in limits.values()):
        kept = report["calls"]["within_limits"]
        words = [f"{k[:4].upper()} {v:g} ms" for k, v in limits.items() if v is not None]
        rate = report["goodput_requests_per_second"]
        lines.append(f"goodput: {number(rate)} answers/s; {kept} within {', '.join(words)}")
    if (experts := report["experts"]) is not None:
        redundant = experts["redundant_experts"]
        ranks = experts["ranks_max_over_mean"]
        lines.append(
            f"busiest expert: {experts['experts_max_over_mean']:.2f} x the mean one"
            + (f"; busiest rank {ranks:.2f} x the mean one" if ranks else "")
            + ("" if redundant is None else f"; {redundant} redundant experts a layer")
        )
    if (accepted := report["acceptance"]["accepted_share"]) is not None:
        heat = report["acceptance"]["temperature"]
        lines.append(f"acceptance: {accepted:.1%} of drafted tokens at temperature {heat:g}")
    if report["preemptions"]:
        lines.append(f"preemptions: {report['preemptions']} (the KV cache was too small)")
    told = report["generator"]
    loop = told["loop_late_ms"] or {}
    late = told["late_ms"]
    lines.append(
        f"load generator: {told['cpu_share']:.0%} of a core"
        + (f" in each of {told['workers']} processes" if told["workers"] > 1 else "")
        + f", timers {number(loop.get('p99'))} ms late at p99"
        + (f", calls {number(late['p99'])} ms late at p99" if late else "")
        + ("; IT WAS THE LIMIT" if told["was_limit"] else "; it was not the limit")
        + ("; the server did not keep up" if told["server_kept_up"] is False else "")
    )
    return lines


def number(value: float | None) -> str:
    """Three digits that count; - for what is not known."""
    if value is None:
        return "-"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 0.095 or not size else 4
    return f"{value:.{digits}f}"
