"""Host work of a decode step by part, at so many sequences: all but the model, in processor time.

    python scripts/bench_host_step.py [--sequences 1,32,256] [--steps 400] [--vocab 4096]

The engine's own parts in the order of `Engine.step`, on one thread, with a stub in place of the
model that returns logits it made before: schedule, batch (tensors of the step), vote (the lockstep
of one rank: building and reading it, no network), sample (greedy; and at temperature 0.7, top-p
0.95), commit, wire (Outputs encoded by the rank and decoded by the front end). Processor time, so
that other work on the machine does not count; the median over steps. Prints a table, then one line
of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ep.group import EPGroup
from launch.bench.machine import describe_machine
from models.arguments import Parser, at_least, several
from moeserve import wire
from moeserve.batch import build_batch
from moeserve.cache import BlockCache
from moeserve.engine import Engine
from moeserve.plan import StepPlan
from moeserve.request import Request, SamplingParams
from moeserve.runner import ModelRunner
from moeserve.scheduler import ScheduleLimits, Scheduler
from moeserve.toy_model import ToyConfig, ToyModel

PARTS = ("schedule", "batch", "vote", "sample", "commit", "wire")
WAYS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature 0.7, top-p 0.95": {"temperature": 0.7, "top_p": 0.95},
}
BLOCK_SIZE, PROMPT, WARM_UP = 16, 64, 20


@dataclass
class Clock:
    """Microseconds of each part, a list with an entry a step."""

    parts: dict[str, list[float]] = field(default_factory=lambda: {x: [] for x in PARTS})

    def time(self, part: str, work: Callable[..., Any], *arguments: Any) -> Any:
        start = time.thread_time_ns()
        done = work(*arguments)
        self.parts[part].append((time.thread_time_ns() - start) / 1e3)
        return done


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--sequences", type=several(at_least(1)), default="1,32,256")
    parser.add_argument("--steps", type=at_least(1), default=400)
    parser.add_argument("--vocab", type=at_least(2), default=4096)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for way, sampling in WAYS.items():
        for count in map(int, options.sequences.split(",")):
            rows.append({"way": way, "sequences": count} | measure(count, sampling, options))
    print(f"{'us a step':30}{'sequences':>10}" + "".join(f"{x:>10}" for x in (*PARTS, "all")))
    for row in rows:
        cells = "".join(f"{row[x]:10.1f}" for x in (*PARTS, "all"))
        print(f"{row['way']:30}{row['sequences']:10}{cells}")
    about = {"vocab": options.vocab, "steps": options.steps, "load": os.getloadavg()[0]}
    print(json.dumps(about | {"machine": describe_machine(), "rows": rows}))


def measure(
    count: int, sampling: dict[str, float], options: argparse.Namespace
) -> dict[str, float]:
    """Microseconds of a step by part, medians; "all" is the median of the steps' sums."""
    engine = filled(count, sampling, options.steps, options.vocab)
    scheduler, runner = engine.scheduler, engine.runner
    logits = torch.randn(count, options.vocab)
    clock = Clock()
    for number in range(WARM_UP + options.steps):
        if number == WARM_UP:
            clock = Clock()
        plan = clock.time("schedule", scheduler.schedule)
        assert len(plan.sampled) == count, "all sequences decode in each step"
        batch = clock.time("batch", build_batch, plan, runner.tables.matrix, BLOCK_SIZE, None)
        clock.time("vote", vote, engine, plan)
        with torch.inference_mode():
            result = clock.time("sample", runner.choose, plan, batch, logits)
        outputs = clock.time("commit", scheduler.commit, plan, result)
        assert len(outputs) == count
        clock.time("wire", to_front_end_and_back, outputs)
    every = zip(*clock.parts.values(), strict=True)
    medians = {part: statistics.median(values) for part, values in clock.parts.items()}
    return medians | {"all": statistics.median(map(sum, every))}


def vote(engine: Engine, plan: StepPlan) -> None:
    engine.lockstep.agree(engine._vote(plan))


def to_front_end_and_back(outputs: list[Any]) -> None:
    wire.decode_to_front_end(wire.encode(wire.Outputs(0, tuple(outputs))))


def filled(count: int, sampling: dict[str, float], steps: int, vocab: int) -> Engine:
    """An engine whose sequences all decode from now on."""
    length = PROMPT + WARM_UP + steps + 2
    blocks = count * (-(-length // BLOCK_SIZE) + 1)
    cache = BlockCache(blocks, BLOCK_SIZE, count, True)
    model = Stub(ToyConfig(vocab_size=vocab))
    pages = model.cache_spec.allocate(blocks, BLOCK_SIZE, torch.device("cpu"))
    limits = ScheduleLimits(count, count * PROMPT, None, length, vocab)
    engine = Engine(
        ModelRunner(model, pages, cache.tables), Scheduler(cache, limits), EPGroup.single()
    )
    for number in range(count):
        prompt = tuple((number * 7919 + k * 104729) % vocab for k in range(PROMPT))
        params = SamplingParams(max_tokens=WARM_UP + steps + 1, ignore_eos=True, **sampling)  # type: ignore[arg-type]
        engine.add_request(
            Request(request_id=f"r{number}", prompt_token_ids=prompt, sampling=params)
        )
    for _ in range(3):  # their prompts, and a token each
        if len(engine.scheduler.running) == count and not engine.scheduler.waiting:
            break
        engine.step()
    return engine


class Stub(ToyModel):
    """Logits at once, whatever it is asked."""

    def forward(self, batch: Any, cache: Any, observer: Any = None, halves: bool = False) -> Any:
        from models.interface import ForwardOutput

        rows = batch.logits_rows.shape[0]
        hidden = torch.zeros(batch.num_tokens, 1)
        return ForwardOutput(hidden=hidden, logits=torch.randn(rows, self.config.vocab_size))


if __name__ == "__main__":
    main()
