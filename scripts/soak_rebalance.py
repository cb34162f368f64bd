"""Soak of live rebalancing: the same prompts with it and without, over text that changes its topic.

    python scripts/soak_rebalance.py --steps 20000 --json soak.json

Serves the bundled checkpoint on --ep ranks, block after block of requests, each block of one topic
(prose, verse, Python, dictionary, ...) that lasts about --topic-seconds. First with rebalancing,
which looks at the load by itself every --interval steps; then the same requests without. Compared
are all tokens; shown are rebalances, memory of the ranks, steps, and the balance of ranks over the
busiest intervals, each under the placement that served it and under the one of the start.

Exit codes: 0 all as it should be; 1 a token differs, no rebalance was done, one was abandoned, or
memory grew.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from ep.load import balancedness
from ep.placement import ExpertPlacement
from ep.recording import ExpertRecording
from launch.output import unwritable
from models.arguments import Parser, at_least, between, checkpoint, told_in_a_line
from moeserve.errors import ConfigError
from moeserve.llm import LLM
from moeserve.request import SamplingParams

HOME = Path(__file__).resolve().parent.parent
TOPICS = ("bible", "shakespeare", "python", "wordnet")
CALIBRATION = 0.02  # of all steps: the first block, from which the length of the others follows
BUSIEST = 0.1  # of the intervals, by tokens
GROWTH = 1.1  # of a rank's memory from the second block to the last, that still counts as flat


@dataclass
class Block:
    """One topic: its requests as (text, first token) seeds, and what came of them."""

    topic: str
    num_requests: int
    seconds: float = 0.0
    steps: int = 0  # up to its end, since start
    tokens: int = 0
    digest: str = ""  # of all output tokens
    rss: list[int] = field(default_factory=list)  # of each rank
    rebalance: dict[str, Any] = field(default_factory=dict)


def main() -> int:
    options = parse()
    texts = {t: (options.checkpoint / "heldout" / f"{t}.txt").read_text() for t in options.topics}
    started = time.time()
    with_it = load(options, "with") if options.resume else None
    if with_it is None:
        with_it = run(options, texts, plan=None)
        save(options, "with", with_it)
    without = run(options, texts, plan=[(b.topic, b.num_requests) for b in with_it["blocks"]])
    result = compare(options, with_it, without)
    result["wall_seconds"] = round(time.time() - started, 1)
    show(result)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    for problem in result["problems"]:
        print(f"problem: {problem}", file=sys.stderr)
    return 1 if result["problems"] else 0


def parse() -> argparse.Namespace:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=checkpoint, default=str(HOME / "checkpoints" / "tiny"))
    parser.add_argument("--ep", type=at_least(1), default=4)
    parser.add_argument("--redundant-experts", type=at_least(0), default=4)
    parser.add_argument("--steps", type=at_least(1), default=20_000)
    parser.add_argument("--topic-seconds", type=between(0), default=60.0)
    parser.add_argument("--topic-steps", type=at_least(1), help="instead of seconds")
    parser.add_argument("--topics", nargs="+", default=list(TOPICS))
    parser.add_argument("--interval", type=at_least(1), default=250, help="steps between looks")
    parser.add_argument("--max-tokens", type=at_least(1), default=48)
    parser.add_argument("--sequences", type=at_least(1), default=4, help="running at once, a rank")
    parser.add_argument("--threshold", type=between(0, 1), default=0.97)
    parser.add_argument("--min-gain", type=between(0, 1), default=0.01)
    parser.add_argument("--json", type=Path, help="where the result goes as JSON")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="take the first run from beside --json, where it was put when it had ended",
    )
    options = parser.parse_args()
    for problem in unwritable("--json", options.json):
        parser.error(problem)
    if options.resume and options.json is None:
        parser.error("--resume: what was put beside --json, which is not given")
    held = options.checkpoint / "heldout"
    if missing := [t for t in options.topics if not (held / f"{t}.txt").is_file()]:
        known = ", ".join(sorted(x.stem for x in held.glob("*.txt"))) or "none"
        parser.error(f"argument --topics: {', '.join(missing)}: not in {held}; there are: {known}")
    return options


def save(options: argparse.Namespace, name: str, ran: dict[str, Any]) -> None:
    """A run that has ended, beside the result: the other one may be killed and begun again."""
    if options.json is not None:
        blocks = [asdict(b) for b in ran["blocks"]]
        options.json.with_suffix(f".{name}.json").write_text(json.dumps(blocks) + "\n")
        ran["recording"].save(options.json.with_suffix(f".{name}.npz"))


def load(options: argparse.Namespace, name: str) -> dict[str, Any] | None:
    """What `save` wrote, if it did."""
    if options.json is None or not options.json.with_suffix(f".{name}.npz").is_file():
        return None
    blocks = json.loads(options.json.with_suffix(f".{name}.json").read_text())
    recording = ExpertRecording.load(options.json.with_suffix(f".{name}.npz"))
    return {"blocks": [Block(**b) for b in blocks], "recording": recording}


# -- one run ------------------------------------------------------------------------------------


def run(
    options: argparse.Namespace, texts: dict[str, str], plan: list[tuple[str, int]] | None
) -> dict[str, Any]:
    """plan None: with rebalancing, blocks as long as the topic shall last; else the same blocks
    without."""
    rebalancing = plan is None
    settings: dict[str, Any] = {
        "redundant_experts": options.redundant_experts,
        "max_num_sequences": options.sequences,
        "max_model_len": 256,
        "kv_tokens": 256 * options.sequences,
        "prefix_cache": False,  # every prompt is computed
        "mtp": False,
    }
    if rebalancing:
        settings |= {
            "rebalance": True,
            "rebalance_interval_steps": options.interval,
            "rebalance_threshold": options.threshold,
            "rebalance_min_gain": options.min_gain,
        }
    sampling = SamplingParams(temperature=0, max_tokens=options.max_tokens, ignore_eos=True)
    blocks: list[Block] = []
    with LLM(options.checkpoint, ep=options.ep, **settings) as llm:
        llm.start_recording(interval_steps=50)
        wanted: Iterator[tuple[str, int]] = lengths(options, blocks) if plan is None else iter(plan)
        for number, (topic, num_requests) in enumerate(wanted):
            block = Block(topic, num_requests)
            prompts = list(cut(llm, texts[topic], number, num_requests))
            start = time.perf_counter()
            outputs = llm.generate(prompts, sampling)
            block.seconds = time.perf_counter() - start
            digest = blake2b(digest_size=16)
            for output in outputs:
                if output.error is not None:
                    raise SystemExit(f"a request failed: {output.error}")
                digest.update(np.array(output.token_ids, "<i4").tobytes())
                block.tokens += len(output.token_ids)
            block.digest = digest.hexdigest()
            stats = settled(llm, options.ep)
            block.steps = max(s.step for s in stats)
            block.rss = [s.rss_bytes for s in stats]
            if stats[0].rebalance is not None:
                block.rebalance = {
                    k: getattr(stats[0].rebalance, k) for k in stats[0].rebalance.__struct_fields__
                }
            blocks.append(block)
            print(line(block, number, rebalancing), file=sys.stderr, flush=True)
        recording = llm.stop_recording()
    return {"blocks": blocks, "recording": recording}


def lengths(options: argparse.Namespace, blocks: list[Block]) -> Iterator[tuple[str, int]]:
    """Topics in turn, with as many requests as their time has room for, until all steps are done.
    `blocks` are those that have ended."""
    per_request = options.max_tokens / (options.ep * options.sequences)  # steps, all slots full
    steps = max(1.0, CALIBRATION * options.steps)
    number = 0
    while not blocks or blocks[-1].steps < options.steps:
        if options.topic_steps is not None:
            steps = options.topic_steps
        elif len(blocks) > 1:
            last, before = blocks[-1], blocks[-2]
            steps = (last.steps - before.steps) / last.seconds * options.topic_seconds
        elif blocks:
            steps = blocks[0].steps / blocks[0].seconds * options.topic_seconds
        left = options.steps - (blocks[-1].steps if blocks else 0)
        yield (
            options.topics[number % len(options.topics)],
            max(4, round(min(steps, left) / per_request)),
        )
        number += 1


def cut(llm: LLM, text: str, number: int, num: int) -> Iterator[list[int]]:
    """num prompts out of the text, the same ones for the same block number."""
    assert llm.tokenizer is not None
    rng = random.Random(number)
    for _ in range(num):
        at = rng.randrange(max(1, len(text) - 400))
        ids = llm.tokenizer.encode(text[at : at + 400], add_special_tokens=True)
        yield ids[: rng.randrange(16, 65)]


def settled(llm: LLM, ranks: int) -> list[Any]:
    """The ranks' reports of a moment after the last request: they come once a second."""
    deadline = time.monotonic() + 10
    while True:
        stats = llm.stats()
        ended = len(stats) == ranks and all(s.num_running + s.num_waiting == 0 for s in stats)
        if ended and len({s.step for s in stats}) == 1 or time.monotonic() > deadline:
            return stats
        time.sleep(0.1)


def line(block: Block, number: int, rebalancing: bool) -> str:
    kind = "with" if rebalancing else "without"
    moved = block.rebalance
    text = (
        f"{kind:8}block {number:3} {block.topic:12} {block.num_requests:6} requests "
        f"{block.seconds:7.1f} s, step {block.steps:6}, most memory {max(block.rss) / 1e6:.0f} MB"
    )
    if moved:
        text += (
            f", rebalances {moved['done']} done {moved['nothing']} nothing "
            f"{moved['abandoned']} abandoned, utilisation {moved['utilisation']:.3f}"
        )
    return text


# -- comparison ---------------------------------------------------------------------------------


def compare(
    options: argparse.Namespace, with_it: dict[str, Any], without: dict[str, Any]
) -> dict[str, Any]:
    blocks, plain = with_it["blocks"], without["blocks"]
    last = blocks[-1].rebalance
    balance = busiest(with_it["recording"])
    growth = max(
        b / a for a, b in zip(blocks[min(1, len(blocks) - 1)].rss, blocks[-1].rss, strict=True)
    )
    differing = [
        i for i, (a, b) in enumerate(zip(blocks, plain, strict=True)) if a.digest != b.digest
    ]
    problems = []
    if differing:
        problems.append(f"tokens differ in blocks {differing}")
    if last["done"] < 1:
        problems.append("no rebalance was done")
    if last["abandoned"]:
        problems.append(f"{last['abandoned']} rebalances were abandoned: {last['last_reason']}")
    if growth > GROWTH:
        problems.append(f"a rank's memory grew by {growth:.3f}")
    return {
        "options": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
        "steps": blocks[-1].steps,
        "steps_without": plain[-1].steps,
        "tokens": sum(b.tokens for b in blocks),
        "tokens_equal": not differing,
        "seconds": round(sum(b.seconds for b in blocks), 1),
        "seconds_without": round(sum(b.seconds for b in plain), 1),
        "rebalances": {k: last[k] for k in ("done", "nothing", "abandoned")},
        "moved_slots": last["moved_slots"],
        "moved_bytes": last["moved_bytes"],
        "switch_seconds": last["switch_seconds"],
        "switch_seconds_most": last["switch_seconds_most"],
        "gather_seconds": last["gather_seconds"],
        "generation": last["generation"],
        "memory_growth": round(growth, 4),
        "memory_growth_without": round(
            max(
                b / a for a, b in zip(plain[min(1, len(plain) - 1)].rss, plain[-1].rss, strict=True)
            ),
            4,
        ),
        "balance": balance,
        "balance_without": busiest(without["recording"]),
        "blocks": [asdict(b) for b in blocks],
        "blocks_without": [asdict(b) for b in plain],
        "problems": problems,
    }


def busiest(recording: ExpertRecording) -> dict[str, float]:
    """Largest over mean rank load, mean over layers, of the busiest intervals and of all: under the
    placement in force, and under the first one on the same loads."""
    history = recording.history()  # [S, L, E]
    tokens = recording.tokens.sum(axis=1)
    order = np.argsort(-tokens, kind="stable")
    top = order[: max(1, round(BUSIEST * len(order)))]
    first = recording.placement_of(0)
    assert first is not None

    def mean(intervals: Any, fixed: ExpertPlacement | None) -> float:
        found = []
        for i in intervals:
            placement = fixed or recording.placement_of(int(i))
            assert placement is not None
            busy = history[i].sum(axis=1) > 0
            found.append(float(balancedness(history[i], placement)[busy].mean()))
        return float(np.mean(found))

    active = np.flatnonzero(tokens)
    return {
        "intervals": len(active),
        "busiest": mean(top, None),
        "busiest_at_start_placement": mean(top, first),
        "all": mean(active, None),
        "all_at_start_placement": mean(active, first),
    }


def show(result: dict[str, Any]) -> None:
    """The table on stdout."""
    rows: list[tuple[str, Any, Any]] = [
        ("steps", result["steps"], result["steps_without"]),
        ("seconds", result["seconds"], result["seconds_without"]),
        ("output tokens", result["tokens"], "the same" if result["tokens_equal"] else "DIFFERENT"),
        (
            "memory at the end / after block 1",
            result["memory_growth"],
            result["memory_growth_without"],
        ),
        ("rebalances done", result["rebalances"]["done"], ""),
        ("looks that moved nothing", result["rebalances"]["nothing"], ""),
        ("rebalances abandoned", result["rebalances"]["abandoned"], ""),
        ("slots moved", result["moved_slots"], ""),
        ("MB between ranks", round(result["moved_bytes"] / 1e6, 1), ""),
        ("longest switch, ms", round(1e3 * result["switch_seconds_most"], 2), ""),
    ]
    for name, key in (("busiest intervals", "busiest"), ("all intervals", "all")):
        here, there = result["balance"], result["balance_without"]
        rows.append((f"balance, {name}", round(here[key], 4), round(there[key], 4)))
        kept = round(here[f"{key}_at_start_placement"], 4)
        rows.append(("  the same loads, first placement", kept, ""))
    print(f"{'':40}{'rebalancing':>14}{'without':>14}")
    for name, left, right in rows:
        print(f"{name:40}{left!s:>14}{right!s:>14}")


if __name__ == "__main__":
    with told_in_a_line(ConfigError):
        sys.exit(main())
