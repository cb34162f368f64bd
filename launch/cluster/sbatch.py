"""The batch file of a job: text that an operator can read, keep and submit by hand.

A pure function of what was asked. Knows Slurm's words; starts nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.cluster import stages
from launch.cluster.jobs import keys_apart

SCRIPT, JOB_LOG, RANK_LOG = "job.sbatch", "job.log", "rank-%t.log"


@dataclass(frozen=True)
class Ask:
    """A job of nodes x ranks_per_node ranks. gpus_per_node 0: ranks compute on CPUs. folder: seen
    by all nodes; everything of the job lies there. words: what follows `moeserve serve`."""

    nodes: int
    ranks_per_node: int
    gpus_per_node: int
    folder: Path
    words: Sequence[str]
    python: str
    home: Path  # where our packages lie
    name: str = "moeserve"
    partition: str | None = None
    account: str | None = None
    time: str | None = None
    cpus_per_rank: int | None = None
    extra: Sequence[str] = ()
    restarts: int = 0  # of all ranks, after one died

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node


def sbatch_text(ask: Ask) -> str:
    """The file. Its paths are quoted for the shell; Slurm's own lines take them as they are."""
    q = shlex.quote
    options = [
        (f"--job-name={ask.name}", ""),
        (f"--partition={ask.partition}" if ask.partition else "", ""),
        (f"--account={ask.account}" if ask.account else "", ""),
        (f"--time={ask.time}" if ask.time else "", ""),
        (f"--nodes={ask.nodes}", ""),
        (f"--ntasks-per-node={ask.ranks_per_node}", "one task is one rank"),
        (
            f"--gpus-per-node={ask.gpus_per_node}" if ask.gpus_per_node else "",
            "each rank sees all of them, for peers reach each other through them",
        ),
        (f"--cpus-per-task={ask.cpus_per_rank}" if ask.cpus_per_rank else "", ""),
        (f"--output={ask.folder / JOB_LOG}", "what Slurm says of ranks that died"),
        ("--no-requeue", "a job that failed is looked at first"),
    ]
    words, keys = keys_apart(ask.words)
    lines = [
        "#!/bin/bash",
        f"# moeserve on {ask.nodes} x {ask.ranks_per_node} ranks, by `moeserve launch slurm`."
        " To submit it by hand:",
        f"#   sbatch {q(str(ask.folder / SCRIPT))}",
        f"# The folder {ask.folder} must be one that all nodes see.",
        *(_directive(option, why) for option, why in options if option),
        *ask.extra,
        "",
        "# Ranks say here how far they are; `moeserve status` and the submitting terminal read it.",
        f"export {stages.VARIABLE}={q(stages.pattern(ask.folder))}",
        "# The same moeserve on all nodes, wherever a task starts.",
        f"export PYTHONPATH={q(str(ask.home))}${{PYTHONPATH:+:$PYTHONPATH}}",
        *(["# Not among the flags of ranks, which lists of processes show."] if keys else []),
        *(f"export {name}={q(key)}" for name, key in keys.items()),
        "",
        "# Ranks find each other by Slurm's variables. One that fails ends the others.",
    ]
    srun = ["srun --kill-on-bad-exit=1 \\"]
    if ask.cpus_per_rank:  # srun no longer takes it from the line above
        srun.append(f"  --cpus-per-task={ask.cpus_per_rank} \\")
    if ask.restarts:
        srun.append("  --open-mode=append \\")
    log = q(str(ask.folder / RANK_LOG))
    srun += [
        f"  --output={log} --error={log} \\",
        f"  {q(ask.python)} -P -m moeserve serve \\",
        "    " + " ".join(q(word) for word in words),
    ]
    lines += _again(srun, ask.restarts) if ask.restarts else [f"exec {srun[0]}", *srun[1:]]
    return "\n".join(lines) + "\n"


def _again(srun: Sequence[str], restarts: int) -> list[str]:
    return [
        "run() {",
        *(f"  {line}" for line in srun),
        "}",
        f"# All ranks start again after one died: at most {restarts} times, after 1, 2, 4 ... "
        "seconds (30 at most;",
        "# from 1 again after five good minutes). Not after wrong settings or files (exit code 2).",
        f"left={restarts} pause=1 began=$SECONDS",
        "until run; do",
        "  code=$?",
        "  if [ $code = 2 ] || [ $left = 0 ]; then exit $code; fi",
        "  if [ $((SECONDS - began)) -gt 300 ]; then pause=1; fi",
        '  echo "moeserve: exit code $code; starting again in $pause s, $left left"',
        "  sleep $pause",
        "  left=$((left - 1)) pause=$((pause < 15 ? pause * 2 : 30)) began=$SECONDS",
        "done",
    ]


def _directive(option: str, why: str) -> str:
    # Slurm reads a line up to its end, comments included where it sees no " #"; older ones do not
    # see it, so the reason stands above.
    return (f"# {why}:\n" if why else "") + f"#SBATCH {option}"


def rank_log(folder: Path, rank: int) -> Path:
    return folder / RANK_LOG.replace("%t", str(rank))
