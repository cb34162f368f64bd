"""What counting expert load costs, as a share of a step, in processor time of one thread.

    python scripts/bench_recording.py [CHECKPOINT] [--batch 1,32] [--blocks 40]

First part: the engine decodes on a checkpoint; blocks of steps alternate between counting nothing,
keeping the window (always on in serving) and recording as well, so that whatever else the machine
does hits all three alike; what a mode adds is the difference of their fastest tenths, good to
about a per cent. Second part: the recorder alone on made-up picks of the same shape (as a
share of that step) and of 58 layers of 256 experts, 8 a token, on one of 32 ranks.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path

import torch

from ep.group import EPGroup
from ep.load import LoadWindow
from ep.placement import ExpertPlacement
from moeserve.build import LOAD_WINDOW_STEPS, build_engine
from moeserve.config import CacheSection, EngineSection, ModelSection, ScheduleSection, ServeConfig
from moeserve.engine import Engine
from moeserve.plan import StepPlan
from moeserve.recorder import StepRecorder
from moeserve.request import Request, SamplingParams

BLOCK = 32  # steps between two changes; two rounds of what the recorder gathers
MODES = ("off", "window", "recording")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, nargs="?", default=Path("checkpoints/tiny"))
    parser.add_argument("--batch", default="1,32")
    parser.add_argument("--blocks", type=int, default=40)
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
    """Microseconds of a decode step by mode, and what window and recording add, in per cent."""
    length = 8 + BLOCK * len(MODES) * 4
    config = ServeConfig(
        model=ModelSection(checkpoint=checkpoint),
        cache=CacheSection(kv_tokens=batch * (length + 16) + 16),
        schedule=ScheduleSection(max_num_sequences=batch, token_budget=max(512, batch)),
        engine=EngineSection(),
    )
    engine = build_engine(config, EPGroup.single())
    recorder = engine.recorder
    assert recorder is not None
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    number = 0
    rng = random.Random(0)
    while len(times["off"]) < blocks:
        submit(engine, batch, length, rng, number)
        number += 1
        engine.step()
        while len(engine.scheduler.running) == batch and any(
            s.num_remaining_tokens > 1 for s in engine.scheduler.running
        ):
            engine.step()
        for _ in range(3):
            order = list(MODES)
            rng.shuffle(order)
            for mode in order:
                times[mode].append(run_block(engine, recorder, mode, number))
        while engine.has_work:
            engine.step()
        engine.take_load_reports()
    engine.close()
    window = recorder.window
    assert window is not None
    top = engine.info["picks_per_token"]
    assert isinstance(top, int)
    alone = measure_recorder(window.num_layers, window.num_experts, top, batch, 1)
    fastest = {mode: statistics.quantiles(times[mode], n=10)[0] for mode in MODES}
    base = fastest["off"]
    row: dict[str, object] = {"checkpoint": checkpoint.name, "batch": batch, "step_us": base * 1e6}
    for mode in MODES[1:]:
        row[f"{mode}_adds_percent"] = (fastest[mode] / base - 1) * 100
    row |= alone
    row["recorder_percent"] = alone["recorder_us"] / base / 1e4
    return row


def run_block(engine: Engine, recorder: StepRecorder, mode: str, number: int) -> float:
    """Seconds a step over a block; what was gathered is counted within it."""
    recorder.counting = mode != "off"
    if mode == "recording":
        engine.start_recording(number, 64)
    start = time.process_time()
    for _ in range(BLOCK):
        engine.step()
        engine.take_load_reports()
    _ = recorder.totals
    seconds = (time.process_time() - start) / BLOCK
    if mode == "recording":
        engine.stop_recording(number)
        recorder.agreed(0)
    return seconds


def submit(engine: Engine, batch: int, length: int, rng: random.Random, number: int) -> None:
    top = engine.scheduler.limits.vocab_size
    assert top is not None
    for i in range(batch):
        prompt = tuple(rng.randrange(top) for _ in range(8))
        sampling = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        request = Request(request_id=f"{number}-{i}", prompt_token_ids=prompt, sampling=sampling)
        engine.add_request(request)


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
    main()
