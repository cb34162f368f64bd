"""Throughput of a node at several EP degrees, the efficiency, and what each term of a step costs.

    python scripts/bench_ep_scaling.py [CHECKPOINT] [--ep 1,2,4] [--batch 8,32] [--rounds 3]

Runs `moeserve bench offline` at each degree in turn, one thread a rank, in an order that rotates,
and once more at EP 1 with a thread for each core. Efficiency is tokens/s over those of EP 1 on one
thread times the cores that N ranks can have: of four ranks on two cores two at most. Figures are
medians over rounds; ratios are of pairs of a round. Prints Markdown tables, then one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from launch.bench.figures import paired_ratio
from launch.bench.machine import describe_machine
from launch.bench.offline import PARTS
from launch.env import usable_cores
from models.arguments import Parser, at_least, checkpoint, several

Key = tuple[int, int]  # ranks, threads of each


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("checkpoint", type=checkpoint, nargs="?", default="checkpoints/tiny")
    parser.add_argument("--ep", type=several(at_least(1)), default="1,2,4", help="1 among them")
    parser.add_argument("--batch", type=several(at_least(1)), default="8,32")
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--output-length", type=at_least(1), default=24)
    parser.add_argument("--prefill-length", type=at_least(1), default=512)
    options = parser.parse_args()
    if "1" not in options.ep.split(","):
        parser.error(f"argument --ep: {options.ep}: 1 must be among them: others stand beside it")
    cores = usable_cores()
    cases: list[Key] = [(int(x), 1) for x in options.ep.split(",")]
    if cores > 1:
        cases.append((1, cores))
    found: dict[Key, list[dict[str, Any]]] = {case: [] for case in cases}
    for number in range(options.rounds):
        turn = number % len(cases)
        for case in cases[turn:] + cases[:turn]:
            found[case].append(run(options, *case))
            print(f"round {number}: EP {case[0]}, {case[1]} threads", file=sys.stderr, flush=True)
    rows = list(table(found, cores))
    print("| what | ranks x threads | tokens/s a node | tokens/s a rank | efficiency |")
    print("|---|---:|---:|---:|---:|")
    for row in rows:
        print(
            f"| {row['what']} | {row['ranks']} x {row['threads']} | {row['node']:.0f} "
            f"| {row['rank']:.0f} | {row['efficiency']:.2f} |"
        )
    print(f"\n| ms of a step | ranks x threads | step | {' | '.join(PARTS)} |")
    print(f"|---|---:|{'---:|' * (len(PARTS) + 1)}")
    for row in rows:
        parts = " | ".join(f"{row['parts'][part]:.2f}" for part in PARTS)
        where = f"{row['ranks']} x {row['threads']}"
        print(f"| {row['what']} | {where} | {row['step_ms']:.2f} | {parts} |")
    about = {"options": vars(options), "load": os.getloadavg()[0], "machine": describe_machine()}
    print(json.dumps(about | {"rows": rows}, default=str))


def run(options: argparse.Namespace, ep: int, threads: int) -> dict[str, Any]:
    """The rows of one command, by what and batch."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        command = [
            *(sys.executable, "-m", "moeserve", "bench", "offline", str(options.checkpoint)),
            *("--ep", str(ep), "--threads", str(threads), "--batch", options.batch, "--quiet"),
            *("--output-length", str(options.output_length), "--prompt-length", "32"),
            *("--prefill-length", str(options.prefill_length), "--repeat", "2"),
            *("--out", str(file)),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"EP {ep}: {done.stderr.strip()}", file=sys.stderr)
            sys.exit(done.returncode)
        rows = json.loads(file.read_text())["rows"]
    return {f"decode {x['batch']}" if x["what"] == "decode" else "prefill": x for x in rows}


def table(found: dict[Key, list[dict[str, Any]]], cores: int) -> Any:
    """A row for each thing measured and each case."""
    for what in found[1, 1][0]:
        alone = [x[what]["tokens_per_second"] for x in found[1, 1]]
        for (ranks, threads), runs in found.items():
            speeds = [x[what]["tokens_per_second"] for x in runs]
            most = min(ranks * threads, cores)
            yield {
                "what": what,
                "ranks": ranks,
                "threads": threads,
                "node": statistics.median(speeds),
                "rank": statistics.median(speeds) / ranks,
                "efficiency": paired_ratio(speeds, alone) / most,
                "step_ms": statistics.median(x[what]["step_ms"] for x in runs),
                "parts": {
                    part: statistics.median(x[what]["parts"][part] for x in runs) for part in PARTS
                },
                "runs": speeds,
            }


if __name__ == "__main__":
    main()
