"""A toy model with a gate, an engine around it, and a count of its picks row by row.

Shared by the tests of load recording, which import it by name.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ep.group import EPGroup
from ep.load import DECODE, PREFILL, LoadWindow
from ep.placement import ExpertPlacement
from moeserve import wire
from moeserve.cache import BlockCache
from moeserve.collector import RecordingCollector
from moeserve.engine import Engine
from moeserve.plan import StepPlan
from moeserve.rank_loop import run_rank
from moeserve.recorder import StepRecorder
from moeserve.request import Request, SamplingParams
from moeserve.runner import ModelRunner
from moeserve.scheduler import ScheduleLimits, Scheduler
from moeserve.server.rehearsal import Rehearsal
from moeserve.toy_model import ToyModel

LAYERS, EXPERTS, TOP = 3, 7, 2


def gate(token: int, position: int, layer: int) -> list[int]:
    """The picks of one row: some function of what the row is."""
    first = (token * 31 + position * 7 + layer) % EXPERTS
    return [first, (first + 1 + token % (EXPERTS - 1)) % EXPERTS]


class Gated(ToyModel):
    """A toy with a gate. padded: rows of ids are filled up to a multiple of 8, as for a captured
    graph. fail_at: the forward that raises, after two layers."""

    def __init__(self, group: EPGroup | None = None, padded: bool = False, fail_at: int = -1):
        super().__init__(group=group)
        self.padded, self.fail_at = padded, fail_at

    def forward(self, batch, cache, observer=None):  # type: ignore[no-untyped-def]
        rows = list(zip(batch.token_ids.tolist(), batch.positions.tolist(), strict=True))
        for layer in range(LAYERS):
            ids = torch.tensor([gate(t, p, layer) for t, p in rows], dtype=torch.int32)
            ids = ids.reshape(-1, TOP)
            if self.padded:
                ids = torch.cat([ids, torch.full((-len(ids) % 8, TOP), 3, dtype=torch.int32)])
            observer.expert_picks(layer, ids)
            observer.rows_sent(layer, [len(rows) + layer] * (self.group.size if self.group else 1))
            if layer == 1 and self.num_forwards == self.fail_at:
                self.num_forwards += 1
                raise RuntimeError("as asked")
        return super().forward(batch, cache, observer)


def make(
    model: Gated | None = None,
    group: EPGroup | None = None,
    steps: int = 1000,
    blocks: int = 60,
    chunk: int | None = None,
) -> Engine:
    model = model or Gated(group)
    cache = BlockCache(blocks, 4, 8, True)
    pages = model.cache_spec.allocate(blocks, 4, torch.device("cpu"))
    limits = ScheduleLimits(8, 24, chunk, 128, model.config.vocab_size)
    rank = 0 if group is None else group.rank
    recorder = StepRecorder(LoadWindow(LAYERS, EXPERTS, steps), rank)
    placement = ExpertPlacement.trivial(LAYERS, EXPERTS, 1 if group is None else group.size)
    runner = ModelRunner(model, pages, cache.tables, recorder)
    info: dict[str, object] = {
        "placement": {"num_layers": LAYERS, "num_logical_experts": EXPERTS},
        "first_moe_layer": 1,
        "picks_per_token": TOP,
        "checkpoint": "gated",
    }
    return Engine(
        runner, Scheduler(cache, limits), group or EPGroup.single(), recorder, placement, info=info
    )


class Twin:
    """Counts each step's rows one by one, from plans as the scheduler made them."""

    def __init__(self, engine: Engine) -> None:
        self.steps: list[np.ndarray] = []  # [2, L, E] each
        self.tokens: list[list[int]] = []
        schedule = engine.scheduler.schedule

        def watched() -> StepPlan:
            plan = schedule()
            if plan.num_tokens or engine.group.size > 1:
                self._count(plan)
            return plan

        engine.scheduler.schedule = watched  # type: ignore[method-assign]

    def _count(self, plan: StepPlan) -> None:
        counts, tokens = np.zeros((2, LAYERS, EXPERTS), np.int64), [0, 0]
        for sequence, start, count in zip(plan.sequences, plan.starts, plan.counts, strict=True):
            known = len(sequence.tokens)
            for position in range(start, start + count):
                last = position == known - 1 and count == 1
                is_decode = last and position >= sequence.num_prompt_tokens
                tokens[is_decode] += 1
                for layer in range(LAYERS):
                    for expert in gate(sequence.tokens[position], position, layer):
                        counts[DECODE if is_decode else PREFILL, layer, expert] += 1
        self.steps.append(counts)
        self.tokens.append(tokens)

    def total(self) -> np.ndarray:
        total: np.ndarray = np.sum(self.steps, axis=0)
        return total


def ask(name: str, prompt: list[int], num: int = 5) -> Request:
    sampling = SamplingParams(max_tokens=num, temperature=0.0, ignore_eos=True)
    return Request(request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling)


def some_work(engine: Engine, rng: random.Random, count: int = 10, name: str = "") -> None:
    base = [rng.randrange(97) for _ in range(30)]
    for i in range(count):
        prompt = base[: rng.randrange(31)] + [rng.randrange(97) for _ in range(rng.randrange(1, 9))]
        engine.add_request(ask(f"{name}{i}", prompt, rng.randrange(1, 20)))


def run(engine: Engine, each: Callable[[], None] = lambda: None) -> None:
    while engine.has_work:
        engine.step()
        each()


def recorder_of(engine: Engine) -> StepRecorder:
    assert engine.recorder is not None
    return engine.recorder


def collect(engine: Engine, collector: RecordingCollector) -> None:
    for report in engine.take_load_reports():
        message = wire.decode_to_front_end(wire.encode(report))
        assert isinstance(message, type(report))
        collector.heard(message)  # type: ignore[arg-type]


class RealRank:
    """run_rank in a thread, in place of a fake one."""

    def __init__(self, job: Rehearsal, address: str) -> None:
        self.engine: Engine
        self.twin: Twin
        arguments = (job.config, EPGroup.single(), address, self._build)
        self._thread = threading.Thread(target=run_rank, args=arguments, daemon=True)
        self._thread.start()

    def _build(self, config: Any, group: EPGroup, progress: Any) -> Engine:
        self.engine = make(blocks=200)
        self.twin = Twin(self.engine)
        return self.engine

    def die(self) -> None:
        self.engine.request_stop(drain=False)
        self._thread.join(10)


def real_job(folder: Path) -> Rehearsal:
    """The HTTP server with one rank that computes; `ranks[0].twin` counts what it computes."""
    rehearsal = Rehearsal(folder, max_model_len=128)
    rehearsal._make_rank = lambda rank, address: RealRank(rehearsal, address)  # type: ignore
    return rehearsal
