"""What `bench speculate` found, as a table and as JSON. Knows rows (`speculate_figures`) and rich;
nothing of how they were made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.bench.screen import wide_console
from launch.bench.speculate_flags import Asked
from moeserve.terminal import counted

FORMAT = "moeserve bench speculate 1"
SHOWN = 5  # positions in the table
TOLD = (
    *("speedup", "speedup_quartiles", "acceptance", "drafted", "accepted", "predicted"),
    *("predicted_with_verify", "mean_accepted", "tokens_per_step", "same_tokens"),
)
UNSTEADY = 2.0  # times: pairs of a row that differ more are worth a word


@dataclass(frozen=True)
class Result:
    """rows: as measured. prompts: where they come from, in words. rule: same or rejection."""

    asked: Asked
    rows: list[dict[str, Any]]
    checkpoint: str
    ep: int
    rule: str
    prompts: str
    info: dict[str, Any]
    machine: dict[str, Any]
    threads: int  # of a rank

    def made_on(self) -> str:
        m = self.machine
        changed = ", with changes" if m.get("changed") else ""
        commit = f", moeserve commit {m['commit']}{changed}" if m["commit"] else ""
        load = f", load {m['load']:.1f}" if m.get("load") is not None else ""
        return f"{m['cpu']}, {counted(m['cores'], 'core')}{load}, torch {m['torch']}{commit}"


def as_json(result: Result) -> dict[str, Any]:
    """The first row's figures stand at the top too: for the one drafter of a usual call."""
    asked, first = result.asked, result.rows[0]
    return {
        "format": FORMAT,
        "checkpoint": result.checkpoint,
        "drafter": first["drafter"],
        "depth": first["depth"],
        "batch": first["batch"],
        "ep": result.ep,
        "temperature": asked.temperature,
        **{name: first[name] for name in TOLD},
        "rule": result.rule,
        "prompt_length": asked.prompt_length,
        "output_length": asked.output_length,
        "repeat": asked.repeat,
        "seed": asked.seed,
        "prompts": result.prompts,
        "rows": [{**row, "ep": result.ep, "temperature": asked.temperature} for row in result.rows],
        "info": {k: v for k, v in result.info.items() if k not in ("notes", "kv_plan")},
        "threads": result.threads,
        "machine": result.machine,
        "commit": result.machine["commit"],
    }


def show(result: Result) -> None:
    """The table on stdout, and what must be known to read it."""
    from rich.table import Table

    asked = result.asked
    table = Table(
        title=f"{result.checkpoint}: speculation against none, ep {result.ep}, temperature "
        f"{asked.temperature:g}, {counted(result.threads, 'thread')} a rank"
    )
    accepted = f"accepted (T={asked.temperature:g})"
    for name in (
        *("batch", "drafter", "k", "speed-up", "middle half", "predicted", "with verify"),
        *(accepted, "a run", "tokens/step", "round", "verify", "same"),
    ):
        left = name in ("drafter", accepted)
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    batch = result.rows[0]["batch"]
    for row in result.rows:
        if row["batch"] != batch:
            table.add_section()
            batch = row["batch"]
        table.add_row(*_cells(row))
    console = wide_console()
    console.print(table)
    for line in told(result):
        console.print(line, highlight=False)


def _cells(row: dict[str, Any]) -> list[str]:
    depth = row["depth"]
    k = f"auto ({row['mean_depth']:.1f})" if depth == "auto" else str(depth)
    if row["tree_nodes"]:
        k += f" of {row['tree_nodes']}"
    return [
        str(row["batch"]),
        short(row["drafter"]),
        k,
        f"{row['speedup']:.2f}",
        "{:.2f}-{:.2f}".format(*row["speedup_quartiles"]),
        f"{row['predicted']:.2f}",
        f"{row['predicted_with_verify']:.2f}",
        _by_position(row["acceptance"]),
        f"{row['mean_accepted']:.2f}",
        f"{row['tokens_per_step']:.2f}",
        f"{row['cost_ratio']:.2f}",
        f"{row['verify_ratio']:.2f}",
        {True: "yes", False: "NO", None: "-"}[row["same_tokens"]],
    ]


def short(drafter: str) -> str:
    """Without the folders above a path's last; without that where it says the same again."""
    name, _, path = drafter.partition(":")
    last = Path(path).name
    return name if last in ("", name) else f"{name}:{last}"


def _by_position(shares: list[float | None]) -> str:
    """Those that were tried, which are the first ones."""
    tried = [x for x in shares if x is not None]
    shown = " ".join(f"{x:.2f}" for x in tried[:SHOWN])
    return (shown or "nothing drafted") + (" ..." if len(tried) > SHOWN else "")


def unsteady(result: Result) -> list[str]:
    """A line where pairs of a row differ so much that its median says little."""
    times = max(row["speedup_most"] / row["speedup_least"] for row in result.rows)
    if times < UNSTEADY:
        return []
    load, cores = result.machine.get("load"), result.machine["cores"]
    if load is not None and load > cores:
        why = f"the machine is busy (load {load:.1f}, {counted(cores, 'core')})"
    else:
        why = "more of them (--repeat) or longer ones (--output-length) would tell more"
    return [f"pairs differ {times:.3g} x: {why}"]


def told(result: Result) -> list[str]:
    """Sentences below the table."""
    asked = result.asked
    lengths = f"{asked.prompt_length}+{asked.output_length} tokens"
    lines = [
        f"decode of {counted(asked.repeat, 'pair')} a row, {lengths}, prompts: {result.prompts}; "
        "speed-up: median of the pairs, one right after the other, and the middle half of them",
        f"accepted: share of the drafts at each position of a run, at temperature "
        f"{asked.temperature:g}; a run: drafts accepted in one; tokens/step: of a sequence; round, "
        "verify: time of a round of drafting, of a step that verifies, over a step without drafts",
        "predicted: (1 - a^(k+1)) / ((1 - a)(1 + c k)), a from tokens/step, c the round; it takes "
        "verify to be 1; with verify: the same with the measured one in place of the 1",
        *unsteady(result),
    ]
    if any(row["tree_nodes"] for row in result.rows):
        lines.append("k of n: trees of n drafts at most, k behind each other")
    if result.rule != "same":
        lines.append(
            f"rule {result.rule}: other tokens than without drafts are right, not compared"
        )
    return [*lines, result.made_on()]
