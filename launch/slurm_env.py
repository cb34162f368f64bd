"""SlurmTask: what srun tells a task about its place in the step; and Slurm's lists of nodes.

A task of a step of several is one rank. A batch script, an interactive shell and a step of one task
are none: there a command starts its own ranks, as anywhere. Knows SLURM_* and their grammar (Slurm
22.05's srun man page, "output environment variables"); asks no Slurm command, opens nothing.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from moeserve.errors import ConfigError

# Below the ports that systems hand out for outgoing connections (32768 and up on Linux).
FIRST_PORT, NUM_PORTS = 15_000, 12_000
MOST_HOSTS = 100_000  # a list that names more is a slip
Item = TypeVar("Item")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_nodelist(text: str) -> list[str]:
    """Names in the list's order: `h[0-3,7],gpu01` -> h0 h1 h2 h3 h7 gpu01. Ranges keep leading
    zeros (`n[08-10]`); a name may hold several (`rack[0-1]n[0-3]`: the last one runs fastest).
    ConfigError names what cannot be read."""
    names: list[str] = []
    for part in _split(text):
        pieces = [_piece(p, text) for p in re.findall(r"\[[^\[\]]*\]|[^\[\]]+", part)]
        if part.count("[") != part.count("]") or not part.strip() or "[]" in part:
            raise _unreadable(text, f"{part!r} is no name")
        number = 1
        for piece in pieces:
            number *= len(piece)
        if len(names) + number > MOST_HOSTS:
            raise _unreadable(text, f"more than {MOST_HOSTS} nodes")
        names += ["".join(x) for x in itertools.product(*pieces)]
    return names


def _split(text: str) -> list[str]:
    """At commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for i, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise _unreadable(text, "brackets do not match")
        if letter == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    if depth:
        raise _unreadable(text, "brackets do not match")
    return [*parts, text[start:]]


def _piece(piece: str, text: str) -> list[str]:
    """What one stretch of a name stands for: itself, or the numbers in brackets."""
    if not piece.startswith("["):
        return [piece]
    found: list[str] = []
    for item in piece[1:-1].split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise _unreadable(text, f"{item!r} is no number and no range")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise _unreadable(text, f"the range {item!r} runs backwards")
        if int(last) - int(first) >= MOST_HOSTS:
            raise _unreadable(text, f"more than {MOST_HOSTS} nodes")
        found += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return found


def _unreadable(text: str, why: str) -> ConfigError:
    return ConfigError([f"list of nodes {text!r}: {why}; such as h[0-3,7],gpu01"])


def expand_counts(text: str) -> list[int]:
    """Tasks of each node: `2(x3),1` -> 2 2 2 1. ConfigError if it is none."""
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None or int(match[2] or 1) > MOST_HOSTS:
            raise ConfigError([f"tasks per node {text!r}: must be such as 4(x2),1"])
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def port_of(job: int, step: int) -> int:
    """The same on every node, another one for the next job and step: where ranks meet."""
    return FIRST_PORT + (job * 31 + step) % NUM_PORTS


@dataclass(frozen=True)
class SlurmTask:
    """One task of a step: task of num_tasks, local of num_local on its node. head: the node of task
    0. job: "JOB.STEP". threads: what --cpus-per-task says, None where it was not given."""

    task: int
    num_tasks: int
    local: int
    num_local: int
    node_name: str
    head: str
    port: int
    job: str
    threads: int | None = None

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> SlurmTask | None:
        """None where this process is no task of several. ConfigError: what is missing, broken or
        cannot be served, all of it."""
        if "SLURM_STEP_ID" not in environ or "SLURM_STEP_NUM_TASKS" not in environ:
            return None  # a batch script has SLURM_PROCID and SLURM_NTASKS too
        if environ["SLURM_STEP_NUM_TASKS"] == "1":
            return None
        problems: list[str] = []

        def number(name: str) -> int:
            value = environ.get(name)
            if value is not None and value.isdecimal():
                return int(value)
            problems.append(
                f"{name} is not set, but SLURM_STEP_ID is: use srun"
                if value is None
                else f"{name}={value!r}: must be a number >= 0"
            )
            return 0

        num_tasks, task = number("SLURM_STEP_NUM_TASKS"), number("SLURM_PROCID")
        node, local = number("SLURM_NODEID"), number("SLURM_LOCALID")
        step, job = number("SLURM_STEP_ID"), number("SLURM_JOB_ID")
        port = _reserved(environ, problems) or port_of(job, step)
        nodes = _listed(environ, "SLURM_STEP_NODELIST", expand_nodelist, problems)
        counts = _listed(environ, "SLURM_STEP_TASKS_PER_NODE", expand_counts, problems)
        if not problems:
            problems += _shape_problems(num_tasks, task, node, local, nodes, counts)
        if problems:
            raise ConfigError(problems)
        threads = environ.get("SLURM_CPUS_PER_TASK", "")
        return cls(
            task=task,
            num_tasks=num_tasks,
            local=local,
            num_local=counts[0],
            node_name=nodes[node],
            head=nodes[0],
            port=port,
            job=f"{job}.{step}",
            threads=int(threads) if threads.isdecimal() and int(threads) > 0 else None,
        )


def _listed(
    environ: Mapping[str, str],
    name: str,
    expand: Callable[[str], list[Item]],
    problems: list[str],
) -> list[Item]:
    value = environ.get(name)
    if value is None:
        problems.append(f"{name} is not set, but SLURM_STEP_ID is: use srun")
        return []
    try:
        return expand(value)
    except ConfigError as error:
        problems += [f"{name}: {p}" for p in error.problems]
        return []


def _reserved(environ: Mapping[str, str], problems: list[str]) -> int | None:
    """The first of the ports that `srun --resv-ports` set aside for this step."""
    text = environ.get("SLURM_STEP_RESV_PORTS")
    if not text:
        return None
    match = re.match(r"\d+", text)
    if match is None or not 0 < int(match[0]) < 65536:
        problems.append(f"SLURM_STEP_RESV_PORTS={text!r}: must be such as 12000-12003")
        return None
    return int(match[0])


def _shape_problems(
    num_tasks: int, task: int, node: int, local: int, nodes: list[str], counts: list[int]
) -> list[str]:
    """A step whose tasks do not lie as ranks have to: as many on each node, node after node."""
    shape = f"SLURM_STEP_TASKS_PER_NODE={','.join(map(str, counts))}"
    if len(nodes) != len(counts) or sum(counts) != num_tasks:
        return [
            f"{shape} does not fit SLURM_STEP_NUM_TASKS={num_tasks} on "
            f"{len(nodes)} nodes ({', '.join(nodes[:4])}{', ...' if len(nodes) > 4 else ''})"
        ]
    if len(set(counts)) > 1:
        return [f"{shape}: every node must run as many ranks; give srun --ntasks-per-node"]
    if node >= len(nodes) or local >= counts[0]:
        return [f"SLURM_NODEID={node}, SLURM_LOCALID={local}: not within {shape}"]
    if task != node * counts[0] + local:
        return [
            f"SLURM_PROCID={task} is task {local} of node {node}, which has {counts[0]} tasks: "
            "ranks of a node must follow each other; give srun --distribution=block"
        ]
    return []
