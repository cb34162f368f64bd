"""What counting expert load costs, as a share of a step, in processor time of one thread.

    python scripts/bench_recording.py [CHECKPOINT] [--batch 1,32] [--blocks 12]

First part: the engine decodes on a checkpoint; blocks of steps alternate between no recorder at
all and TIMES of them at once, each keeping its window and a recording of the same picks, so that
what one costs stands out of whatever else the machine does. Second part: a recorder alone on
made-up picks, of 58 layers of 256 experts, 8 a token, on one of 32 ranks.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

from ep.group import EPGroup
from ep.load import LoadWindow
from ep.placement import ExpertPlacement
from models.arguments import Parser, at_least, checkpoint, several, told_in_a_line
from moeserve.build import LOAD_WINDOW_STEPS, build_engine
from moeserve.config import CacheSection, ModelSection, ScheduleSection, ServeConfig
from moeserve.engine import Engine
from moeserve.errors import ConfigError
from moeserve.plan import StepPlan
from moeserve.recorder import StepRecorder
from moeserve.request import Request, SamplingParams

BLOCK = 32  # steps between two changes; two rounds of what a recorder gathers
TIMES = 20


class Many:
    """TIMES recorders in place of the engine's own; off: none of them counts."""

    def __init__(self, own: StepRecorder, make: Callable[[], StepRecorder]) -> None:
        self.own, self.every = own, [make() for _ in range(TIMES)]
        self.counting = True
        for recorder in self.every:
            recorder.start_recording(1, 64)
            recorder.agreed(1)
        own.counting = False

    def begin_step(self, plan: StepPlan, placement: ExpertPlacement | None) -> None:
        if self.counting:
            for recorder in self.every:
                recorder.begin_step(plan, placement)

    def expert_picks(self, layer: int, ids: torch.Tensor) -> None:
        if self.counting:
            for recorder in self.every:
                recorder.expert_picks(layer, ids)

    def rows_sent(self, layer: int, rows: list[int]) -> None:
        if self.counting:
            for recorder in self.every:
                recorder.rows_sent(layer, rows)

    def end_step(self, step: int, seconds: float) -> None:
        if self.counting:
            for recorder in self.every:
                recorder.end_step(step, seconds)

    def finish(self) -> None:
        """Count what was gathered, so that a block pays for its own steps."""
        for recorder in self.every:
            _ = recorder.totals
            recorder.take_reports()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("checkpoint", type=checkpoint, nargs="?", default="checkpoints/tiny")
    parser.add_argument("--batch", type=several(at_least(1)), default="1,32")
    parser.add_argument("--blocks", type=at_least(1), default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    for batch in map(int, options.batch.split(",")):
        rows.append(measure_engine(options.checkpoint, batch, options.blocks))
        print(describe(rows[-1]), file=sys.stderr, flush=True)
    for batch in map(int, options.batch.split(",")):
        rows.append({"recorder": "58 x 256, 8 a token", **measure_recorder(58, 256, 8, batch, 32)})
        print(describe(rows[-1]), file=sys.stderr, flush=True)
    print(json.dumps(rows))


def describe(row: dict[str, object]) -> str:
    return ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())


def measure_engine(checkpoint: Path, batch: int, blocks: int) -> dict[str, object]:
    """Microseconds of a decode step without a recorder, and what one adds."""
    length = 8 + 2 * BLOCK * blocks
    config = ServeConfig(
        model=ModelSection(checkpoint=checkpoint),
        cache=CacheSection(kv_tokens=batch * (length + 16) + 16),
        schedule=ScheduleSection(max_num_sequences=batch, token_budget=max(512, 8 * batch)),
    )
    engine = build_engine(config, EPGroup.single())
    own = engine.recorder
    assert own is not None and own.window is not None
    layers, experts = own.window.num_layers, own.window.num_experts
    many = Many(own, lambda: StepRecorder(LoadWindow(layers, experts, LOAD_WINDOW_STEPS)))
    engine.recorder = engine.runner.recorder = cast(StepRecorder, many)
    submit(engine, batch, length)
    engine.step()  # all prompts at once
    off, on = [], []
    for _ in range(blocks):
        off.append(run_block(engine, many, counting=False))
        on.append(run_block(engine, many, counting=True))
    engine.close()
    added = statistics.median(b - a for a, b in zip(off, on, strict=True)) / TIMES
    return {
        "checkpoint": checkpoint.name,
        "batch": batch,
        "step_us": statistics.median(off) * 1e6,
        "recorder_us": added * 1e6,
        "percent": added / statistics.median(off) * 100,
    }


def run_block(engine: Engine, many: Many, counting: bool) -> float:
    """Seconds a step."""
    many.counting = counting
    start = time.process_time()
    for _ in range(BLOCK):
        engine.step()
    many.finish()
    return (time.process_time() - start) / BLOCK


def submit(engine: Engine, batch: int, length: int) -> None:
    top, rng = engine.scheduler.limits.vocab_size, random.Random(0)
    assert top is not None
    sampling = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    for i in range(batch):
        prompt = tuple(rng.randrange(top) for _ in range(8))
        engine.add_request(Request(request_id=str(i), prompt_token_ids=prompt, sampling=sampling))


def measure_recorder(
    layers: int, experts: int, top: int, batch: int, ranks: int
) -> dict[str, float]:
    """Microseconds a step of counting and recording, on picks as a gate of that shape gives."""
    recorder = StepRecorder(LoadWindow(layers, experts, LOAD_WINDOW_STEPS))
    placement = ExpertPlacement.trivial(layers, experts, ranks, ranks)
    picks = [torch.randint(0, experts, (batch, top), dtype=torch.int32) for _ in range(layers)]
    rows = [[batch] * ranks for _ in range(layers)]
    plan = StepPlan(num_tokens=batch, decodes=list(range(batch)), counts=[1] * batch)
    recorder.start_recording(1, 64)
    recorder.agreed(1)
    times = []
    for block in range(20):
        start = time.process_time()
        for step in range(64):
            recorder.agreed(1)
            recorder.begin_step(plan, placement)
            for layer in range(layers):
                recorder.expert_picks(layer, picks[layer])
                recorder.rows_sent(layer, rows[layer])
            recorder.end_step(block * 64 + step + 1, 0.01)
        recorder.take_reports()
        times.append((time.process_time() - start) / 64)
    return {"batch": batch, "recorder_us": statistics.median(times) * 1e6}


if __name__ == "__main__":
    with told_in_a_line(ConfigError):
        main()
