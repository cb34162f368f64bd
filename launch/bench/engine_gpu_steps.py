"""Steps of an engine timed on a device: a batch that decodes, prompts from end to end.

Knows the engine's step and the spans of a trace. What engine it is: engine_gpu.py.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from launch.bench.device_trace import Span, busy_seconds, by_kernel
from moeserve.engine import Engine
from moeserve.request import Request, SamplingParams

Tracer = Callable[[torch.device, Callable[[], object]], tuple[list[Span], str]]


@dataclass(frozen=True)
class EngineSizes:
    """batches: (sequences, prompt) of decode; prompts: (how many, tokens each) of prefill, each a
    step. steps: that are timed, traced: whose kernels are looked at."""

    batches: tuple[tuple[int, int], ...] = ((1, 1024), (32, 1024), (256, 1024), (128, 4096))
    prompts: tuple[tuple[int, int], ...] = ((4, 4096), (1, 16384))
    token_budget: int = 16384
    block: int = 64
    steps: int = 24
    traced: int = 4
    graph_memory: int = 4 << 30
    graph_seconds: float = 40.0

    @classmethod
    def tiny(cls) -> EngineSizes:
        """For a walk on CPUs."""
        return cls(((1, 8), (3, 10)), ((2, 12),), token_budget=24, block=16, steps=3, traced=2)

    def outputs(self, count: int, length: int) -> int:
        """Tokens that each of `count` sequences gets: those whose prompts come first decode while
        the others' are computed."""
        prompts = -(-count * length // max(1, self.token_budget - count))
        return self.steps + self.traced + prompts + 8

    def _most(self, count: int, length: int) -> int:
        return length + self.outputs(count, length)

    @property
    def longest(self) -> int:
        return max(self._most(*each) for each in (*self.batches, *self.prompts))

    @property
    def most_sequences(self) -> int:
        return max(n for n, _ in (*self.batches, *self.prompts))

    @property
    def num_blocks(self) -> int:
        """One more than are needed: padding of a captured step may point there."""
        every = (*self.batches, *self.prompts)
        needed = [n * -(-self._most(n, length) // self.block) for n, length in every]
        return max(*needed, -(-self.longest // self.block)) + 1


@dataclass(frozen=True)
class EngineRow:
    """A phase measured. predicted: seconds of a step by the kernels' counts. idle: share of the
    time in which no kernel ran; None: nothing was traced (see note). parts: seconds of a step by
    kernel; engine: by what the host does (a device's time shows where the host waits for it)."""

    mode: str  # of engine_gpu.MODES
    what: str  # decode | prefill
    sequences: int
    context: int
    tokens_per_second: float
    step_seconds: float
    predicted: float
    launches: int
    replayed: bool
    idle: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    engine: dict[str, float] = field(default_factory=dict)
    note: str = ""
    error: str = ""

    def as_json(self) -> dict[str, object]:
        return asdict(self)


class TimedSteps:
    """Drives an engine through a batch and looks at its steps."""

    def __init__(self, engine: Engine, device: torch.device, trace: Tracer) -> None:
        self._engine, self._device, self._trace = engine, device, trace
        self._random = random.Random(0)
        self._number = 0

    def decode(self, count: int, length: int, sizes: EngineSizes) -> EngineRow:
        """Steps in which all `count` sequences decode, behind prompts of `length`."""
        waiting = self._submit(count, length, sizes.outputs(count, length))
        while waiting:
            waiting -= {output.request_id for output in self._step()}
        for _ in range(2):
            self._step()
        graphs = self._engine.runner.graphs
        replays = graphs.num_replays if graphs is not None else 0
        before = self._parts()
        times = [self._timed_step() for _ in range(sizes.steps)]
        engine = {k: v / sizes.steps for k, v in self._since(before).items()}
        replayed = graphs is not None and graphs.num_replays > replays

        def some() -> None:
            for _ in range(sizes.traced):
                self._step()

        spans, seconds, note = self._traced(some)
        self._drop()
        middle = statistics.median(times)
        context = length + sizes.steps // 2
        return EngineRow(
            "", "decode", count, context, count / middle, middle, 0.0, 0, replayed,
            *_looked_at(spans, seconds, sizes.traced), engine, note,
        )  # fmt: skip

    def prefill(self, count: int, length: int, sizes: EngineSizes) -> EngineRow:
        """Prompts from the first token to the last; the second time counts, a third is traced."""
        times, steps, engine = [], 1, {}
        for _ in range(2):
            before = self._parts()
            began = time.perf_counter()
            steps = self._run_prompts(count, length)
            times.append(time.perf_counter() - began)
            engine = {k: v / steps for k, v in self._since(before).items()}
        spans, seconds, note = self._traced(lambda: self._run_prompts(count, length))
        whole = times[-1]
        return EngineRow(
            "", "prefill", count, length, count * length / whole, whole / steps, 0.0, 0, False,
            *_looked_at(spans, seconds, steps), engine,
            note if steps == 1 else f"{note} {steps} steps".strip(),
        )  # fmt: skip

    # -- parts ---------------------------------------------------------------------------------

    def _run_prompts(self, count: int, length: int) -> int:
        """-> how many steps computed something (one that only reads the last tokens does not)."""
        before, waiting = self._engine.num_steps, self._submit(count, length, 1)
        while waiting or self._engine.has_work:
            waiting -= {output.request_id for output in self._step()}
        return max(1, self._engine.num_steps - before)

    def _submit(self, count: int, length: int, outputs: int) -> set[str]:
        vocab = self._engine.scheduler.limits.vocab_size
        assert vocab is not None
        names = set()
        for _ in range(count):
            self._number += 1
            sampling = SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True)
            prompt = tuple(self._random.randrange(vocab) for _ in range(length))
            name = f"bench-{self._number}"
            self._engine.add_request(
                Request(request_id=name, prompt_token_ids=prompt, sampling=sampling)
            )
            names.add(name)
        return names

    def _drop(self) -> None:
        scheduler = self._engine.scheduler
        self._engine.abort([s.request_id for s in (*scheduler.running, *scheduler.waiting)])
        while self._engine.has_work or scheduler.running:
            self._step()

    def _step(self) -> Sequence[Any]:
        outputs = self._engine.step()
        failed = [o for o in outputs if getattr(o, "error", None)]
        if failed:
            raise RuntimeError(str(failed[0].error))
        return outputs

    def _timed_step(self) -> float:
        began = time.perf_counter()
        self._step()
        return time.perf_counter() - began

    def _parts(self) -> dict[str, float]:
        assert self._engine.recorder is not None
        return dict(self._engine.recorder.seconds)

    def _since(self, before: dict[str, float]) -> dict[str, float]:
        return {k: v - before.get(k, 0.0) for k, v in self._parts().items()}

    def _traced(self, call: Callable[[], object]) -> tuple[list[Span], float, str]:
        """Spans, seconds of what was traced by the spans' own clock, and why there are none."""
        spans, note = self._trace(self._device, call)
        if not spans:
            return [], 0.0, note
        seconds = max(s.end for s in spans) - min(s.start for s in spans)
        return spans, seconds, note


def _looked_at(
    spans: Sequence[Span], seconds: float, steps: int
) -> tuple[float | None, dict[str, float]]:
    """Share of `seconds` in which nothing ran, and seconds of a step by kernel."""
    if not spans or not seconds:
        return None, {}
    idle = max(0.0, 1 - busy_seconds(spans) / seconds)
    return idle, {name: spent / steps for name, spent in by_kernel(spans).items()}
