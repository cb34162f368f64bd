#!/usr/bin/env python3
"""Prints the placement table of BENCHMARKS.md: our planner against the EPLB-equivalent policy.

    OMP_NUM_THREADS=1 python scripts/bench_placement.py TRACE.npz [--prefill NAME] [--decode NAME]

TRACE.npz: arrays [layers, experts] of counts, by name. Prefill layouts use one of them, decode
layouts another; the loads drift toward a third by a total variation of --drift.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from ep.planning.compare import LAYOUTS, compare, drift, format_table  # noqa: E402
from ep.trace import TraceError, read_trace  # noqa: E402
from models.arguments import Parser, at_least, between, file, told_in_a_line  # noqa: E402


def main() -> None:
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("trace", type=file)
    parser.add_argument("--prefill", default="prefill_in4096")
    parser.add_argument("--prefill-toward", default="prefill_in2048")
    parser.add_argument("--decode", default="decode_in2000out100")
    parser.add_argument("--decode-toward", default="decode_in1000out1000")
    parser.add_argument("--drift", type=between(0, 1), default=0.02, help="total variation, 0..1")
    parser.add_argument(
        "--repeat", type=at_least(1), default=5, help="plans timed, the quickest counts"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    for name, toward, first in (
        (args.prefill, args.prefill_toward, "EP32"),
        (args.decode, args.decode_toward, None),
    ):
        with told_in_a_line(TraceError):
            loads = read_trace(args.trace, name).totals
            later = drift(loads, read_trace(args.trace, toward).totals, args.drift)
        layouts = [one for one in LAYOUTS if one.name.startswith("EP32 ") == (first is not None)]
        rows += compare({name: loads}, layouts, drifted={name: later}, repeat=args.repeat)
    if args.json:
        print(json.dumps([row.to_dict() for row in rows]))
    else:
        print(format_table(rows))


if __name__ == "__main__":
    main()
